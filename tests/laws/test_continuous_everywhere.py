"""Actor-critics with replay: the fused numbers under every cut, whatever noise learning draws."""

from functools import cache

import jax
import pytest

import shoal
from laws.cases import FOUR, ONE, graph_of, start_of
from laws.differences import difference
from shoal.runtime.debug.verify import verify_plan

pytest.importorskip("gymnax")

TICKS, TOLERANCE = 8, 1e-5
POLICIES = {
    "fused": shoal.fused(),
    "fused(2)": shoal.fused(2),
    "coarse(2)": shoal.single_learner_coarse(2),
    "fine(2)": shoal.single_learner_fine(2),
    "multi_learner(2)": shoal.multi_learner(2),
    "central(2)": shoal.central(2),
    "decoupled(2,2,2)": shoal.decoupled(2, 2, 2),
    "ape_x(2)": shoal.ape_x(2),
}
# Of every policy one of the two, since they are cut in the same places; the others are slow.
QUICK = {
    "sac": ("coarse(2)", "multi_learner(2)", "central(2)", "ape_x(2)"),
    "td3": ("fine(2)", "central(2)", "decoupled(2,2,2)", "fused(2)"),
}
CASES = [
    pytest.param(kind, name, marks=() if name in QUICK[kind] else pytest.mark.slow)
    for kind in QUICK
    for name in POLICIES
    if name != "fused"
]


@cache
def ran(kind, name):
    plan = shoal.plan(graph_of(kind), POLICIES[name], FOUR)
    return shoal.run(plan, "threads", ticks=TICKS, state=start_of(kind))


def largest(got, wanted):
    return max(difference(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_cut_gives_the_fused_numbers(kind, name):
    assert largest(ran(kind, name).values, ran(kind, "fused").values) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK)
def test_processes_give_the_fused_numbers(kind):
    plan = shoal.plan(graph_of(kind), shoal.ape_x(2), ONE)
    assert verify_plan(plan, "processes", ticks=TICKS, state=start_of(kind)).holds


@pytest.mark.parametrize("kind", QUICK)
def test_nothing_is_learnt_before_there_is_enough_and_then_all_is(kind):
    algorithm, learner = graph_of(kind).origin.algorithm, start_of(kind).learner
    few = (algorithm.learning_starts_per_env - 1) // algorithm.num_steps
    plan = shoal.plan(graph_of(kind), POLICIES["fused"], FOUR)
    early = shoal.run(plan, "threads", ticks=few, state=start_of(kind)).state.learner
    late = ran(kind, "fused").state.learner
    assert few > 0
    start = leaves(learner)
    assert all(difference(*pair) == 0 for pair in zip(leaves(early), start, strict=True))
    assert all(difference(*pair) > 0 for pair in zip(leaves(late), start, strict=True))


def leaves(learner):
    return jax.tree.leaves((learner.params, learner.target))
