"""Environments of JaxMARL 0.2: several agents at once, of the particle worlds (MPE) and SMAX."""

import inspect
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.caching import remembered
from shoal.envs.environment import Transition, Tree
from shoal.envs.spaces import MASK, SEEN, WORLD, Action, Box, Dict, Discrete, Groups, Observation
from shoal.errors import SettingError, UnknownNameError


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what JaxMARL prints when imported; it also leaves other streams than it found."""
    before = sys.stdout, sys.__stdout__, sys.stderr
    sys.stdout = sys.__stdout__ = io.StringIO()
    try:
        yield
    finally:
        sys.stdout, sys.__stdout__, sys.stderr = before


with _quiet():
    import jaxmarl  # pyright: ignore[reportMissingImports]
    from jaxmarl.environments import SMAX  # pyright: ignore[reportMissingImports]
    from jaxmarl.environments import spaces as jaxmarl_spaces  # pyright: ignore[reportMissingImports]
    from jaxmarl.environments.smax.smax_env import (  # pyright: ignore[reportMissingImports]
        MAP_NAME_TO_SCENARIO,
    )


NEVER = np.iinfo(np.int32).max // 2
NUMBER = re.compile(r"_?\d+$")


def names() -> list[str]:
    """The environments this family knows: MPE, and SMAX against itself or a heuristic."""
    smax = ("SMAX", "HeuristicEnemySMAX")
    return [name for name in jaxmarl.registered_envs if name.startswith("MPE_") or name in smax]


@dataclass(frozen=True, slots=True)
class JaxMARLSimulator:
    """One JaxMARL environment, known by its id and the settings that differ from its defaults.

    Agents are an axis where all see and do the same kind of thing. Where they differ, everything
    is a dictionary of groups, called as their agents without a number: `adversary`, `agent`. In
    SMAX an agent is also shown what it may do and the whole world. A unit that has died keeps
    earning its team's reward, so it ends only when the battle does; till then it must stand still.
    """

    id: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def observation_space(self) -> Observation | Groups:
        """What each agent is shown, of each group if they differ."""
        return self._made.observation_space

    @property
    def action_space(self) -> Action | Groups:
        """What each agent may do, of each group if they differ."""
        return self._made.action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents' names, group after group."""
        return tuple(agent for _, agents in self.groups for agent in agents)

    @property
    def groups(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The agents of each group; of one without a name if they don't differ."""
        return self._made.groups

    def reset(self, key: jax.Array) -> tuple[Any, Tree]:
        """A first state and its observation."""
        obs, state = self._made.env.reset(key)
        return state, self._show(obs, state)

    def step(self, key: jax.Array, state: Any, action: Tree) -> Transition:
        """One step, without JaxMARL's own auto-reset, which would hide the last observation."""
        made = self._made
        actions = {
            agent: (action[group] if made.differ else action)[i]
            for group, agents in made.groups
            for i, agent in enumerate(agents)
        }
        obs, after, reward, done, _ = made.env.step_env(key, state, actions)
        # MPE knows no end but that of time; SMAX's battles end when they would without a limit too.
        terminated = made.unlimited.is_terminal(after) if made.unlimited else jnp.array(0, bool)
        reward = {agent: jnp.asarray(reward[agent], jnp.float32) for agent in self.agents}
        over = dict.fromkeys(self.agents, terminated)
        late = dict.fromkeys(self.agents, done["__all__"] & ~terminated)
        ends = (self._stack(each) for each in (reward, over, late))
        return Transition(after, self._show(obs, after), *ends)

    @property
    def _made(self) -> "_Made":
        return _make(self.id, self.settings)

    def _show(self, obs: dict[str, jax.Array], state: Any) -> Tree:
        made = self._made
        if WORLD not in made.parts:
            return self._stack({agent: obs[agent] for agent in self.agents})
        shown = {agent: {SEEN: obs[agent], WORLD: obs["world_state"]} for agent in self.agents}
        if MASK in made.parts:
            may = made.env.get_avail_actions(state)
            shown = {agent: shown[agent] | {MASK: may[agent] > 0} for agent in self.agents}
        return self._stack(shown)

    def _stack(self, each: dict[str, Tree]) -> Tree:
        """What `each` agent has as arrays with an axis of agents; by group if agents differ."""

        def stack(agents: tuple[str, ...]) -> Tree:
            return jax.tree.map(lambda *x: jnp.stack(x), *(each[agent] for agent in agents))

        groups = {group: stack(agents) for group, agents in self._made.groups}
        return groups if self._made.differ else next(iter(groups.values()))


class _Made(NamedTuple):
    env: Any
    unlimited: Any  # the same without a limit of time, if it may end otherwise
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    differ: bool
    parts: tuple[str, ...]
    observation_space: Observation | Groups
    action_space: Action | Groups


@remembered
def _make(name: str, settings: tuple[tuple[str, Any], ...]) -> _Made:
    # It may be made first while a loop is traced, and its constants must not be part of that trace.
    with jax.ensure_compile_time_eval():
        given = _settings(name, dict(settings))
        env = _open(name, given)
        is_smax = name.endswith("SMAX")
        unlimited = _open(name, given | {"max_steps": NEVER}) if is_smax else None
        parts = (SEEN,)
        if is_smax:
            parts = (MASK, SEEN, WORLD) if env.action_type == "discrete" else (SEEN, WORLD)
        spaces = {agent: _spaces(env, agent, parts) for agent in env.agents}
    differ = len(set(spaces.values())) > 1
    groups = _group(name, spaces) if differ else (("", tuple(env.agents)),)
    if not differ:
        return _Made(env, unlimited, groups, differ, parts, *spaces[env.agents[0]])
    shown, taken = (
        Groups(tuple((group, spaces[agents[0]][i]) for group, agents in groups)) for i in (0, 1)
    )
    return _Made(env, unlimited, groups, differ, parts, shown, taken)


def _group(name: str, spaces: dict[str, Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Agents by their names without a number; those of a group must not differ."""
    groups: dict[str, list[str]] = {}
    for agent in spaces:
        groups.setdefault(NUMBER.sub("", agent), []).append(agent)
    for group, agents in groups.items():
        other = next((agent for agent in agents if spaces[agent] != spaces[agents[0]]), None)
        if other is not None:
            raise SettingError(
                f"the agents {agents[0]} and {other} of {name} are both called {group}, but see or "
                "do different things",
                "Take another environment.",
            )
    return tuple((group, tuple(groups[group])) for group in sorted(groups))


def _settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as the environment's class takes them, which ignores those it doesn't know."""
    if "scenario" in settings and isinstance(scenario := settings["scenario"], str):
        if scenario not in MAP_NAME_TO_SCENARIO:
            raise UnknownNameError(f"scenario of {name}", scenario, MAP_NAME_TO_SCENARIO)
        settings["scenario"] = MAP_NAME_TO_SCENARIO[scenario]
    known = _known(type(_open(name, {})))
    unknown = next((key for key in settings if key not in known), None)
    if unknown is not None:
        raise UnknownNameError(f"setting of {name}", unknown, known)
    return settings


def _known(kind: type) -> set[str]:
    """What the constructors of a class take; that of a team against a heuristic wraps SMAX."""
    kinds = [*kind.__mro__, *([SMAX] if "SMAX" in kind.__name__ else ())]
    taken = [inspect.signature(k.__init__).parameters for k in kinds if k is not object]
    named = {p.name for each in taken for p in each.values() if p.kind is not p.VAR_KEYWORD}
    return named - {"self", "args", "agents", "landmarks", "action_spaces", "observation_spaces"}


def _open(name: str, settings: dict[str, Any]) -> Any:
    try:
        return jaxmarl.make(name, **settings)
    except (TypeError, AssertionError, ValueError, NotImplementedError) as error:
        raise SettingError(
            f"{name} can't be made with {', '.join(settings)}: {error}",
            "Give it what JaxMARL's own class takes.",
        ) from error


def _spaces(env: Any, agent: str, parts: tuple[str, ...]) -> tuple[Observation, Action]:
    seen, does = _space(env.observation_spaces[agent]), _space(env.action_spaces[agent])
    assert isinstance(seen, Box)
    if WORLD not in parts:
        return seen, does
    shown: dict[str, Box] = {SEEN: seen, WORLD: Box(-np.inf, np.inf, (env.state_size,))}
    if MASK in parts:
        assert isinstance(does, Discrete)
        shown[MASK] = Box(0.0, 1.0, (does.n,), "bool")
    return Dict(tuple(sorted(shown.items()))), does


def _space(space: Any) -> Box | Discrete:
    match space:
        case jaxmarl_spaces.Discrete():
            return Discrete(int(space.n))
        case jaxmarl_spaces.Box():
            return Box(
                float(np.asarray(space.low)), float(np.asarray(space.high)), tuple(space.shape)
            )
    raise SettingError(
        f"The space {space!r} is neither discrete nor a box.", "Take another environment."
    )
