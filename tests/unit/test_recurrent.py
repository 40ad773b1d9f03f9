"""Memory in the loop: learning uses the memory of acting; lag is corrected for or rejected."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.algorithms import A2C, IMPALA, PPO
from shoal.envs import Box, Discrete
from shoal.errors import CutError, SettingError, UnknownNameError
from shoal.rl import actor_critic
from shoal.rl.actor_critic import forward
from shoal.rl.memory import start
from shoal.rl.policy import distribution
from shoal.rl.rollouts import Batch, Rollout
from unit.drift import drift

KEY = jax.random.PRNGKey(0)
STEPS, PUSHES = drift(Discrete(3)), drift(Box(-1.0, 1.0, (2,)))
SMALL = PPO(num_steps=8, update_epochs=1, num_minibatches=1, hidden=(8,), memory_width=8)
close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)


@partial(jax.jit, static_argnums=(0, 1))
def tick(algorithm, env, state):
    return algorithm.tick(env, state)


@partial(jax.jit, static_argnums=(0, 1))
def three_ticks(algorithm, env, state):
    """The state after three ticks, and the metrics of each."""
    return jax.lax.scan(lambda s, _: algorithm.tick(env, s), state, length=3)


@pytest.mark.parametrize("kind", ["gru", "lstm", "transformer"])
def test_learning_has_the_memory_of_acting(kind):
    """In the first update of a tick all probability ratios are 1, in each piece."""
    algorithm = replace(SMALL, memory=kind, sequence_length=4, learning_rate=1e-301)
    state = algorithm.init(KEY, STEPS, envs=8)
    after, metrics = three_ticks(algorithm, STEPS, state)
    close(metrics["approx_kl"], np.zeros(3), atol=1e-6)
    assert np.all(np.isfinite(metrics["loss"]))
    assert any(np.any(x) for x in jax.tree.leaves(after.memory))


def test_memory_is_reset_when_an_episode_ends():
    algorithm = replace(
        SMALL, memory="gru", num_steps=3
    )  # every episode has ended after three steps
    state, metrics = tick(algorithm, PUSHES, algorithm.init(KEY, PUSHES, envs=2))
    ended = metrics["episode_length"] == 3
    assert np.any(ended)
    assert not np.any(np.asarray(state.memory)[ended])


def test_pieces_lose_nothing_but_gradients_through_their_ends():
    still = replace(SMALL, memory="lstm", learning_rate=1e-30)
    state = still.init(KEY, STEPS, envs=2)
    whole, halves, steps = (
        tick(replace(still, sequence_length=n), STEPS, state)[1] for n in (8, 4, 1)
    )
    for name in ("policy_loss", "value_loss", "entropy"):
        close(halves[name], whole[name])
        close(steps[name], whole[name])


def test_without_lag_decoupled_ppo_is_ppo():
    plain = replace(SMALL, update_epochs=2, num_minibatches=2)
    state = plain.init(KEY, STEPS, envs=2)
    one, other = (three_ticks(a, STEPS, state) for a in (plain, replace(plain, decoupled=True)))
    jax.tree.map(close, one, other)


def test_the_decoupled_loss_clips_at_the_proximal_policy_and_weights_by_the_behaviour_policy():
    """Equation 3 of Hilton et al. (2022): π_prox / π_behaviour · the clipped surrogate."""
    algorithm = replace(SMALL, decoupled=True)
    params = algorithm.init(KEY, STEPS, envs=2).learner.params
    rng = np.random.default_rng(0)
    behaviour, proximal, advantage = rng.normal(size=(3, 6)).astype(np.float32) / 3 - 1
    zeros = jnp.zeros(6)
    weight = np.exp(proximal - behaviour)
    features, action = jnp.array(rng.normal(size=(6, 2)), jnp.float32), jnp.zeros(6, int)
    seen = (features, action, jnp.array(proximal), zeros, zeros, jnp.array(advantage))
    _, parts = algorithm.loss(params, Batch(*seen, (), importance=jnp.array(weight)))
    now = actor_critic.policy_and_value(params, features)[0].log_prob(action)
    ratio = np.exp(np.asarray(now) - proximal)
    held = np.clip(ratio, 0.8, 1.2)
    wanted = -np.mean(weight * np.minimum(ratio * advantage, held * advantage))
    close(parts["policy_loss"], wanted)


def a_rollout(algorithm, learner):
    """Random steps with random ends, and their probabilities under the learner's policy."""
    rng = np.random.default_rng(1)
    terminated, truncated = rng.random((2, 8, 3)) < 0.2
    truncated &= ~terminated
    obs, other = rng.normal(size=(2, 9, 3, 2)).astype(np.float32)
    last = np.where((terminated | truncated)[..., None], other[:8], obs[1:])
    action, reward = rng.normal(size=(8, 3, 2)), rng.normal(size=(8, 3))
    led_to = (jnp.float32(reward), jnp.array(terminated), jnp.array(truncated), jnp.array(last))
    memory = start(learner.params.memory, (3,))
    made = Rollout(jnp.array(obs[:8]), jnp.float32(action), (), *led_to, jnp.array(obs[8]), memory)
    seen = forward(learner.params, lambda x: algorithm.features(x, learner.obs_moments), made)
    return made._replace(
        log_prob=distribution(learner.params.actor, seen.seen).log_prob(made.action)
    )


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_without_lag_impala_s_gradient_is_a2c_s(memory):
    settings = {"hidden": (8,), "memory": memory, "memory_width": 8, "num_steps": 8}
    learner = A2C(**settings).init(KEY, PUSHES, envs=3).learner
    rollout = a_rollout(A2C(**settings), learner)
    one, other = (
        algorithm.grad(learner.params, learner.obs_moments, rollout)[0]
        for algorithm in (A2C(**settings), IMPALA(**settings))
    )
    jax.tree.map(close, one, other)


def test_a2c_s_loss_is_its_formula():
    algorithm = A2C(num_steps=8, hidden=(8,))
    learner = algorithm.init(KEY, PUSHES, envs=3).learner
    rollout = a_rollout(algorithm, learner)
    _, (parts, _) = algorithm.loss(learner.params, learner.obs_moments, rollout)
    value, final = (
        np.asarray(actor_critic.value(learner.params, x)) for x in (rollout.obs, rollout.last_obs)
    )
    advantage = np.zeros((9, 3))
    for t in reversed(range(8)):
        bootstrap = algorithm.gamma * ~rollout.terminated[t] * final[t]
        continues = ~(rollout.terminated | rollout.truncated)[t]
        td_error = rollout.reward[t] + bootstrap - value[t]
        advantage[t] = td_error + algorithm.gamma * continues * advantage[t + 1]
    close(parts["policy_loss"], -np.mean(advantage[:8] * rollout.log_prob))
    close(parts["value_loss"], 0.5 * np.mean(advantage[:8] ** 2))
    close(parts["loss"], parts["policy_loss"] + 0.5 * parts["value_loss"] - 0.01 * parts["entropy"])


LATE = [shoal.single_learner_coarse(2, lag=1), shoal.impala(2), shoal.decoupled(2, 1, 1, lag=1)]


@pytest.mark.parametrize("late", LATE)
def test_a2c_with_a_lag_is_rejected_and_alternatives_are_named(late):
    graph = shoal.trace(A2C(num_steps=2, hidden=(4,)), STEPS, envs=4)
    with pytest.raises(
        CutError, match=r"`learn/grad` is on-policy.*lagged `learner\.params"
    ) as caught:
        shoal.plan(graph, late)
    assert "IMPALA" in str(caught.value)
    assert "a2c.py" in str(caught.value)


@pytest.mark.parametrize("algorithm", [IMPALA, PPO])
def test_algorithms_that_correct_for_a_lag_accept_one(algorithm):
    graph = shoal.trace(algorithm(num_steps=4, hidden=(4,)), STEPS, envs=4)
    for late in LATE:
        assert shoal.plan(graph, late).channels


def test_workers_whose_gradients_are_late_are_on_policy_themselves():
    """A3C: a worker acts with the parameters at which it computes the gradient."""
    graph = shoal.trace(A2C(num_steps=2, hidden=(4,)), STEPS, envs=4)
    plan = shoal.plan(graph, shoal.central(2, max_lag=1))
    assert plan.ends("worker") == 2  # no worker waits for another
    lags, losses_seen = [], []

    def watch(tick, metrics):
        lags.extend(metrics["lag"])
        losses_seen.append(metrics["loss"])

    for backend in ("inline", "threads"):
        shoal.run(plan, backend, ticks=10, watch=watch)
    assert len(lags) == 20  # the gradients of one worker a tick
    assert max(lags) <= 1
    assert np.all(np.isfinite(losses_seen))


def test_settings_that_can_t_work_are_rejected():
    with pytest.raises(SettingError, match="sequences of 3"):
        PPO(num_steps=32, num_minibatches=2, memory="gru", sequence_length=3)
    with pytest.raises(UnknownNameError, match="gru"):
        replace(SMALL, memory="grue").init(KEY, STEPS, envs=2)
