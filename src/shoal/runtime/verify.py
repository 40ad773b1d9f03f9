"""Does a plan compute what the fused program computes? The largest difference per carried value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shoal.errors import SettingError
from shoal.graph.ir import Graph
from shoal.graph.show import table
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policies import fused
from shoal.planning.policy import Latest, lag_of
from shoal.runtime.reference import run_reference
from shoal.runtime.run import run

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Verification:
    """The largest difference of each carried value, relative to its size where that exceeds one."""

    plan: Plan
    backend: str
    ticks: int
    differences: Mapping[str, float]

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max(self.differences.values(), default=0.0)

    @property
    def holds(self) -> bool:
        """Whether the plan gives the reference's numbers, up to the order of float additions."""
        return self.largest <= TOLERANCE

    def __str__(self) -> str:
        lag = max((lag_of(c.flow) for c in self.plan.channels), default=0)
        against = f"the fused program with a delay of {lag}" if lag else "the fused program"
        verdict = "the same numbers" if self.holds else "DIFFERENT NUMBERS"
        rows = [
            (name, f"{difference:.1e}" if difference else "0")
            for name, difference in self.differences.items()
        ]
        what = f"{self.plan.distribution.name} on {self.backend}, {self.ticks} ticks"
        head = f"{what}, against {against}: {verdict}"
        return "\n".join([head, "", *table(("carried value", "largest difference"), rows)])


def verify_plan(plan: Plan, backend: str, *, ticks: int, state: Any = None) -> Verification:
    """Compare `plan` with the fused program, delayed as the plan's lags say, from one state."""
    if plan.free or any(isinstance(c.flow, Latest) and c.flow.max_lag != 0 for c in plan.channels):
        raise SettingError(
            f"what {plan.distribution.name} computes depends on who comes first, "
            "so there are no numbers to compare it with",
            "Verify it with a lag of 0, or a distribution policy whose flows are in lockstep.",
        )
    graph = plan.graph
    start = graph.origin.start(0, graph.envs) if state is None else state
    got = run(plan, backend, ticks=ticks, state=start).values
    # A host stage can't be in the fused plan, but the reference calls it where it stands.
    if any(lag_of(c.flow) for c in plan.channels) or any(s.host for s in graph.stages):
        wanted = run_reference(
            plan, dict(zip(graph.inputs, jax.tree.leaves(start), strict=True)), ticks
        )
    else:
        wanted = run(fused_plan(graph, plan), ticks=ticks, state=start).values
    found = {name: difference(got[name], wanted[name]) for name in graph.inputs}
    return Verification(plan, backend, ticks, by_root(found))


def fused_plan(graph: Graph, plan: Plan) -> Plan:
    """The fused plan of a plan's loop."""
    whole = graph.origin.annotated(graph.envs)
    return make_plan(whole, fused(), plan.cluster)


def by_root(found: Mapping[str, float]) -> dict[str, float]:
    """The largest difference among values whose names begin alike."""
    roots: dict[str, float] = {}
    for name, size in found.items():
        root = ".".join(name.split(".")[:2])
        roots[root] = max(roots.get(root, 0.0), size)
    return roots


def difference(a: Any, b: Any) -> float:
    """The largest difference between two arrays, relative where they are larger than one."""
    x, y = as_numbers(a), as_numbers(b)
    if not x.size:
        return 0.0
    same_nan = np.isnan(x) & np.isnan(y)
    gap = np.where(same_nan | (x == y), 0.0, np.abs(x - y) / np.maximum(1.0, np.abs(y)))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap)))


def as_numbers(x: Any) -> np.ndarray:
    """An array, or the data of keys, as float64."""
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).astype(np.float64)
