"""Environments of PettingZoo's parallel kind: several agents that act at the same time."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pettingzoo

from shoal.caching import remembered
from shoal.envs.gym_spaces import (
    Leaf,
    action_rows,
    action_space,
    empty_rows,
    leaves_of,
    observation_space,
)
from shoal.envs.host import Copies, Leaves, Moves
from shoal.envs.later import import_named
from shoal.envs.spaces import Action, Observation
from shoal.errors import MissingExtraError, RowError, SettingError

GROUPS = {name: f"pettingzoo.{name}" for name in ("atari", "butterfly", "classic", "sisl")}
GROUPS["mpe"] = "mpe2"  # a package of its own by now
VERSIONED = re.compile(r".+_v\d+$")


def names() -> list[str]:
    """The environments this family knows, as "group/module"."""
    assert pettingzoo
    found = []
    for group, package in GROUPS.items():
        spec = find_spec(package)
        for module in pkgutil.iter_modules(spec.submodule_search_locations if spec else []):
            if VERSIONED.match(module.name):
                found.append(f"{group}/{module.name}")
    return found if find_spec("mpe2") else [*found, "mpe/simple_spread_v3"]


def known_as(env: Any, params: Any) -> tuple[str, tuple[tuple[str, Any], ...], Any]:
    """The name, settings and factory of an environment's copies, which are made by pickling."""
    del params
    return str(env.unwrapped), (), Copies.of(env)


@dataclass(frozen=True, slots=True)
class PettingZooSimulator:
    """An environment of a known group ("mpe/simple_spread_v3"), or any "module:function".

    All agents must see and do the same kind of thing, and have an axis after the environments'. An
    agent that ends before the others sees zeros and earns nothing until they have ended too; each
    of these steps terminates it again. An episode's return is the mean of its agents' returns.
    """

    id: str
    settings: tuple[tuple[str, Any], ...] = ()
    make: Callable[..., Any] | None = None  # a class or function that makes it

    @property
    def observation_space(self) -> Observation:
        """What each agent sees; a discrete observation is shown one-hot."""
        return _form(self).observation_space

    @property
    def action_space(self) -> Action:
        """What each agent may do, counted from 0."""
        return _form(self).action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents' names, in the order of the agents' axis."""
        return _form(self).agents

    def open(self, seeds: np.ndarray) -> PettingZooVector:
        """One environment a seed."""
        return PettingZooVector(self, seeds)


class PettingZooVector:
    """Environments stepped in a loop."""

    def __init__(self, simulator: PettingZooSimulator, seeds: np.ndarray) -> None:
        self._seeds, self._form, self._envs = seeds, _form(simulator), []
        try:
            for _ in seeds:
                self._envs.append(_make(simulator))
        except Exception as error:
            self.close()
            raise RowError(len(self._envs), "can't be made", error) from error

    def reset(self) -> Leaves:
        """The first observations."""
        obs = self._empty()
        for row, seed in enumerate(self._seeds.tolist()):
            self._reset(obs, row, seed)
        return obs

    def step(self, action: np.ndarray) -> Moves:
        """Steps every environment, and starts its next episode where all agents have ended."""
        shape = n, agents = len(self._envs), len(self._form.agents)
        flat = self._form.action_rows(action.reshape(n * agents, *action.shape[2:]))
        last_obs, reward = self._empty(), np.zeros(shape, np.float32)
        terminated, truncated = np.ones(shape, bool), np.zeros(shape, bool)
        row, ended = 0, []
        try:
            for row, env in enumerate(self._envs):
                of = dict(
                    zip(self._form.agents, flat[row * agents : (row + 1) * agents], strict=True)
                )
                seen, earned, over, late, _ = env.step({agent: of[agent] for agent in env.agents})
                self._write(last_obs, row, seen)
                for i, agent in enumerate(self._form.agents):
                    if agent in earned:
                        reward[row, i] = earned[agent]
                        terminated[row, i] = over[agent]
                        truncated[row, i] = late[agent] and not over[agent]
                if not env.agents:
                    ended.append(row)
        except Exception as error:
            raise RowError(row, "failed in step", error) from error
        obs = tuple(x.copy() for x in last_obs) if ended else last_obs
        for row in ended:
            self._reset(obs, row, None)
        return Moves(obs, reward, terminated, truncated, last_obs, reward.mean(axis=1))

    def frame(self) -> Any:
        """The picture of the first environment, if it was made to draw them."""
        return self._envs[0].render()

    def close(self) -> None:
        """Closes every environment; one that can't be closed doesn't keep the others open."""
        for env in self._envs:
            with suppress(Exception):
                env.close()

    def _empty(self) -> Leaves:
        return empty_rows(self._form.leaves, len(self._seeds), len(self._form.agents))

    def _reset(self, arrays: Leaves, row: int, seed: int | None) -> None:
        try:
            self._write(arrays, row, self._envs[row].reset(seed=seed)[0])
        except Exception as error:
            raise RowError(row, "failed in reset", error) from error

    def _write(self, arrays: Leaves, row: int, seen: dict[str, Any]) -> None:
        for leaf, array in zip(self._form.leaves, arrays, strict=True):
            for i, agent in enumerate(self._form.agents):
                if agent in seen:
                    leaf.write(array, (row, i), seen[agent])
                else:
                    array[row, i] = 0


class _Form(NamedTuple):
    """What is known of an environment without keeping one open."""

    observation_space: Observation
    action_space: Action
    agents: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    action_rows: Callable[[np.ndarray], Any]


@remembered
def _form(simulator: PettingZooSimulator) -> _Form:
    env = _make(simulator)
    try:
        agents = tuple(env.possible_agents)
        shown = [env.observation_space(agent) for agent in agents]
        taken = [env.action_space(agent) for agent in agents]
        for kind, spaces in (("see", shown), ("do", taken)):
            other = next((i for i, space in enumerate(spaces) if space != spaces[0]), None)
            if other is not None:
                raise SettingError(
                    f"the agents of {simulator.id} {kind} different things: "
                    f"{agents[0]} {spaces[0]}, {agents[other]} {spaces[other]}",
                    "Pad their spaces to be equal with a wrapper, or take another environment.",
                )
        spaces = observation_space(shown[0]), action_space(taken[0])
        return _Form(*spaces, agents, leaves_of(shown[0]), action_rows(taken[0]))
    finally:
        env.close()


def _make(simulator: PettingZooSimulator) -> Any:
    name, settings = simulator.id, dict(simulator.settings)
    wrappers = settings.pop("wrappers", ())
    try:
        env = (simulator.make or _function(name))(**settings)
        for wrapper in wrappers:
            env = _function(wrapper)(env)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mpe2"):
            raise MissingExtraError(
                "mpe2, where PettingZoo's mpe has moved,", "pettingzoo"
            ) from error
        group = name.partition("/")[0]
        raise SettingError(
            f"{name} needs {error.name}, which is not installed",
            f'Install it with: pip install "pettingzoo[{group}]"',
        ) from error
    except TypeError as error:
        raise SettingError(
            f"{name} can't be made with {', '.join(settings) or 'its defaults'}: {error}",
            "Give it what its parallel_env takes.",
        ) from error
    return env


def _function(name: str) -> Callable[..., Any]:
    """The function called "module:function", or the `parallel_env` of "group/module"."""
    module, colon, function = name.partition(":")
    if not colon:
        group, _, inner = name.partition("/")
        module, function = f"{GROUPS[group]}.{inner}", "parallel_env"
    made = (import_named if colon else import_module)(module)
    if not hasattr(made, function):
        raise SettingError(
            f"{name} has no {function}",
            "Its agents act in turns, which Shoal can't step; take a parallel environment.",
        )
    return getattr(made, function)
