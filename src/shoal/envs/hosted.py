"""Host environments in a loop: what XLA can't step, as a host stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.caching import remembered
from shoal.envs.environment import Step
from shoal.envs.host import HostSimulator, first_rows, step_rows
from shoal.envs.spaces import Action, Observation, leaves, unflatten
from shoal.tracing.stage import Stage, host


class HostState(NamedTuple):
    """What a loop carries of an environment that lives in Python: which it is, and how far."""

    seed: jax.Array
    steps: jax.Array


@dataclass(frozen=True, slots=True)
class HostEnvironment:
    """Environments that are stepped in Python, wherever the stage `env` is placed.

    It is plain data: the same name and settings make equal environments, in any process.
    """

    name: str
    simulator: HostSimulator

    @property
    def observation_space(self) -> Observation:
        """What one agent sees."""
        return self.simulator.observation_space

    @property
    def action_space(self) -> Action:
        """What one agent may do; `step` clips to a box, and refuses a choice outside."""
        return self.simulator.action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents' names, in the order of their axis; empty for one agent without an axis."""
        return self.simulator.agents

    def reset(self, keys: jax.Array) -> tuple[HostState, Any]:
        """The states and first observations of one environment a key."""
        seeds = jax.vmap(partial(jax.random.bits, dtype=jnp.uint32))(keys)
        first = partial(first_rows, self.simulator)
        obs = jax.pure_callback(
            lambda seeds: first(np.asarray(seeds)), _obs_specs(self.simulator, len(keys)), seeds
        )
        state = HostState(seeds, jnp.zeros(len(keys), jnp.int32))
        return state, unflatten(self.observation_space, obs)

    def step(self, state: HostState, action: jax.Array) -> tuple[HostState, Step]:
        """Steps every environment, and starts its next episode where this one ends."""
        steps, *shown = _stage(self.simulator)(state.seed, state.steps, action)
        count = len(leaves(self.observation_space))
        obs, (reward, terminated, truncated), rest = (
            shown[:count],
            shown[count : count + 3],
            shown[count + 3 :],
        )
        last_obs, totals = rest[:count], rest[count:]
        obs, last_obs = (unflatten(self.observation_space, tuple(x)) for x in (obs, last_obs))
        state = HostState(state.seed, steps)
        return state, Step(obs, reward, terminated, truncated, last_obs, *totals)


@remembered
def _stage(simulator: HostSimulator) -> Stage:
    """The stage that steps environments of `simulator`, the same one however often it is used."""

    def returns(seed: Any, steps: Any, action: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows = len(seed.shape) and seed.shape[0]
        obs = _obs_specs(simulator, rows)
        agents = (len(simulator.agents),) if simulator.agents else ()

        def spec(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *more), dtype)

        flags = spec(jnp.bool_, *agents)
        ends = spec(jnp.float32, *agents), flags, flags
        totals = spec(jnp.float32), spec(jnp.int32)
        active = (flags,) if agents else ()
        return (spec(jnp.int32), *obs, *ends, *obs, *totals, *active)

    return host(returns, per="env", name="env", role="env")(partial(step_rows, simulator))


def _obs_specs(simulator: HostSimulator, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    axes = (rows, len(simulator.agents)) if simulator.agents else (rows,)
    return tuple(
        jax.ShapeDtypeStruct((*axes, *leaf.shape), np.dtype(leaf.dtype))
        for leaf in leaves(simulator.observation_space)
    )
