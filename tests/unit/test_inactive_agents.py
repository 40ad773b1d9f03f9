"""An agent that has ended before the others counts in no number until the episode ends."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.algorithms import A2C, IMPALA, IPPO, MAPPO, PPO
from shoal.envs import Box, Discrete, Environment, HostEnvironment, Transition
from shoal.envs.host import Moves, close_all, step_rows
from shoal.rl import losses, normalise

KEY = jax.random.key(0)
SMALL = {"num_steps": 8, "hidden": (8,), "learning_rate": 0.1}
EPOCHS = {"update_epochs": 2, "num_minibatches": 2}
NORM = {"norm_obs": True, "norm_reward": True}
ALGORITHMS = [
    PPO(**SMALL, **EPOCHS, **NORM, decoupled=True),
    PPO(**SMALL, **EPOCHS, memory="gru", sequence_length=2),
    A2C(**SMALL, norm_obs=True),
    IMPALA(**SMALL, **NORM),
    MAPPO(**SMALL, **EPOCHS),
    IPPO(**SMALL, **EPOCHS, memory="gru", sequence_length=4),
]


@dataclass(frozen=True)
class Relay:
    """The first agent ends after 3 steps, the second after 5; `rest` is what an ended row holds."""

    rest: float = 0.0
    agents = ("short", "long")
    observation_space = Box(-np.inf, np.inf, (2,))
    action_space = Discrete(2)

    def reset(self, key):
        place = jax.random.normal(key, (2,))
        return (place, jnp.int32(0)), self.show(place, jnp.int32(0))

    def step(self, key, state, action):
        place, time = state
        place = place + 0.1 * (2 * action - 1) + 0.1 * jax.random.normal(key, (2,))
        time = time + 1
        ended = jnp.array([3, 5]) <= time
        had_ended = jnp.array([3, 5]) < time
        reward = jnp.where(had_ended, self.rest, -jnp.abs(place))
        terminated = ended & ~had_ended if self.rest else ended
        obs = jnp.where(had_ended[:, None], self.rest, self.show(place, time))
        return Transition((place, time), obs, reward, terminated, had_ended & (self.rest != 0))

    def show(self, place, time):
        return jnp.stack([place, jnp.full(2, time / 5)], axis=1)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{type(a).__name__} {a.memory}")
def test_the_row_of_an_ended_agent_has_no_effect(algorithm):
    def trained(rest):
        env = Environment("relay", Relay(rest))
        state = algorithm.init(KEY, env, 4)
        ticks = jax.jit(lambda s: jax.lax.scan(lambda s, _: algorithm.tick(env, s), s, length=3))
        state, metrics = ticks(state)
        return state.learner.params, metrics

    def equal(got, wanted):  # up to rounding, as they are different programs
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)

    jax.tree.map(equal, trained(np.nan), trained(0.0))


def played(env, steps=12):
    """The steps of 2 environments with random actions."""

    def move(carry, key):
        states, _ = carry
        action = jax.random.randint(key, (2, 2), 0, 2)
        states, step = env.step(states, action)
        return (states, step.obs), step

    start = env.reset(jax.random.split(KEY, 2))
    return [np.asarray(x) for x in jax.lax.scan(move, start, jax.random.split(KEY, steps))[1]]


def test_an_ended_agent_is_inactive_sees_zeros_and_earns_nothing():
    obs, reward, terminated, truncated, last_obs, returns, lengths, active = played(
        Environment("relay", Relay(rest=7.0))
    )
    time = np.arange(12) % 5
    np.testing.assert_array_equal(active[:, 0, 0], time < 3)
    assert active[:, :, 1].all()
    ended = ~active
    assert not last_obs[ended].any()
    assert not reward[ended].any()
    assert terminated[ended].all()
    assert not truncated[ended].any()
    assert not obs[(time == 2) | (time == 3), :, 0].any()
    assert last_obs[time == 2, :, 0].any()
    np.testing.assert_array_equal(lengths[:, 0], time + 1)
    total = np.cumsum(reward[:5].mean(axis=2), axis=0)
    np.testing.assert_allclose(returns[:5], total, rtol=1e-5)


class Rows:
    """`Relay` in Python, its first agent's row full of sevens once it has ended."""

    def __init__(self, n):
        self.time, self.n = 0, n

    def reset(self):
        return (np.ones((self.n, 2, 1), np.float32),)

    def step(self, action):
        self.time += 1
        obs = np.ones((self.n, 2, 1), np.float32)
        reward, over = np.ones((self.n, 2), np.float32), np.zeros((self.n, 2), bool)
        late = over.copy()
        late[:, 1] = self.time == 5
        over[:, 0] = self.time == 3
        if self.time > 3:
            obs[:, 0], reward[:, 0] = 7, 7
        last = obs
        if self.time == 5:
            self.time, obs = 0, np.ones_like(obs)
        return Moves((obs,), reward, over, late, (last,), reward.mean(axis=1))

    def close(self):
        pass


@dataclass(frozen=True)
class HostRelay:
    agents = ("short", "long")
    observation_space = Box(-9.0, 9.0, (1,))
    action_space = Discrete(2)

    def open(self, seeds):
        return Rows(len(seeds))


def test_an_ended_agent_of_a_host_environment_is_inactive_too():
    rules, seeds, steps = HostRelay(), np.arange(2, dtype=np.uint32), np.zeros(2, np.int32)
    shown = []
    try:
        for _ in range(7):
            steps, *rest = step_rows(rules, seeds, steps, np.zeros((2, 2), np.int32))
            shown.append(rest)
    finally:
        close_all()
    obs, reward, terminated, truncated, last_obs, _, lengths, active = (
        np.stack(x) for x in zip(*shown, strict=True)
    )
    assert active[:, 0, 0].tolist() == [True, True, True, False, False, True, True]
    assert active[:, :, 1].all()
    assert reward[:, 0, 0].tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert last_obs[:, 0, 0, 0].tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert obs[:, 0, 0, 0].tolist() == [1, 1, 0, 0, 1, 1, 1]
    assert terminated[:, 0, 0].tolist() == [False, False, True, True, True, False, False]
    assert not truncated[:, :, 0].any()
    assert lengths[:, 0].tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert HostEnvironment("relay", rules).agents == rules.agents


def test_losses_and_statistics_are_means_over_active_agents():
    rng = np.random.default_rng(0)
    active = rng.random((6, 3, 2)) < 0.6
    x = rng.normal(3, 2, (6, 3, 2)).astype(np.float32)
    weight = normalise.weight_of_active(jnp.asarray(active))
    parts = {"policy_loss": x, "value_loss": 2 * x, "entropy": x - 1}
    loss, means = losses.actor_critic(jax.tree.map(jnp.asarray, parts), weight, 0.5, 0.1)
    for name, part in parts.items():
        np.testing.assert_allclose(means[name], part[active].mean(), rtol=1e-5)
    np.testing.assert_allclose(loss, (2 * x - 0.1 * (x - 1))[active].mean(), rtol=1e-5)

    moments = normalise.update_moments(normalise.init_moments(), jnp.asarray(x), weight)
    np.testing.assert_allclose(moments.mean, x[active].mean(), rtol=1e-5)
    np.testing.assert_allclose(moments.var, x[active].var(), rtol=1e-4)

    got = normalise.standardise(jnp.asarray(x), weight)
    there = x[active]
    np.testing.assert_allclose(got, (x - there.mean()) / there.std(), rtol=1e-3, atol=1e-4)
