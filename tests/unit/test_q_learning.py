"""DQN and R2D2: networks, settings, and the memory at the start of each chunk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.envs.spaces import Box
from shoal.rl import q_network
from shoal.rl.q_network import Shape, init_q_network
from shoal.rl.q_values import epsilon_greedy

pytest.importorskip("gymnax")

from shoal.algorithms import DQN, R2D2


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
