"""Laws of estimates and choices, over random costs of a small loop: nothing is compiled."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.planning.laws import check_plan, make_plan
from shoal.search.candidates import Goal, candidates, changes
from shoal.search.choose import MARGIN, chosen, ranking
from shoal.simulation.estimate import estimate
from shoal.simulation.profile import Curve, Message, Point, Profile
from shoal.simulation.script import Scripts
from unit.toy_loop import agreeing, traced


def host(cores, memory=0):
    cpus = tuple(shoal.Device("cpu", i) for i in range(cores))
    return shoal.Cluster((shoal.Host("here", cores, cpus, memory),))


FOUR = host(4)
GRAPH = traced(agreeing)


@cache
def found(max_lag):
    return candidates(GRAPH, FOUR, Goal(max_lag=max_lag))


PARTS = sorted({part for c in found(1) for f in c.plan.distribution.fragments
                for part in Scripts(c.plan, Profile("", "")).parts(f.name)})  # fmt: skip
SECONDS = st.floats(1e-6, 1e-2)


@st.composite
def profiles(draw):
    costs = {}
    for name, size in PARTS:
        point = Point(size, draw(SECONDS), draw(st.sampled_from([0.5, 1.0, 2.0])))
        costs.setdefault(name, []).append(point)
    messages = {b: Message(draw(st.floats(0, 1e-3)), 1e9) for b in ("threads", "processes")}
    return Profile("loop", "machine", {}, messages).joined(costs)


def costing(seconds):
    """A profile in which a part takes as long as `seconds` says of its name, at any size."""
    profile = Profile("", "", {}, {"processes": Message(0.0)})
    for name, size in PARTS:
        profile = profile.joined({name: [Point(size, seconds(name))]})
    return profile


def estimates(profile, max_lag=1):
    return [(c, estimate(Scripts(c.plan, profile, c.backend))) for c in found(max_lag)]


def test_there_are_candidates_of_many_kinds():
    names = {c.plan.distribution.name for c in found(1)}
    assert {"fused", "single_learner_coarse", "impala"} <= names
    assert {c.backend for c in found(1)} == {"threads", "processes"}


@settings(max_examples=15, deadline=None)
@given(profiles(), st.data())
def test_what_costs_more_is_never_faster(profile, data):
    name = data.draw(st.sampled_from(sorted(profile.costs)))
    dearer = Curve(tuple(replace(p, seconds=2 * p.seconds) for p in profile.costs[name].points))
    after = replace(profile, costs={**profile.costs, name: dearer})
    for (one, before), (_, now) in zip(estimates(profile), estimates(after), strict=True):
        assert now.tick_seconds >= before.tick_seconds * (1 - 1e-9), one.name


@settings(max_examples=15, deadline=None)
@given(profiles())
def test_an_estimate_is_whole(profile):
    for one, said in estimates(profile):
        assert 0 < said.tick_seconds < float("inf")
        assert said.low <= said.steps_per_second * (1 + 1e-9) <= said.high * (1 + 1e-6)
        assert set(said.busy) == {f.name for f in one.plan.distribution.fragments}
        assert all(0 <= share <= 1 for share in said.busy.values())
        assert sum(said.memory.values()) > 0


@settings(max_examples=15, deadline=None)
@given(profiles(), st.integers(0, 1))
def test_a_choice_keeps_the_laws_and_the_numbers_unless_they_may_change(profile, max_lag):
    choice = chosen(GRAPH, FOUR, profile, Goal(max_lag=max_lag))
    check_plan(choice.plan)
    assert choice.plan.graph.envs == GRAPH.envs
    assert choice.estimate.lag <= max_lag
    if not max_lag:
        assert changes(choice.plan) == []
        assert "The numbers stay those of the loop." in choice.reasons
    elif changes(choice.plan):
        assert any("changes what is learnt" in line for line in choice.reasons)


@settings(max_examples=15, deadline=None)
@given(profiles(), st.integers(0, 1))
def test_no_candidate_is_faster_than_the_choice_by_more_than_the_margin(profile, max_lag):
    goal = Goal(max_lag=max_lag)
    choice = chosen(GRAPH, FOUR, profile, goal)
    ranked, missing = ranking(found(max_lag), profile, goal)
    assert not missing
    assert ranked[0].steps_per_second <= choice.best.steps_per_second * MARGIN * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4096), SECONDS), min_size=1, max_size=6),
       st.tuples(st.integers(1, 8192), st.integers(1, 8192)))  # fmt: skip
def test_a_curve_never_falls(points, sizes):
    curve = Curve(()).joined([Point(n, s) for n, s in points])
    assert curve.at(min(sizes)) <= curve.at(max(sizes)) * (1 + 1e-9)
    assert curve.at(min(sizes)) > 0


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_more_replicas_than_cores_don_t_help(cores):
    """Four actors, whose work is all that takes time, on as many cores or fewer."""
    profile = costing(lambda name: 0.1 if "move" in name else 1e-9)
    plan = make_plan(GRAPH, shoal.single_learner_coarse(4), host(cores))
    said = estimate(Scripts(plan, profile, "processes"))
    assert said.tick_seconds == pytest.approx(0.1 * 4 / cores, rel=0.01)


def test_a_lag_lets_fragments_overlap():
    profile = costing(lambda name: 0.1)
    said = [
        estimate(Scripts(make_plan(GRAPH, shoal.single_learner_coarse(2, lag), FOUR), profile,
                         "processes"))
        for lag in (0, 1)
    ]  # fmt: skip
    assert said[0].tick_seconds == pytest.approx(0.2, rel=0.01)
    assert said[1].tick_seconds == pytest.approx(0.1, rel=0.01)
    assert [one.lag for one in said] == [0, 1]
