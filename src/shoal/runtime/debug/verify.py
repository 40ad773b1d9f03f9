"""Verifies that a plan computes what the fused program computes, by the largest differences.

An optimiser moves a parameter of size 1 by 0.0003 a tick: relative to the parameter, an update that
is completely wrong is a small difference. So carried values are compared relative to their change
since the start, up to floating-point resolution. Metrics have no initial value, and are compared
relative to their size.
"""

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
from shoal.runtime.debug.reference import reference_course
from shoal.runtime.run import run
from shoal.tracing.equations import below

TOLERANCE = 1e-4
COARSE = 16  # epsilons of the coarsest type that a different order of additions may cost
MOST = 0.25  # of a change; more isn't rounding in any type
ULPS = 4  # units in the last place that a different order of additions may cost
METRICS = "metrics"  # the prefix of their rows in the table, as in the graph


@dataclass(frozen=True)
class Verification:
    """The largest difference of each carried value and metric, and the tolerance.

    For a carried value it is relative to its change in the reference, for a metric to its size; see
    `carried_difference`.
    """

    plan: Plan
    backend: str
    ticks: int
    differences: Mapping[str, float]
    tolerance: float = TOLERANCE
    unclear: frozenset[str] = frozenset()  # values that change by no more than rounding

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
        rows = [(name, self._cell(name)) for name in self.differences]
        what = f"{self.plan.distribution.name} on {self.backend}, {self.ticks} ticks"
        head = [f"{what}, against {against}: {verdict}"]
        head += [approximate_text(self.plan)] if self.plan.approximate else []
        return "\n".join([*head, "", *table(("value", "largest difference"), rows)])

    def _cell(self, name: str) -> str:
        difference = self.differences[name]
        if not difference and name in self.unclear:
            return "unknown: it changes by no more than rounding; verify more ticks"
        return f"{difference:.1e}" if difference else "0"


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
    unclear = by_root({n: _is_unclear(named[n], wanted.values[n]) for n in graph.inputs})
    return Verification(
        plan,
        backend,
        ticks,
        by_root(found) | shown,
        tolerance_of(graph),
        frozenset(name for name, is_unclear in unclear.items() if is_unclear),
    )


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


def carried_difference(start: Any, got: Any, wanted: Any) -> float:
    """The largest difference of an array, in units of the largest change from `start` to `wanted`.

    Differences within floating-point resolution don't count. Keys, integers and booleans have to
    be equal.
    """
    if is_discrete(wanted):
        return _discrete(got, wanted)
    before, x, y = as_numbers(start), as_numbers(got), as_numbers(wanted)
    size = np.maximum(np.abs(before), np.abs(y))
    return _excess(x, y, ULPS * resolution(wanted) * size, _largest(y - before))


def _is_unclear(start: Any, wanted: Any) -> bool:
    """Whether an array changes, but so little that a tenth of its change passes for rounding."""
    if is_discrete(wanted):
        return False
    before, y = as_numbers(start), as_numbers(wanted)
    size, change = np.maximum(np.abs(before), np.abs(y)), np.abs(y - before)
    moved = np.isfinite(change) & (change > 0)
    return bool(
        moved.any() and np.all(change[moved] < 10 * ULPS * resolution(wanted) * size[moved])
    )


def shown_difference(got: Any, wanted: Any) -> float:
    """The largest difference of a metric over all ticks, in units of its largest value.

    Differences within floating-point resolution, at size 1 for smaller numbers, don't count: a mean
    of values that cancel out is pure rounding.
    """
    if is_discrete(wanted):
        return _discrete(got, wanted)
    x, y = as_numbers(got), as_numbers(wanted)
    return _excess(x, y, ULPS * resolution(wanted) * np.maximum(1.0, np.abs(y)), _largest(y))


def _excess(x: np.ndarray, y: np.ndarray, allowed: np.ndarray, unit: float) -> float:
    """The distance of `x` and `y` beyond `allowed`, in `unit`s; NaNs and infinities are equal."""
    if x.shape != y.shape:
        return float("inf")
    with np.errstate(invalid="ignore", over="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        gap = np.where(same, 0.0, np.abs(x - y))
        gap = np.where(np.isnan(gap), np.inf, gap)
        rounding = np.where(np.isfinite(allowed), allowed, 0.0)
        most = _largest_of(np.where(gap > rounding, gap, 0.0))
    if not most:
        return 0.0
    return most / unit if unit else float("inf")


def _discrete(got: Any, wanted: Any) -> float:
    """0 if two integer arrays are equal, else their largest difference."""
    x, y = raw_numbers(got), raw_numbers(wanted)
    if x.shape == y.shape and np.array_equal(x, y):
        return 0.0
    return max(1.0, _excess(as_numbers(got), as_numbers(wanted), np.zeros(()), 1.0))


def _largest(x: np.ndarray) -> float:
    """The largest finite absolute value of an array."""
    return _largest_of(np.where(np.isfinite(x), np.abs(x), 0.0))


def _largest_of(x: np.ndarray) -> float:
    return float(np.max(x)) if x.size else 0.0


def is_discrete(x: Any) -> bool:
    """Whether an array holds keys, integers or booleans."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def resolution(x: Any) -> float:
    """The machine epsilon of an array's type."""
    return float(jnp.finfo(x.dtype).eps)


def raw_numbers(x: Any) -> np.ndarray:
    """An array, or the key data of PRNG keys, in NumPy."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def as_numbers(x: Any) -> np.ndarray:
    """An array, or the key data of PRNG keys, as float64; complex numbers by their parts."""
    raw = raw_numbers(x)
    if raw.dtype.kind == "c":
        return np.stack([np.real(raw), np.imag(raw)]).astype(np.float64)
    return raw.astype(np.float64)
