"""Brax's environments have time limits, reset automatically and keep the last observation."""

import pickle
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.envs import Box, make, registry
from shoal.envs.environment import key_rows
from shoal.errors import MissingExtraError, SettingError, UnknownNameError

brax_envs = pytest.importorskip("brax.envs")
from shoal.envs import brax as family  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Brax System")
LIMIT, STEPS, ROWS = 8, 18, 3
QUICK = "inverted_pendulum"


@cache
def light():
    """The smallest of the environments; it falls when it is pushed one way."""
    return make("brax:inverted_pendulum", backend="spring", episode_length=LIMIT)


def pushes():
    """Zero actions for the first environment and increasing ones for the others."""
    return jnp.full((STEPS, ROWS, 1), 1.0) * jnp.arange(ROWS)[:, None] / (ROWS - 1)


@partial(jax.jit, static_argnums=0)
def play(env, rows, actions):
    """All steps of [time, envs] actions, stacked."""
    states, obs = env.reset(rows)
    return obs, jax.lax.scan(env.step, states, actions)[1]


@cache
def played():
    return play(light(), key_rows(jax.random.PRNGKey(0), ROWS), pushes())


def test_an_episode_matches_brax_alone():
    first, steps = played()
    env = brax_envs.get_environment("inverted_pendulum", backend="spring")
    step = jax.jit(env.step)
    for row in range(ROWS):
        # The key of a first state is the second half of the environment's own.
        key = jax.random.split(key_rows(jax.random.PRNGKey(0), ROWS)[row])[1]
        state = jax.jit(env.reset)(key)
        np.testing.assert_allclose(first[row], state.obs, atol=1e-5)
        for t in range(LIMIT):
            state = step(state, pushes()[t, row])
            np.testing.assert_allclose(steps.last_obs[t, row], state.obs, atol=1e-4)
            np.testing.assert_allclose(steps.reward[t, row], state.reward, atol=1e-4)
            assert steps.terminated[t, row] == bool(state.done)
            if state.done:
                break


def test_an_episode_ends_with_its_time_or_its_task_and_never_with_both():
    _, steps = played()
    assert not np.any(steps.terminated & steps.truncated)
    np.testing.assert_array_equal(
        steps.truncated, (steps.episode_length == LIMIT) & ~steps.terminated
    )
    assert np.flatnonzero(steps.truncated[:, 0]).tolist() == [LIMIT - 1, 2 * LIMIT - 1]
    assert np.any(steps.terminated[:, -1])
    assert np.all(np.isfinite(steps.reward))


def test_each_episode_starts_in_another_state():
    first, steps = played()
    done = np.asarray(steps.terminated | steps.truncated)
    moved = np.any(np.asarray(steps.obs != steps.last_obs), axis=-1)
    np.testing.assert_array_equal(moved, done)
    starts = np.asarray(steps.obs)[:, 0][done[:, 0]]
    assert np.all(np.abs(starts) <= 0.011)
    assert len({tuple(start) for start in [*starts, np.asarray(first[0])]}) == 3


def test_rows_do_not_depend_on_how_many_there_are():
    _, many = played()
    _, few = play(light(), key_rows(jax.random.PRNGKey(0), 2), pushes()[:, :2])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[:, :2], y, atol=1e-5), many, few)


@pytest.mark.parametrize(
    "name",
    [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in family.names()],
)
def test_every_environment_runs_in_a_loop_and_matches_its_observation_space(name):
    env = make(f"brax:{name}")
    states, obs = jax.eval_shape(env.reset, key_rows(jax.random.PRNGKey(0), 3))
    action = jax.ShapeDtypeStruct((3, *env.action_space.shape), jnp.float32)
    after, step = jax.eval_shape(env.step, states, action)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), states
    )
    assert step.obs == step.last_obs == obs
    assert obs.shape == (3, *env.observation_space.shape)
    assert step.reward == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert step.terminated.dtype == step.truncated.dtype == bool


def test_an_environment_is_data():
    assert light() == make("brax:inverted_pendulum", episode_length=LIMIT, backend="spring")
    assert hash(light()) == hash(pickle.loads(pickle.dumps(light())))
    assert light() != make("brax:inverted_pendulum")
    assert light().action_space == Box(-1.0, 1.0, (1,))


def test_an_unknown_name_or_setting_lists_the_valid_ones():
    with pytest.raises(UnknownNameError, match="halfcheetah"):
        make("brax:half_cheetah")
    with pytest.raises(SettingError, match=r"episode_length.*reset_noise_scale"):
        make("brax:halfcheetah", noise=0.3).action_space  # noqa: B018
    with pytest.raises(SettingError, match="generalized"):
        make("brax:halfcheetah", backend="bullet").action_space  # noqa: B018
    with pytest.raises(SettingError, match="episode_length=0"):
        make("brax:halfcheetah", episode_length=0).action_space  # noqa: B018


def test_a_missing_package_is_reported_with_how_to_install_it(monkeypatch):
    def missing(module):
        raise ModuleNotFoundError("No module named 'brax'", name="brax")

    monkeypatch.setattr(registry, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"shoal\[brax\]"):
        make("brax:ant")


def test_an_object_is_taken_without_the_wrappers_for_training():
    made = make(brax_envs.create("reacher", episode_length=50))
    known = make("brax:reacher")
    assert made.name == "brax:Reacher"
    assert made.observation_space == known.observation_space
    assert type(made.simulator.given).__name__ == "Reacher"
