"""SAC, TD3 and DDPG: each loss has its own gradient, and bad settings are rejected."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.algorithms import DDPG, SAC, TD3
from shoal.algorithms import sac as sac_file
from shoal.algorithms import td3 as td3_file
from shoal.envs.spaces import Box
from shoal.errors import SettingError
from shoal.rl.critics import Sizes, init_actor, init_critics, q_values
from shoal.rl.transitions import Transition
from shoal.rl.unit_actions import deterministic_action, squashed_normal

SEES, DOES, COUNT = 3, 2, 5
KEYS = jax.random.split(jax.random.key(0), 8)
YES, NO = jnp.bool(1), jnp.bool(0)
SIZES = Sizes(Box(-1, 1, (SEES,)), DOES, (4,))


def batch(discount):
    obs, action, next_obs = (
        jax.random.normal(key, (COUNT, size))
        for key, size in zip(KEYS[:3], (SEES, DOES, SEES), strict=True)
    )
    reward = jnp.arange(COUNT) * 1.0
    return Transition(obs, jnp.tanh(action), reward, jnp.full(COUNT, discount), next_obs)


def td3_nets(critics=2):
    actor = init_actor(KEYS[3], SIZES, DOES)
    return td3_file.Params(actor, init_critics(KEYS[4], SIZES, critics))


def td3_grads(algorithm, discount=0.9, turn=YES, noise=1.0):
    nets = td3_nets(algorithm.num_critics)
    sample = td3_file.Sample(batch(discount), jnp.full((COUNT, DOES), noise))
    return jax.grad(algorithm.loss, has_aux=True)(nets, nets, sample, turn)


def test_the_target_is_that_of_the_lower_critic_at_a_nearby_action():
    algorithm, nets, seen = TD3(), td3_nets(), batch(0.9)
    nearby = np.clip(np.asarray(deterministic_action(nets.actor, seen.next_obs)) + 0.2, -1, 1)
    lower = np.min(q_values(nets.critics, seen.next_obs, jnp.array(nearby)), axis=0)
    target = np.asarray(seen.reward) + 0.9 * lower
    guess = np.asarray(q_values(nets.critics, seen.obs, seen.action))
    _, parts = td3_grads(algorithm)
    wanted = np.sum(np.mean((guess - target) ** 2 / 2, axis=1))
    np.testing.assert_allclose(parts["critic_loss"], wanted, rtol=1e-4)
    # The clip bounds noise of any size.
    _, far = td3_grads(algorithm, noise=1e3)
    _, farther = td3_grads(algorithm, noise=1e6)
    np.testing.assert_allclose(far["critic_loss"], farther["critic_loss"])


def test_the_actor_moves_in_its_turn_only_and_up_the_first_critic():
    moved, _ = td3_grads(TD3(), turn=YES)
    still, parts = td3_grads(TD3(), turn=NO)
    assert all(np.any(x != 0) for x in jax.tree.leaves(moved.actor))
    assert all(np.all(x == 0) for x in jax.tree.leaves(still.actor))
    assert parts["actor_loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, moved.critics, still.critics)
    nets, seen = td3_nets(), batch(0.9)

    def value_of(actor):
        return jnp.mean(q_values(nets.critics[:1], seen.obs, deterministic_action(actor, seen.obs)))

    up = jax.grad(value_of)(nets.actor)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, -y, atol=1e-6), moved.actor, up)


def test_ddpg_is_td3_without_its_three_additions():
    plain = TD3(num_critics=1, policy_frequency=1, policy_noise=0.0)
    same = [td3_grads(algorithm) for algorithm in (plain, DDPG())]
    jax.tree.map(np.testing.assert_array_equal, *same)
    assert DDPG() != plain  # and it keeps its own name


def sac_grads(algorithm, discount=0.9):
    actor = init_actor(KEYS[5], SIZES, 2 * DOES)
    critics = init_critics(KEYS[6], SIZES, 2)
    nets = sac_file.Params(actor, critics, jnp.float32(-1.0))
    sample = sac_file.Sample(batch(discount), jax.random.normal(KEYS[7], (COUNT, 2, DOES)))
    return nets, sample, *jax.grad(algorithm.loss, has_aux=True)(nets, critics, sample)


def test_sac_s_losses_are_their_formulas_and_each_has_its_own_slope():
    nets, sample, grads, parts = sac_grads(SAC(reward_scale=2.0))
    seen, noise = sample
    heat = np.exp(-1.0)
    done, log_prob = squashed_normal(nets.actor, seen.next_obs).at(noise[:, 0])
    lower = np.min(q_values(nets.critics, seen.next_obs, done), axis=0)
    target = 2 * np.asarray(seen.reward) + 0.9 * (lower - heat * np.asarray(log_prob))
    guess = np.asarray(q_values(nets.critics, seen.obs, seen.action))
    wanted = np.sum(np.mean((guess - target) ** 2 / 2, axis=1))
    np.testing.assert_allclose(parts["critic_loss"], wanted, rtol=1e-4)
    done, log_prob = squashed_normal(nets.actor, seen.obs).at(noise[:, 1])
    lower = np.min(q_values(nets.critics, seen.obs, done), axis=0)
    np.testing.assert_allclose(
        parts["actor_loss"], np.mean(heat * np.asarray(log_prob) - lower), rtol=1e-4
    )
    # The temperature's slope is how far entropy is above minus the number of entries.
    np.testing.assert_allclose(grads.log_alpha, -np.mean(log_prob) + DOES, rtol=1e-4)

    def critics_only(critics):
        return jnp.sum(
            jnp.mean((q_values(critics, seen.obs, seen.action) - target) ** 2 / 2, axis=1)
        )

    wanted = jax.grad(critics_only)(nets.critics)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), grads.critics, wanted)


def test_where_a_task_ended_the_target_is_the_reward_alone():
    seen = batch(0.0)
    nets, _, _, parts = sac_grads(SAC(), 0.0)
    for critics, lost in ((nets.critics, parts), (td3_nets().critics, td3_grads(TD3(), 0.0)[1])):
        errors = np.asarray(q_values(critics, seen.obs, seen.action)) - np.asarray(seen.reward)
        wanted = np.sum(np.mean(errors**2 / 2, axis=1))
        np.testing.assert_allclose(lost["critic_loss"], wanted, rtol=1e-4)


@pytest.mark.parametrize("kind", [SAC, TD3, DDPG])
def test_bad_settings_and_spaces_are_rejected(kind):
    with pytest.raises(SettingError, match="updates of 16 windows"):
        kind(samples_per_insert=3.0)
    with pytest.raises(SettingError, match="replay of 8 steps"):
        kind(buffer_size_per_env=8)
    pytest.importorskip("gymnax")
    with pytest.raises(SettingError, match="Discrete"):
        shoal.train(kind(), "CartPole-v1")


def moved_by(algorithm):
    """How far an update with slopes of 1 moves the parameters."""
    if isinstance(algorithm, TD3):
        params = td3_nets()
        start = algorithm.optimisers
        opt_state = td3_file.Params(*(o.init(x) for o, x in zip(start, params, strict=True)))
        nets, grads = (params, params, opt_state), jax.tree.map(jnp.ones_like, params)
        after = algorithm.apply(nets, grads, td3_file.Params(YES, YES))[0]
    else:
        params = sac_grads(algorithm)[0]
        opt_state, grads = algorithm.optimiser.init(params), jax.tree.map(jnp.ones_like, params)
        after = algorithm.apply(params, params.critics, opt_state, grads, YES)[0]
    return jax.tree.map(jnp.subtract, after, params)


@pytest.mark.parametrize("kind", [SAC, TD3])
def test_a_critic_s_own_learning_rate_scales_its_updates_alone(kind):
    wanted, ours = (moved_by(kind(critic_learning_rate=rate)) for rate in (None, 9e-4))
    jax.tree.map(np.testing.assert_array_equal, ours.actor, wanted.actor)
    close = partial(np.testing.assert_allclose, rtol=1e-2)
    jax.tree.map(lambda x, y: close(x, 3 * y), ours.critics, wanted.critics)
