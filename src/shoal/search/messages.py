"""Measures what a message costs between threads and processes: two stages that pass rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.planning.cluster import Cluster
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policy import DistributionPolicy, Fragment
from shoal.runtime.run import Result, run
from shoal.simulation.profile import Message
from shoal.tracing.stage import host
from shoal.tracing.trace import trace

TURNS, SMALL, LARGE = 64, 16, 1 << 18
MOVES = 2 * TURNS
BYTES = 4  # of a float
TICKS = {"threads": (150, 12), "processes": (100, 12)}  # of small and of large messages


def _like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@host(_like, per="env")
def there(x: Any) -> Any:
    """Pass rows on."""
    return np.asarray(x)


@host(_like, per="env")
def back(x: Any) -> Any:
    """Pass rows back."""
    return np.asarray(x)


@dataclass(frozen=True)
class Passing:
    """A loop that passes rows to and fro."""

    width: int

    def init(self, key: Any, env: Any, envs: int) -> Any:
        """Rows of some width."""
        return jnp.zeros((envs, self.width), jnp.float32)

    def tick(self, env: Any, state: Any) -> Any:
        """Pass them there and back."""
        final, _ = jax.lax.scan(lambda x, _: (back(there(x)), None), state, length=TURNS)
        return final, {}


def passing_plan(width: int, cluster: Cluster) -> Plan:
    """The plan of that loop, with a fragment for each side."""
    sides = Fragment("one", ("there",)), Fragment("other", ("*",))
    graph = trace(Passing(width), None, envs=1)
    return make_plan(graph, DistributionPolicy("passing", sides), cluster)


def not_stopped(result: Result) -> Result:
    """The result of a run, unless a signal ended it: then what it was part of ends too."""
    if result.stopped_by:
        raise KeyboardInterrupt
    return result


def message_cost(backend: str, cluster: Cluster) -> Message:
    """What a message costs between workers of this backend on this machine."""

    def seconds(width: int, ticks: int) -> float:
        done = not_stopped(run(passing_plan(width, cluster), backend, ticks=ticks))
        return done.seconds / (ticks - 1) / MOVES

    few, many = TICKS[backend][1], TICKS[backend][0]
    small, large = seconds(SMALL, many), seconds(LARGE, few)
    rate = BYTES * (LARGE - SMALL) / max(large - small, 1e-7)
    return Message(small, rate)
