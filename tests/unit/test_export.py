"""An exported agent acts as the agent does, in a process without Shoal."""

import json
import subprocess
import sys
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from shoal.envs import Box, Dict, Environment
from shoal.errors import SettingError
from shoal.runs.results.agent import Agent
from shoal.runs.results.exporting import EXAMPLE, export
from unit.toy_loop import check_error


@dataclass(frozen=True)
class Seen:
    """What an environment shows; it is never stepped."""

    observation_space: object = Box(-1.0, 1.0, (3,))
    action_space: object = Box(-1.0, 1.0, (2,))


class Linear:
    def play(self, env, state, obs, memory):
        return jnp.tanh(obs @ state["w"]), memory


class Remembers(Linear):
    def play(self, env, state, obs, memory):
        return obs[:2], obs


class Parts:
    def play(self, env, state, obs, memory):
        return obs["a"][:2] + obs["b"].sum().astype(jnp.float32), memory


WEIGHTS = {"w": jnp.arange(6.0).reshape(3, 2) / 7}


def test_the_exported_policy_acts_as_the_agent_on_any_number_of_observations(tmp_path):
    agent = Agent(Linear(), Environment("line", Seen()), WEIGHTS, 12)
    folder = export(agent, tmp_path / "out")
    policy = jax_export.deserialize(bytearray((folder / "policy.bin").read_bytes()))
    for count in (1, 5):
        obs = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
        np.testing.assert_allclose(policy.call(obs), agent.act(obs), rtol=1e-6)


def test_observations_that_are_dictionaries_are_so_for_the_exported_policy(tmp_path):
    space = Dict((("a", Box(-1.0, 1.0, (4,))), ("b", Box(0, 255, (2, 2), "uint8"))))
    agent = Agent(Parts(), Environment("parts", Seen(space)), {}, 1)
    folder = export(agent, tmp_path / "out")
    spec = json.loads((folder / "policy.json").read_text())["observation"]
    assert spec == {
        "a": {"shape": [4], "dtype": "float32"},
        "b": {"shape": [2, 2], "dtype": "uint8"},
    }
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sys; sys.path[:0] = " + repr(sys.path[1:])
         + "; sys.modules['shoal'] = None; import runpy; runpy.run_path(sys.argv[1])",
         str(folder / EXAMPLE)], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "[[0. 0.]]" in done.stdout


def test_the_card_has_the_evaluation_of_the_exported_tick(tmp_path):
    agent = Agent(Linear(), Environment('a "line"', Seen()), WEIGHTS, 12)
    facts = {"episodes": 100, "actions": "greedy", "return_mean": 3.5, "return_std": 0.25}
    export(agent, tmp_path, [facts | {"tick": 12}, facts | {"tick": 11, "return_mean": 9.0}])
    card = (tmp_path / "README.md").read_text()
    assert 'value: "3.50 +/- 0.25"' in card
    assert r"\"line\"" in card
    assert "9.0" not in card


def test_what_cannot_be_exported_is_refused(tmp_path):
    env = Environment("line", Seen())
    remembers = Agent(Remembers(), env, {}, 1)
    check_error(SettingError, lambda: export(remembers, tmp_path), "remembers")
    nowhere = Agent(Linear(), None, WEIGHTS, 1)
    check_error(SettingError, lambda: export(nowhere, tmp_path), "without an environment")
    (tmp_path / "mine.txt").touch()
    linear = Agent(Linear(), env, WEIGHTS, 1)
    check_error(SettingError, lambda: export(linear, tmp_path), "has other files in it")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
