"""Environments reset automatically, keep each episode's last observation, and are plain data."""

import pickle
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.envs import Box, Discrete, Environment, Transition, episode_totals, make, registry
from shoal.envs.environment import clip
from shoal.errors import MissingExtraError, SettingError, UnknownNameError

gymnax = pytest.importorskip("gymnax")
from shoal.envs import gymnax as family  # noqa: E402

MUST_WORK = [
    "CartPole-v1",
    "Acrobot-v1",
    "Pendulum-v1",
    "MountainCarContinuous-v0",
    "Breakout-MinAtar",
    pytest.param("Asterix-MinAtar", marks=pytest.mark.slow),
    pytest.param("Freeway-MinAtar", marks=pytest.mark.slow),
    pytest.param("Seaquest-MinAtar", marks=pytest.mark.slow),
    pytest.param("SpaceInvaders-MinAtar", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Walk:
    """Starts in 0..9, moves by -1, 0 or 1, terminates at 12, is truncated after 4 steps."""

    observation_space = Box(-4.0, 13.0, (1,))
    action_space = Discrete(3)

    def reset(self, key):
        place = jax.random.randint(key, (), 0, 10)
        return {"place": place, "time": 0}, jnp.float32(place)[None]

    def step(self, key, state, action):
        place, time = state["place"] + action - 1, state["time"] + 1
        after = {"place": place, "time": time}
        return Transition(after, place[None] * 1.0, 1.0 * place, place >= 12, time >= 4)


def keys(count, seed=0):
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.PRNGKey(seed), i))(jnp.arange(count))


@partial(jax.jit, static_argnums=0)
def play(env, key_rows, actions):
    """All steps of [time, envs] actions, stacked."""
    states, obs = env.reset(key_rows)
    return obs, jax.lax.scan(env.step, states, actions)[1]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=12, max_size=12), st.integers(0, 99))
def test_an_episode_matches_the_simulator_alone(actions, seed):
    first, steps = play(Environment("walk", Walk()), keys(1, seed), jnp.array(actions)[:, None])
    steps = jax.tree.map(lambda x: np.asarray(x)[:, 0], steps)
    place, total, time = float(first[0, 0]), 0.0, 0
    for t, action in enumerate(actions):
        place, time = place + action - 1, time + 1
        total += place
        terminated = place >= 12
        truncated = time >= 4 and not terminated
        assert steps.last_obs[t] == place
        assert steps.reward[t] == place
        assert (steps.terminated[t], steps.truncated[t]) == (terminated, truncated)
        assert (steps.episode_return[t], steps.episode_length[t]) == (total, time)
        if terminated or truncated:
            place, total, time = float(steps.obs[t, 0]), 0.0, 0
            assert 0 <= place < 10
        else:
            assert steps.obs[t] == place


def test_episodes_start_from_different_states():
    _, steps = play(Environment("walk", Walk()), keys(1), jnp.ones((400, 1), int))
    starts = steps.obs[steps.truncated]
    assert len(starts) == 100
    assert set(starts[:, 0].tolist()) == set(range(10))


@pytest.mark.parametrize("env", [Environment("walk", Walk()), make("CartPole-v1")])
def test_an_environment_does_not_depend_on_its_neighbours(env):
    actions = jax.random.randint(jax.random.PRNGKey(1), (40, 5), 0, 2)
    _, many = play(env, keys(5), actions)
    _, few = play(env, keys(2), actions[:, :2])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[:, :2], y, rtol=1e-6), many, few)


@dataclass(frozen=True)
class CostlyWalk(Walk):
    """The same with a costly reset."""

    costly_reset = True


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99))
def test_costly_resets_give_the_numbers_of_plain_ones(seed):
    actions = jax.random.randint(jax.random.PRNGKey(seed), (12, 3), 0, 3)
    plain = play(Environment("walk", Walk()), keys(3, seed), actions)
    costly = play(Environment("walk", CostlyWalk()), keys(3, seed), actions)
    jax.tree.map(np.testing.assert_array_equal, plain, costly)


class ConstantWalk(CostlyWalk):
    """The same with a Python number in its state, as in Brax's Ant."""

    def reset(self, key):
        state, obs = super().reset(key)
        return (state, 0.0), obs

    def step(self, key, state, action):
        moved = super().step(key, state[0], action)
        return moved._replace(state=(moved.state, 0.0))


def test_a_costly_reset_supports_state_that_all_environments_share():
    env = Environment("walk", ConstantWalk())
    states, _ = jax.eval_shape(env.reset, keys(3))
    after, _ = jax.eval_shape(env.step, states, jax.ShapeDtypeStruct((3,), int))
    assert after == states


def test_a_costly_reset_is_made_only_where_an_episode_ends():
    env = Environment("walk", CostlyWalk())
    step = jax.jit(env.step).lower(env.reset(keys(3))[0], jnp.zeros(3, int))
    assert "stablehlo.case" in step.as_text()


def test_totals_count_each_episode_once_and_are_finite_without_any():
    _, steps = play(Environment("walk", Walk()), keys(3), jnp.ones((8, 3), int))
    totals = jax.tree.map(lambda x: jnp.sum(x, 0), episode_totals(steps))
    np.testing.assert_array_equal(totals["episodes"], [2, 2, 2])
    np.testing.assert_array_equal(totals["episode_length"], [8, 8, 8])
    np.testing.assert_allclose(totals["episode_return"], jnp.sum(steps.reward, 0))
    none = episode_totals(jax.tree.map(lambda x: x[0], steps))
    assert all(np.all(x == 0) for x in none.values())


@pytest.mark.parametrize("name", [n for n in family.names() if not n.startswith("MNIST")])
def test_every_environment_runs_in_a_loop_and_matches_its_observation_space(name):
    env = make(name)
    states, obs = jax.eval_shape(env.reset, keys(3))
    match env.action_space:
        case Discrete():
            action = jax.ShapeDtypeStruct((3,), jnp.int32)
        case Box(_, _, shape):
            action = jax.ShapeDtypeStruct((3, *shape), jnp.float32)
    after, step = jax.eval_shape(env.step, states, action)
    assert after == states
    assert step.obs == step.last_obs == obs
    assert obs.shape == (3, *env.observation_space.shape)
    assert step.reward == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert step.terminated.dtype == step.truncated.dtype == bool


@pytest.mark.parametrize("name", MUST_WORK)
def test_an_episode_of_random_play_ends_well(name):
    env = make(f"gymnax:{name}", max_steps_in_episode=20)
    match env.action_space:
        case Discrete(n):
            actions = jax.random.randint(jax.random.PRNGKey(0), (41, 4), 0, n)
        case Box(_, _, shape):
            actions = 9 * jax.random.normal(jax.random.PRNGKey(0), (41, 4, *shape))
    _, steps = play(env, keys(4), actions)
    done = steps.terminated | steps.truncated
    assert not np.any(steps.terminated & steps.truncated)
    assert np.all(np.sum(done, 0) >= 2)
    assert np.all(steps.episode_length <= 20)
    np.testing.assert_array_equal(steps.truncated, (steps.episode_length == 20) & ~steps.terminated)
    assert np.all(np.isfinite(steps.reward))


def test_cart_pole_is_truncated_after_500_steps_and_shows_where_it_was():
    env = make("CartPole-v1", x_threshold=1e9, theta_threshold_radians=1e9)
    _, steps = play(env, keys(2), jnp.zeros((501, 2), int))
    assert not np.any(steps.terminated)
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated[:, 0]), [499])
    np.testing.assert_array_equal(steps.episode_return[499], [500, 500])
    np.testing.assert_array_equal(steps.episode_return[500], [1, 1])
    assert np.all(np.abs(steps.obs[499]) <= 0.05)
    assert np.all(np.abs(steps.last_obs[499, :, 0]) > 1)


def test_actions_are_clipped_to_the_box():
    env = make("MountainCarContinuous-v0")
    _, wild = play(env, keys(1), jnp.full((3, 1, 1), 50.0))
    _, tame = play(env, keys(1), jnp.full((3, 1, 1), 1.0))
    np.testing.assert_array_equal(wild.reward, tame.reward)
    assert float(clip(Box((0.0, 1.0), (1.0, 2.0), (2,)), jnp.zeros(2))[1]) == 1.0


def test_a_discrete_observation_is_shown_one_hot():
    env = make("FrozenLake-misc")
    _, obs = env.reset(keys(2))
    assert obs.shape == (2, 16)
    np.testing.assert_array_equal(jnp.sum(obs, 1), 1)


class Old:
    """An environment as in gymnax 0.x: terminates at 3, and is `done` at the time limit too."""

    class Params(NamedTuple):
        max_steps_in_episode: int = 5

        def replace(self, **changes):
            return self._replace(**changes)

    def reset_env(self, key, params):
        return jnp.zeros(1), {"at": 0, "time": 0, "over": jnp.array(False)}

    def step_env(self, key, state, action, params):
        at, time = state["at"] + action, state["time"] + 1
        done = (at >= 3) | (time >= params.max_steps_in_episode)
        # As MinAtar does: the state itself says that the episode is over, for any reason.
        return at[None] * 1.0, {"at": at, "time": time, "over": done}, 1.0, done, {}


def test_gymnax_before_1_distinguishes_truncated_from_terminated(monkeypatch):
    made = family._Made(Old(), Old.Params(), Box(0.0, 9.0, (1,)), Discrete(2))
    monkeypatch.setattr(family, "_make", lambda name, settings: made)
    env = Environment("old", family.GymnaxSimulator("Old-v0"))
    _, steps = play(
        env, keys(3), jnp.array([[1, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 1]])
    )
    assert jnp.argmax(steps.terminated, 0).tolist() == [2, 0, 4]
    assert jnp.sum(steps.terminated, 0).tolist() == [1, 0, 1]
    assert jnp.sum(steps.truncated, 0).tolist() == [0, 1, 0]
    assert bool(steps.truncated[4, 1])


def test_an_environment_is_data():
    env = make("CartPole-v1", max_steps_in_episode=7)
    assert env == make("gymnax:CartPole-v1", max_steps_in_episode=7)
    assert hash(env) == hash(pickle.loads(pickle.dumps(env)))
    assert env != make("CartPole-v1")


def test_an_unknown_name_suggests_the_nearest_valid_one():
    with pytest.raises(UnknownNameError, match="CartPole-v1"):
        make("CartPole-v2")
    with pytest.raises(UnknownNameError, match="gymnax"):
        make("gymnaks:CartPole-v1")


def test_an_unknown_setting_lists_the_valid_ones():
    with pytest.raises(SettingError, match="force_mag"):
        make("CartPole-v1", force=3.0).action_space  # noqa: B018


def test_a_missing_package_is_reported_with_how_to_install_it(monkeypatch):
    def missing(module):
        raise ModuleNotFoundError("No module named 'gymnax'", name="gymnax")

    monkeypatch.setattr(registry, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"shoal\[gymnax\]"):
        make("CartPole-v1")


def test_our_own_broken_import_is_not_hidden(monkeypatch):
    def broken(module):
        raise ModuleNotFoundError("No module named 'shoal.oops'", name="shoal.oops")

    monkeypatch.setattr(registry, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="oops"):
        make("CartPole-v1")


def test_a_space_of_neither_kind_is_rejected():
    with pytest.raises(SettingError, match="neither discrete nor a box"):
        family._space(SimpleNamespace())
