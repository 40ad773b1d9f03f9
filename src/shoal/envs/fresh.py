"""New episodes for environments whose own state could not be saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.envs.host import HostSimulator, Leaves, Moves
from shoal.envs.hosted import HostEnvironment, HostState
from shoal.envs.spaces import Action, Observation, leaves
from shoal.tracing.trace import Origin


def restart_hosts(
    origin: Origin, values: Mapping[str, Any], envs: int, seed: int
) -> dict[str, Any]:
    """Carried values in which host environments, and what was seen of them, are at a new start.

    Which values are made of observations is found by starting the loop in two worlds that look
    different: they are those that differ.
    """
    env = origin.env
    if not isinstance(env, HostEnvironment):
        return dict(values)
    dark, light = (_start(origin, replace(env, simulator=Uniform(env.simulator, x)), envs)
                   for x in (0, 1))  # fmt: skip
    fresh = origin.start(seed, envs)
    hosts = _marked(fresh)
    found = {}
    rows = zip(values, dark, light, jax.tree.leaves(fresh), hosts, strict=True)
    for name, a, b, new, is_host in rows:
        found[name] = new if is_host or _differ(a, b) else values[name]
    return found


@dataclass(frozen=True, slots=True)
class Uniform:
    """Environments like another simulator's, in which everything looks alike."""

    like: HostSimulator
    value: int

    @property
    def observation_space(self) -> Observation:
        """The other's."""
        return self.like.observation_space

    @property
    def action_space(self) -> Action:
        """The other's."""
        return self.like.action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """The other's."""
        return self.like.agents

    def open(self, seeds: np.ndarray) -> _Still:
        """Environments that only show how they begin."""
        axes = (len(seeds), len(self.agents)) if self.agents else (len(seeds),)
        parts = leaves(self.observation_space)
        return _Still(tuple(np.full((*axes, *p.shape), self.value, p.dtype) for p in parts))


@dataclass(frozen=True, slots=True)
class _Still:
    obs: Leaves

    def reset(self) -> Leaves:
        return self.obs

    def step(self, action: np.ndarray) -> Moves:
        raise AssertionError("these are never stepped")

    def close(self) -> None:
        pass


def _start(origin: Origin, env: HostEnvironment, envs: int) -> list[Any]:
    return jax.tree.leaves(Origin(origin.algorithm, env).start(0, envs))


def _marked(tree: Any) -> list[bool]:
    """For each leaf, whether it is of a host environment's state."""
    marks = jax.tree.map(
        lambda x: jax.tree.map(lambda _: isinstance(x, HostState), x),
        tree,
        is_leaf=lambda x: isinstance(x, HostState),
    )
    return jax.tree.leaves(marks)


def _differ(a: Any, b: Any) -> bool:
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    return not is_key and not np.array_equal(np.asarray(a), np.asarray(b))
