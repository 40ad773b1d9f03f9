"""Environments are given as objects, classes and functions, on every backend, and by file."""

import functools
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

import shoal
from shoal.algorithms import PPO
from shoal.cli.main import main
from shoal.envs import HostEnvironment, episode_totals, key_rows
from shoal.errors import SettingError
from unit.host_envs import SEEDS, play, random_actions
from unit.toy_loop import check_error

gymnasium = pytest.importorskip("gymnasium")
SMALL = PPO(num_steps=4, update_epochs=1, num_minibatches=1, hidden=(4,))
MYGYM = """
import gymnasium
import numpy as np


class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, limit=5, render_mode=None):
        self.limit, self.time = limit, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        obs = np.full(2, self.time, np.float32)
        return obs, float(action), self.time >= self.limit, False, {}


def make_reach(limit=3):
    return Reach(limit)


gymnasium.register("Reach-v0", entry_point="mygym:Reach", max_episode_steps=4)
"""


@pytest.fixture
def mygym(tmp_path, monkeypatch):
    (tmp_path / "mygym.py").write_text(MYGYM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import mygym

    yield mygym
    del sys.modules["mygym"]
    gymnasium.registry.pop("Reach-v0", None)


def lengths(env, steps=12):
    """The lengths of the first episodes."""
    assert isinstance(env, HostEnvironment)
    played = play(env.simulator, random_actions(env.simulator, steps), SEEDS)
    ends = (played["terminated"] | played["truncated"])[:, 0]
    return played["episode_length"][:, 0][ends].tolist()


@pytest.mark.parametrize(
    ("given", "settings", "length", "name"),
    [
        ("Reach", {}, 5, "gymnasium:Reach"),
        ("Reach", {"limit": 2}, 2, "gymnasium:Reach"),
        ("make_reach", {}, 3, "gymnasium:make_reach"),
        ("make_reach", {"limit": 6}, 6, "gymnasium:make_reach"),
    ],
)
def test_a_class_and_a_function_make_an_environment_a_row(mygym, given, settings, length, name):
    env = shoal.envs.make(getattr(mygym, given), **settings)
    assert lengths(env)[:2] == [length, length]
    assert env.name == name
    assert env == shoal.envs.make(getattr(mygym, given), **settings)


def test_an_object_is_made_again_from_its_spec_or_copied(mygym):
    assert lengths(shoal.envs.make(mygym.Reach(2)))[:2] == [2, 2]
    assert lengths(shoal.envs.make(gymnasium.make("Reach-v0")))[:2] == [4, 4]
    assert lengths(shoal.envs.make(gymnasium.make("Reach-v0", limit=3)))[:2] == [3, 3]
    known = shoal.envs.make(gymnasium.make("CartPole-v1", sutton_barto_reward=True))
    assert known == shoal.envs.make("gymnasium:CartPole-v1", sutton_barto_reward=True)
    wrapped = gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 2)
    assert set(lengths(shoal.envs.make(wrapped))) == {2}
    partial = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=3)
    assert set(lengths(shoal.envs.make(partial))) == {3}


def test_what_only_this_process_has_registered_is_made_in_others_too(mygym):
    env = shoal.envs.make("gymnasium:Reach-v0")
    gymnasium.registry.pop("Reach-v0")
    assert lengths(env)[:2] == [4, 4]


def test_gymnax_objects_keep_their_parameters():
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make("CartPole-v1")
    short = params.replace(max_steps_in_episode=7)
    for given, steps in (((env, short), 7), (env, params.max_steps_in_episode)):
        made = shoal.envs.make(given)
        assert made.name == "gymnax:CartPole-v1"
        assert made.simulator._made.params.max_steps_in_episode == steps
    assert shoal.envs.make(type(env)).observation_space == made.observation_space


def test_pettingzoo_is_given_as_an_object_and_as_a_function():
    pytest.importorskip("pettingzoo")
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    for given in (spread.parallel_env, spread.parallel_env(N=2)):
        env = shoal.envs.make(given)
        assert env.agents[0] == "agent_0"
        play(env.simulator, random_actions(env.simulator, 2))
    with pytest.raises(SettingError, match="act in turns"):
        shoal.envs.make(spread.env())


@dataclass
class Stranger:
    pass


def test_what_is_no_environment_is_refused_with_a_way_out(mygym):
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2)
    check_error(SettingError, lambda: shoal.envs.make(vector), "several environments at once")
    check_error(SettingError, lambda: shoal.envs.make(Stranger()), "no environment of a library")
    check_error(
        SettingError, lambda: shoal.train(SMALL, Stranger(), ticks=1), "Stranger", "a function"
    )
    check_error(SettingError, lambda: shoal.envs.make(mygym.Reach, size=1), "Reach", "size")
    unpicklable = mygym.Reach()
    unpicklable.lock = sys.stdout
    unpicklable.file = open(__file__)  # noqa: SIM115
    check_error(SettingError, lambda: shoal.envs.make(unpicklable), "can't be copied", "env=Reach")
    unpicklable.file.close()


class State(NamedTuple):
    states: Any
    paid: Any


@shoal.stage
def count(paid, rewards):
    return paid + jnp.sum(rewards)


@dataclass(frozen=True)
class Ones:
    """Always acts with 1, and counts what that earns."""

    def init(self, key, env, envs):
        return State(env.reset(key_rows(key, envs))[0], jnp.float32(0))

    def tick(self, env, state):
        states, step = env.step(state.states, jnp.ones(2, jnp.int32))
        totals = {name: jnp.sum(x) for name, x in episode_totals(step).items()}
        return State(states, count(state.paid, step.reward)), totals

    def play(self, env, state, obs, memory):
        return jnp.int32(1), memory


@pytest.mark.parametrize("backend", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_own_environments_train_and_resume(mygym, tmp_path, backend):
    how = {"envs": 2, "ticks": 4, "folder": tmp_path, "backend": backend}
    how["distribute"] = shoal.single_learner_fine(1)
    done = shoal.train(Ones(), mygym.Reach, env_settings={"limit": 2}, **how)
    assert (done.summary["episodes"], float(done.state.paid)) == (4, 8.0)
    assert done.evaluate(2).lengths == (2, 2)
    assert shoal.resume(done.folder, ticks=5).summary["ticks"] == 5
    again = shoal.train(Ones(), mygym.Reach(2), **how)
    check_error(SettingError, lambda: shoal.resume(again.folder, ticks=5), "Give it again")
    assert shoal.resume(again.folder, env=mygym.Reach(2), ticks=5).summary["ticks"] == 5


@pytest.mark.parametrize(
    "env", ["gymnasium:mygym:Reach-v0", "mygym.py:make_reach", "mygym.py:Reach"]
)
def test_an_environment_in_a_file_here_is_named_on_the_command_line(mygym, env, capsys):
    words = ["graph", "ppo", env, "--envs", "2", "--set", "num_steps=4"]
    assert main([*words, "--set", "num_minibatches=1"]) == 0
    assert "PPO on gymnasium:" in capsys.readouterr().out
