"""PPO learns the same with any number of replicas, and handles ends of episodes correctly."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shoal.algorithms import ALGORITHMS, PPO, PRESETS, ppo
from shoal.envs import Box, Discrete
from shoal.rl import normalise
from shoal.rl.rollouts import Batch, Rollout
from unit.drift import drift

KEY = jax.random.PRNGKey(0)
SMALL = PPO(num_steps=8, update_epochs=2, num_minibatches=2, hidden=(8,))


ENVS = [drift(Discrete(3)), drift(Box(-1.0, 1.0, (2,)))]


def divide(state, replicas):
    """A state for each replica, stacked: its part of the rows, and all of the learner."""
    learner = jax.tree.map(lambda x: jnp.stack([x] * replicas), state.learner)
    rows = jax.tree.map(lambda x: jnp.stack(jnp.split(x, replicas)), state._replace(learner=()))
    return rows._replace(learner=learner)


@partial(jax.jit, static_argnums=(0, 1))
def two_ticks(algorithm, env, state):
    """The state after two ticks, and the metrics of the second."""
    state, metrics = jax.lax.scan(lambda s, _: algorithm.tick(env, s), state, length=2)
    return state, jax.tree.map(lambda x: x[1], metrics)


@pytest.mark.parametrize("env", ENVS)
def test_replicas_learn_the_same_as_one(monkeypatch, env):
    algorithm = replace(SMALL, norm_obs=True, norm_reward=True)
    state = algorithm.init(KEY, env, envs=4)
    alone, metrics = two_ticks(algorithm, env, state)

    for module in (ppo, normalise):
        monkeypatch.setattr(module, "mean", lambda tree: jax.lax.pmean(tree, "replicas"))
    # JAX would reuse the trace of an equal algorithm from before `mean` was replaced.
    twin = replace(algorithm, gae_lambda=algorithm.gae_lambda + 1e-12)
    run = jax.vmap(partial(two_ticks, twin, env), axis_name="replicas")
    together, parts = run(divide(state, 2))

    close = partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5)
    jax.tree.map(close, together, divide(alone, 2))
    for name, metric in metrics.items():
        expected = metric.reshape(2, 2) if metric.ndim else jnp.stack([metric] * 2)
        close(parts[name], expected)


@pytest.mark.parametrize("env", ENVS)
def test_an_environment_starts_and_acts_the_same_in_any_batch_size(env):
    few, many = (SMALL.init(KEY, env, envs) for envs in (2, 5))
    jax.tree.map(
        np.testing.assert_array_equal,
        few._replace(learner=()),
        jax.tree.map(lambda x: x[:2], many._replace(learner=())),
    )
    shared = {"params": few.learner.params.acting, "obs_moments": few.learner.obs_moments}
    acted = (SMALL.act(s.keys, s.obs, s.memory, **shared) for s in (few, many))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[:2], rtol=1e-5), *acted)


@pytest.mark.parametrize("env", ENVS)
def test_a_tick_keeps_the_state_s_spec_and_its_metrics_are_finite(env):
    state = SMALL.init(KEY, env, envs=3)
    after, metrics = SMALL.tick(env, state)
    spec = partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert spec(after) == spec(state)
    scalars = {name for name, metric in metrics.items() if metric.ndim == 0}
    assert scalars == {
        "loss",
        "policy_loss",
        "value_loss",
        "entropy",
        "approx_kl",
        "clip_fraction",
        "explained_variance",
        "grad_norm",
        "learning_rate",
    }
    assert set(metrics) - scalars == {"episodes", "episode_return", "episode_length"}
    assert all(np.all(np.isfinite(metric)) for metric in metrics.values())
    assert np.all(metrics["episodes"] >= 2)
    assert np.all(metrics["episode_length"] <= 8)


def test_an_advantage_ends_with_its_episode():
    env = ENVS[0]
    learner = SMALL.init(KEY, env, envs=3).learner
    learner = learner._replace(
        params=learner.params._replace(critic=jax.tree.map(jnp.ones_like, learner.params.critic))
    )
    rng = np.random.default_rng(0)
    terminated, truncated = np.zeros((2, 8, 3), bool)
    terminated[3, 0], truncated[3, 1], truncated[7, 2] = True, True, True
    obs, last_obs = rng.normal(size=(2, 9, 3, 2)).astype(np.float32)
    rollout = Rollout(
        obs[:8],
        np.zeros((8, 3), np.int32),
        np.zeros((8, 3), np.float32),
        rng.normal(size=(8, 3)).astype(np.float32),
        terminated,
        truncated,
        last_obs[:8],
        obs[8],
    )
    plain = replace(SMALL, norm_adv=False)
    batch = plain.compute_advantages(learner, jax.tree.map(jnp.asarray, rollout), ())

    def value(obs):
        return 8 * np.tanh(obs.sum() + 1) + 1

    for i in range(3):
        advantage = 0.0
        for t in reversed(range(8)):
            follows = last_obs[t, i] if truncated[t, i] else obs[t + 1, i]
            bootstrap = 0.0 if terminated[t, i] else SMALL.gamma * value(follows)
            td_error = rollout.reward[t, i] + bootstrap - value(obs[t, i])
            continues = not (terminated[t, i] or truncated[t, i])
            advantage = td_error + SMALL.gamma * SMALL.gae_lambda * continues * advantage
            np.testing.assert_allclose(batch.advantage[t, i], advantage, rtol=1e-3, atol=1e-3)


def test_every_step_is_learnt_from_once_an_epoch():
    """With a rate of 0 nothing changes, so the mean loss of an epoch is that of the rollout."""
    algorithm = replace(SMALL, learning_rate=1e-30, norm_adv=False)
    whole = replace(algorithm, num_minibatches=1, update_epochs=1)
    state = algorithm.init(KEY, ENVS[0], envs=2)
    _, parts = algorithm.tick(ENVS[0], state)
    _, all_at_once = whole.tick(ENVS[0], state)
    for name in ("policy_loss", "value_loss", "entropy"):
        np.testing.assert_allclose(parts[name], all_at_once[name], rtol=1e-4, atol=1e-6)


def test_the_learning_rate_falls_to_nothing():
    algorithm = replace(SMALL, anneal_lr=True, total_ticks=1)
    first, _ = algorithm.tick(ENVS[0], algorithm.init(KEY, ENVS[0], envs=2))
    second, _ = algorithm.tick(ENVS[0], first)
    jax.tree.map(np.testing.assert_array_equal, first.learner.params, second.learner.params)


def test_the_value_clip_limits_the_critics_update():
    free, held = (replace(SMALL, clip_eps_vf=clip) for clip in (None, 1e-3))
    params = SMALL.init(KEY, ENVS[0], envs=2).learner.params
    zeros = jnp.zeros((4, 2))
    batch = Batch(
        features=jnp.ones((4, 2, 2)),
        action=jnp.zeros((4, 2), int),
        log_prob=zeros,
        value=zeros - 9.0,
        target=zeros - 9.0,
        advantage=zeros,
        weight=(),
    )
    loss, clipped_loss = (algorithm.loss(params, batch)[1] for algorithm in (free, held))
    assert clipped_loss["value_loss"] >= loss["value_loss"]


def test_observations_of_any_shape_and_type_are_seen_flat():
    moments = normalise.init_moments((3, 2))
    assert SMALL.features(jnp.ones((3, 2), bool), moments).shape == (6,)
    assert SMALL.features(jnp.ones((5, 4, 3, 2), jnp.uint8), moments).shape == (5, 4, 6)
    assert SMALL.features(jnp.ones((3, 2), bool), moments).dtype == jnp.float32


def test_every_preset_is_of_its_algorithm():
    assert {"CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0"} <= set(
        PRESETS["ppo"]
    )
    for name, presets in PRESETS.items():
        for preset in presets.values():
            assert isinstance(preset.algorithm, ALGORITHMS[name])
            assert not getattr(preset.algorithm, "total_ticks", 0)  # the run fills it in


def test_updates_end_where_the_policy_is_too_far():
    state = SMALL.init(KEY, ENVS[0], envs=4)
    settings = {"update_epochs": 4, "num_minibatches": 2, "learning_rate": 0.1}
    free = replace(SMALL, **settings)
    for target in (1e-4, 1e9):
        after, metrics = replace(free, target_kl=target).tick(ENVS[0], state)
        made = optax.tree_utils.tree_get(after.learner.opt_state, "count")
        assert int(made) == round(8 * (1 - float(metrics["updates_skipped"])))
        assert (int(made) == 8) == (target == 1e9)
    assert int(made) > 0


def test_a_critic_s_own_learning_rate_scales_its_updates_alone():
    own = replace(SMALL, critic_learning_rate=3 * SMALL.learning_rate)
    params = SMALL.init(KEY, ENVS[0], envs=2).learner.params
    grads = jax.tree.map(jnp.ones_like, params)
    one, other = (a.optimiser.update(grads, a.optimiser.init(params))[0] for a in (SMALL, own))
    jax.tree.map(np.testing.assert_array_equal, one.actor, other.actor)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(3 * x, y, rtol=1e-5), one.critic, other.critic
    )
