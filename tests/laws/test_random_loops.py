"""Whatever the loop and the cut: either the planner refuses, or the numbers are the loop's."""

from collections import Counter

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from laws.cases import FOUR, ONE
from laws.random_loops import ENVS, cuts, loops
from shoal.runtime.reference import run_reference
from shoal.runtime.verify import difference

TICKS, TOLERANCE = 3, 1e-5


def run_cut(loop, cut, cluster, backend):
    """How a cut of a loop fared: refused, or run with the right numbers."""
    graph = shoal.trace(loop, envs=ENVS)
    try:
        plan = shoal.plan(graph, cut, cluster)
    except shoal.ShoalError:
        return "refused"
    start, shown = graph.origin.start(0, ENVS), []
    result = shoal.run(
        plan, backend, ticks=TICKS, state=start, watch=lambda _, metrics: shown.append(metrics)
    )
    lagged = any(channel.flow.lag for channel in plan.channels)
    wanted, metrics = delayed(plan, start) if lagged else undelayed(loop, start)
    for name, x in wanted.items():
        assert difference(result.values[name], x) < TOLERANCE, name
    assert lagged or len(shown) == TICKS
    for name, x in metrics.items():
        assert all(difference(row[name], x[t]) < TOLERANCE for t, row in enumerate(shown)), name
    return "lagged" if lagged else "cut" if plan.channels else "whole"


def undelayed(loop, start):
    """The loop itself, in plain JAX."""
    turn = jax.jit(lambda state: jax.lax.scan(lambda s, _: loop.tick(None, s), state, length=TICKS))
    return turn(start)


def delayed(plan, start):
    """The delayed reference; it shows nothing."""
    return run_reference(plan, start, TICKS), {}


def try_cuts(examples):
    """Try so many cuts of loops, and count how they fared."""
    fared = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.data(), st.sampled_from([ONE, FOUR]), st.sampled_from(["inline", "threads"]))
    def law(data, cluster, backend):
        loop = data.draw(loops())
        fared[run_cut(loop, data.draw(cuts(loop)), cluster, backend)] += 1

    law()
    return fared


def test_a_cut_of_any_loop_is_refused_or_right():
    fared = try_cuts(25)
    assert fared["refused"] < 15
    assert fared["cut"] > 3


@pytest.mark.slow
def test_a_cut_of_many_loops_is_refused_or_right():
    fared = try_cuts(400)
    assert fared["refused"] < 200
    assert fared["cut"] > 60
    assert fared["lagged"] > 10
