"""Laws of simulation, over random costs: it agrees with the estimate and keeps lag bounds."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from laws.cases import chase
from laws.test_estimates import FOUR, GRAPH, found, host, profiles
from shoal.planning.laws import make_plan
from shoal.profiling.sites import sites_of
from shoal.profiling.span_file import SpanFile
from shoal.profiling.spans import Kind
from shoal.profiling.trace import trace_json
from shoal.roles import with_roles
from shoal.simulation.estimate import estimate, lag_bound
from shoal.simulation.events import simulate
from shoal.simulation.machines import Clock, SharedCores
from shoal.simulation.profile import Message, Point, Profile
from shoal.simulation.script import Scripts

LOCKSTEP = [shoal.fused(1), shoal.single_learner_coarse(1), shoal.single_learner_coarse(2),
            shoal.single_learner_coarse(4)]  # fmt: skip
WORLD = shoal.trace(*chase(), envs=8)
SERVED = [shoal.single_learner_fine(2), shoal.decoupled(2), shoal.decoupled(2, ring=2),
          shoal.single_learner_fine(2, ring=2), shoal.decoupled(2, 2, lag=1, ring=2)]  # fmt: skip


def flat(plan, seconds=1e-3, message=1e-4):
    """A profile in which every part of a plan takes as long, at any size."""
    known = Profile("", "", {}, {b: Message(message, 1e12) for b in ("threads", "processes")})
    empty = Scripts(plan, known)
    for f in plan.distribution.fragments:
        for name, size in empty.parts(f.name):
            known = known.joined({name: [Point(n * size, seconds) for n in (1, 2, 4, 8)]})
    return known


@settings(max_examples=15, deadline=None)
@given(profiles(), st.sampled_from(LOCKSTEP), st.sampled_from([1, 2, 4]),
       st.sampled_from(["threads", "processes"]))  # fmt: skip
def test_without_noise_a_lockstep_plan_takes_as_long_as_estimated(profile, policy, cores, backend):
    scripts = Scripts(make_plan(GRAPH, policy, host(cores)), profile, backend)
    said, done = estimate(scripts), simulate(scripts, 12)
    assert done.tick_seconds == pytest.approx(said.tick_seconds, rel=1e-6)
    assert done.steps_per_second == pytest.approx(said.steps_per_second, rel=1e-6)


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("policy", SERVED[:2], ids=lambda p: p.name)
def test_the_same_holds_of_cuts_inside_loops(policy, backend):
    plan = make_plan(WORLD, with_roles(WORLD, policy), FOUR)
    scripts = Scripts(plan, flat(plan), backend)
    said, done = estimate(scripts), simulate(scripts, 6)
    assert done.tick_seconds == pytest.approx(said.tick_seconds, rel=1e-3)


@settings(max_examples=10, deadline=None)
@given(profiles(), st.integers(0, 2**32 - 1))
def test_no_plan_is_stuck_or_exceeds_its_lag(profile, seed):
    for one in found(1):
        scripts = Scripts(one.plan, profile, one.backend)
        done = simulate(scripts, 12, seed)
        assert max(done.lags, default=0) <= lag_bound(one.plan)
        assert all(share <= 1 + 1e-9 for share in done.busy.values())


@settings(max_examples=10, deadline=None)
@given(profiles(), st.sampled_from([1, 2, 4]))
def test_what_overlaps_doesn_t_beat_what_limits_it(profile, cores):
    for policy in (shoal.single_learner_coarse(2, lag=1), shoal.impala(4, max_lag=3)):
        scripts = Scripts(make_plan(GRAPH, policy, host(cores)), profile, "processes")
        least = estimate(scripts).tick_seconds
        assert simulate(scripts, 150).tick_seconds >= 0.95 * least


@pytest.mark.parametrize("policy", SERVED, ids=str)
def test_served_plans_run_to_their_end_and_hide_waits(policy):
    plan = make_plan(WORLD, with_roles(WORLD, policy), FOUR)
    scripts = Scripts(plan, flat(plan), "processes")
    done = simulate(scripts, 6)
    assert done.ticks == 6
    assert done.tick_seconds > 0
    assert max(done.lags, default=0) <= lag_bound(plan)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([8, 16, 48]), st.sampled_from([1, 3, 16]), st.integers(1, 16),
       st.sampled_from([0, 1]))  # fmt: skip
def test_exchangeable_replicas_may_be_lumped(actors, cores, most, lag):
    graph = GRAPH.origin.annotated(48)
    plan = make_plan(graph, shoal.single_learner_coarse(actors, lag), host(cores))
    scripts = Scripts(plan, flat(plan), "processes")
    whole = simulate(scripts, 12, lumped=actors)
    lumped = simulate(scripts, 12, lumped=most)
    assert lumped.tick_seconds == pytest.approx(whole.tick_seconds, rel=1e-6)
    assert lumped.busy == pytest.approx(whole.busy, rel=1e-6)
    assert lumped.events <= whole.events


def test_noise_is_the_same_for_the_same_seed_and_slows_a_gather():
    plan = make_plan(GRAPH, shoal.single_learner_coarse(4), FOUR)
    noisy = (0.5, 0.8, 1.0, 1.2, 2.0, 5.0)
    known = flat(plan)
    costs = {
        name: replace(c, points=tuple(replace(p, quantiles=noisy) for p in c.points))
        for name, c in known.costs.items()
    }
    scripts = Scripts(plan, replace(known, costs=costs), "processes")
    assert simulate(scripts, 30, seed=1) == simulate(scripts, 30, seed=1)
    assert simulate(scripts, 30, seed=1).tick_seconds > simulate(scripts, 30).tick_seconds


@pytest.mark.parametrize("policy", [*SERVED, shoal.single_learner_coarse(4)], ids=str)
def test_spans_are_all_of_a_worker_s_time_in_order(policy):
    plan = make_plan(WORLD, with_roles(WORLD, policy), FOUR)
    done = simulate(Scripts(plan, flat(plan), "processes"), 3)
    for spans in done.spans.values():
        timed = spans[spans["kind"] != Kind.TURN]
        assert (timed["end"][:-1] <= timed["begin"][1:] + 1).all()
        assert set(spans["site"]) <= {site.number for site in sites_of(plan)}
    about = {"workers": [{"name": name} for name in done.spans],
             "sites": [asdict(site) for site in sites_of(plan)]}  # fmt: skip
    events = trace_json(SpanFile(about, None, list(done.spans.values())))["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "s", "f"}


def test_cores_are_shared_among_what_runs():
    """Two seconds of work on one core from the start, one more after a second."""
    clock, ended = Clock(), {}
    cores = SharedCores(clock, 1.0)
    cores.add(2.0, 1.0, lambda: ended.update(first=clock.now))
    clock.at(1.0, lambda: cores.add(0.5, 1.0, lambda: ended.update(second=clock.now)))
    clock.run(lambda: len(ended) == 2)
    assert ended == pytest.approx({"second": 2.0, "first": 2.5})
