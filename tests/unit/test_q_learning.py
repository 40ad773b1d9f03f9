"""DQN and R2D2: networks, settings, and the memory at the start of each chunk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.envs.spaces import Box
from shoal.rl import q_network
from shoal.rl.optimise import importance_exponent
from shoal.rl.q_network import Shape, action_atoms, init_q_network, with_noise
from shoal.rl.q_values import epsilon_greedy

pytest.importorskip("gymnax")

from shoal.algorithms import DQN, R2D2
from shoal.envs import make


def test_two_streams_differ_by_the_actions_mean_advantage_alone():
    shape = Shape((8,), "auto", actions=3, atoms=2, dueling=True)
    net = init_q_network(jax.random.key(0), Box(-1, 1, (4,)), shape)
    x = jax.random.normal(jax.random.key(1), (5, 4))
    atoms = q_network.action_atoms(net, x, 2)
    assert atoms.shape == (5, 3, 2)
    value = q_network.dense(net.value, q_network.encode(net, x))
    np.testing.assert_allclose(atoms.mean(axis=1), value, atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_random_actions_have_the_probability_epsilon(epsilon):
    keys = jax.random.split(jax.random.key(0), 4000)
    q_values = jnp.array([0.0, 2.0, 1.0, -1.0])
    took = jax.vmap(lambda key: epsilon_greedy(key, q_values, epsilon))(keys)
    share = np.bincount(np.asarray(took), minlength=4) / len(keys)
    wanted = np.full(4, epsilon / 4) + np.array([0, 1 - epsilon, 0, 0])
    np.testing.assert_allclose(share, wanted, atol=0.04)


SMALL = R2D2(
    num_steps=4, batch_size_per_env=1, samples_per_insert=4.0, burn_in=4, sequence_length=8,
    learning_starts_per_env=12, buffer_size_per_env=24, hidden=(8,),
    memory_width=8, learning_rate=1e-30, epsilon=(1.0, 1.0),
)  # fmt: skip


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_each_chunk_starts_with_the_memory_after_the_previous_one(memory):
    algorithm, env = dataclasses.replace(SMALL, memory=memory), shoal.envs.make("CartPole-v1")
    state = jax.jit(lambda: algorithm.init(jax.random.key(0), env, 3))()
    tick, unroll = jax.jit(lambda state: algorithm.tick(env, state)[0]), jax.jit(q_network.unroll)
    for _ in range(6):
        state = tick(state)
    chunks, params = state.chunks.ring.steps, state.learner.params
    ended = chunks.steps.terminated | chunks.steps.truncated
    assert np.any(ended), "no episode has ended, so nothing was to be forgotten"
    for row in range(3):
        for chunk in range(5):
            before = jax.tree.map(lambda x, at=(row, chunk): x[at], chunks)
            is_first_t = jnp.concatenate([jnp.zeros(1, bool), ended[row, chunk, :-1]])
            last, _ = unroll(params, before.memory, before.steps.obs, is_first_t)
            last = jax.tree.map(lambda x, over=ended[row, chunk, -1]: jnp.where(over, 0, x), last)
            then = jax.tree.map(lambda x, at=(row, chunk + 1): x[at], chunks.memory)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), last, then)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DQN(num_steps=3, batch_size_per_env=2, samples_per_insert=1.0),
            "1.5 updates of 2 windows",
        ),
        (lambda: DQN(learning_starts_per_env=2, n_step=3), "windows of 3"),
        (lambda: DQN(buffer_size_per_env=32, learning_starts_per_env=64), "replay of 32 steps"),
        (lambda: DQN(values="quantil"), "unknown form of values `quantil`"),
        (lambda: R2D2(burn_in=7), "burn_in=7 .* not multiples of num_steps=16"),
        (
            lambda: DQN(buffer_size_per_env=10**10),
            "buffer_size_per_env=10000000000 of DQN is out of range",
        ),
        (lambda: R2D2(memory="transformer"), "can't keep `transformer`"),
    ],
)
def test_invalid_settings_are_rejected(make, message):
    with pytest.raises(shoal.ShoalError, match=message):
        make()


def test_burn_in_is_optional():
    graph = shoal.trace(
        dataclasses.replace(SMALL, burn_in=0), shoal.envs.make("CartPole-v1"), envs=2
    )
    assert "learn" in {stage.name for stage in graph.stages}


@pytest.mark.parametrize("algorithm", [DQN(hidden=(8,)), SMALL], ids=["dqn", "r2d2"])
def test_the_best_action_is_played_without_exploring(algorithm):
    env = shoal.envs.make("CartPole-v1")
    state = jax.jit(lambda: algorithm.init(jax.random.key(0), env, 2))()
    played, memory = [], None
    for _ in range(2):
        action, memory = algorithm.play(None, state, state.obs[0], memory)
        played.append(int(action))
    assert set(played) <= {0, 1}
    assert (memory is None) == isinstance(algorithm, DQN)


def test_noise_is_factorised_and_its_std_is_learnt():
    shape = Shape((6,), "auto", actions=3, dueling=True, noise=0.5)
    net = init_q_network(jax.random.key(0), Box(-1, 1, (4,)), shape)
    assert with_noise(net, None) is net
    drawn = jax.vmap(lambda key: with_noise(net, key))(jax.random.split(jax.random.key(1), 4000))
    noise = np.asarray(drawn.advantage.weight - net.advantage.weight)
    std = 0.5 / 6**0.5
    # E[f(x)²] = E|x| = √(2/π) for each factor.
    np.testing.assert_allclose(noise.std(0), std * (2 / np.pi) ** 0.5, rtol=0.1)
    np.testing.assert_allclose(noise.mean(0), 0, atol=0.03)
    np.testing.assert_allclose(np.linalg.svd(noise[:5], compute_uv=False)[:, 1:], 0, atol=1e-5)
    np.testing.assert_array_equal(drawn.torso, net.torso)

    def total(net):
        return jnp.sum(action_atoms(with_noise(net, jax.random.key(2)), jnp.ones(4), 1))

    slopes = jax.grad(total)(net)
    assert all(np.any(x != 0) for x in jax.tree.leaves(slopes.noise[0]))


@pytest.mark.slow
def test_noisy_networks_and_an_annealed_exponent_keep_their_numbers_when_cut():
    algorithm = DQN(
        num_steps=2, batch_size_per_env=2, samples_per_insert=2.0, learning_starts_per_env=4,
        hidden=(4,), noise=0.5, epsilon=(0.0, 0.0), priority_exponent=0.6, anneal_importance=True,
        total_ticks=4,
    )  # fmt: skip
    found = shoal.verify(algorithm, make("CartPole-v1"), shoal.multi_learner(2), envs=4, ticks=4)
    assert found.holds, str(found)


def test_the_importance_exponent_rises_to_1_with_the_run():
    annealed = DQN(importance_exponent=0.4, anneal_importance=True, total_ticks=10)
    ticks = jnp.arange(12)
    wanted = np.minimum(0.4 + 0.06 * np.arange(12), 1)
    np.testing.assert_allclose(importance_exponent(annealed, ticks), wanted, rtol=1e-5)
    assert importance_exponent(DQN(), ticks) == 0.4
