"""Verifies that a plan computes what the fused program computes, by the largest differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import SettingError
from shoal.graph.ir import Graph, leaves
from shoal.graph.show import table
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policies import fused
from shoal.planning.policy import Latest, lag_of
from shoal.planning.show import approximate_text
from shoal.runtime.debug.compare import as_numbers, carried_difference, shown_difference
from shoal.runtime.debug.reference import reference_course
from shoal.runtime.run import run
from shoal.tracing.equations import below

TOLERANCE = 1e-4
COARSE = 16  # epsilons of the coarsest type that a different order of additions may cost
MOST = 0.25  # of a change; more isn't rounding in any type
METRICS = "metrics"  # the prefix of their rows in the table, as in the graph


@dataclass(frozen=True)
class Verification:
    """The largest difference of each carried value and metric, and the tolerance.

    For a carried value it is relative to its change in the reference, for a metric to its size; see
    `runtime/debug/compare.py`.
    """

    plan: Plan
    backend: str
    ticks: int
    differences: Mapping[str, float]
    tolerance: float = TOLERANCE

    @property
    def largest(self) -> float:
        """The largest of all differences."""
        return max(self.differences.values(), default=0.0)

    @property
    def holds(self) -> bool:
        """Whether the plan gives the reference's numbers, up to the order of float additions."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        lag = max((lag_of(c.flow) for c in self.plan.channels), default=0)
        against = f"the fused program with a delay of {lag}" if lag else "the fused program"
        verdict = "the same numbers" if self.holds else "DIFFERENT NUMBERS"
        rows = [
            (name, f"{difference:.1e}" if difference else "0")
            for name, difference in self.differences.items()
        ]
        what = f"{self.plan.distribution.name} on {self.backend}, {self.ticks} ticks"
        head = [f"{what}, against {against}: {verdict}"]
        head += [approximate_text(self.plan)] if self.plan.approximate else []
        return "\n".join([*head, "", *table(("value", "largest difference"), rows)])


@dataclass(frozen=True)
class Course:
    """The state of a loop after some ticks, and the metrics of each tick."""

    values: Mapping[str, Any]
    metrics: Mapping[str, Any]


def verify_plan(plan: Plan, backend: str, *, ticks: int, state: Any = None) -> Verification:
    """Compare `plan` with the fused program, with the plan's lags, from the same state."""
    if plan.asynchronous or any(
        isinstance(c.flow, Latest) and c.flow.max_lag != 0 for c in plan.channels
    ):
        raise SettingError(
            f"what {plan.distribution.name} computes depends on the order of arrival, "
            "so there is no reference to compare it with",
            "Verify it with a lag of 0, or a distribution policy whose flows are in lockstep.",
        )
    graph = plan.graph
    start = graph.origin.start(0, graph.envs) if state is None else state
    got = _course(plan, backend, ticks, start)
    named = dict(zip(graph.inputs, jax.tree.leaves(start), strict=True))
    # The reference calls a host stage in place, not in the fragment that has it.
    if any(lag_of(c.flow) for c in plan.channels) or any(s.host for s in graph.stages):
        wanted = Course(*reference_course(plan, named, ticks))
    else:
        wanted = _course(fused_plan(graph, plan), "threads", ticks, start)
    found = {
        name: carried_difference(named[name], got.values[name], wanted.values[name])
        for name in graph.inputs
    }
    shown = {
        f"{METRICS}.{name}": shown_difference(got.metrics[name], x)
        for name, x in wanted.metrics.items()
    }
    return Verification(plan, backend, ticks, by_root(found) | shown, tolerance_of(graph))


def _course(plan: Plan, backend: str, ticks: int, start: Any) -> Course:
    shown: dict[str, list[np.ndarray]] = {link.outer: [] for link in plan.graph.metrics}

    def watch(tick: int, metrics: Mapping[str, np.ndarray]) -> None:
        for name, xs in shown.items():
            xs.append(np.asarray(metrics[name]))

    ended = run(plan, backend, ticks=ticks, state=start, watch=watch)
    if ended.stopped_by:
        raise KeyboardInterrupt
    return Course(ended.values, {name: np.stack(xs) for name, xs in shown.items()})


def tolerance_of(graph: Graph) -> float:
    """The tolerance of a loop's differences, by the coarsest float type that it uses."""
    kinds = {kind for node in leaves(graph) for kind in _kinds(node.code.equation)}
    coarsest = max((float(jnp.finfo(kind).eps) for kind in kinds), default=0.0)
    return max(TOLERANCE, min(MOST, COARSE * coarsest))


def _kinds(equation: Any) -> Iterator[Any]:
    """The float types that an equation and its sub-equations compute."""
    if equation is None:
        return
    for var in equation.outvars:
        if jnp.issubdtype(var.aval.dtype, jnp.floating):
            yield var.aval.dtype
    for jaxpr in below(equation):
        for inner in jaxpr.eqns:
            yield from _kinds(inner)


def fused_plan(graph: Graph, plan: Plan) -> Plan:
    """The fused plan of a plan's loop."""
    whole = graph.origin.annotated(graph.envs)
    return make_plan(whole, fused(), plan.cluster)


def by_root(found: Mapping[str, float]) -> dict[str, float]:
    """The largest difference for each prefix of names, of two parts."""
    roots: dict[str, float] = {}
    for name, size in found.items():
        root = ".".join(name.split(".")[:2])
        roots[root] = max(roots.get(root, 0.0), size)
    return roots


def difference(a: Any, b: Any) -> float:
    """The largest difference of two arrays, relative for values larger than 1."""
    x, y = as_numbers(a), as_numbers(b)
    if not x.size:
        return 0.0
    same_nan = np.isnan(x) & np.isnan(y)
    gap = np.where(same_nan | (x == y), 0.0, np.abs(x - y) / np.maximum(1.0, np.abs(y)))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap)))
