"""Whatever the cut, the replicas, the lag and the backend: the fused program's numbers."""

from functools import cache

import jax
import numpy as np
import pytest

import shoal
from laws.cases import CHASE, FOUR, ONE, PPO, graph_of, no_gymnax, start_of
from laws.differences import difference
from laws.outside_loop import Chase
from shoal.runtime.debug.reference import run_reference
from shoal.runtime.debug.verify import verify_plan

TICKS, TOLERANCE = 10, 1e-5


def own_policy(lag=0):
    """What a user may write: a pool of worlds, a pool of minds, and two learners that agree."""
    return shoal.DistributionPolicy(
        "own",
        (
            shoal.Fragment("simulator", ("env",), 4),
            shoal.Fragment("mind", (shoal.PER_ENV,), 2),
            shoal.Fragment("school", (shoal.THE_REST,), 2, "gpu else cpu"),
        ),
        (shoal.Wire("school", "mind", shoal.Lockstep(lag)),),
    )


POLICIES = {
    "fused(2)": shoal.fused(2),
    "fused(4)": shoal.fused(4),
    "coarse(1)": shoal.single_learner_coarse(1),
    "coarse(2)": shoal.single_learner_coarse(2),
    "coarse(4)": shoal.single_learner_coarse(4),
    "fine(2)": shoal.single_learner_fine(2),
    "multi_learner(2)": shoal.multi_learner(2),
    "central(2)": shoal.central(2),
    "decoupled(2,1,1)": shoal.decoupled(2, 1, 1),
    "decoupled(2,2,2)": shoal.decoupled(2, 2, 2),
    "sebulba(1,1)": shoal.sebulba(1, 1, lag=0),
    "sebulba(2,2)": shoal.sebulba(2, 2, lag=0),
    "own": own_policy(),
}
# With fewer devices than replicas, those that agree share a device, batched into one program.
AGREEING = ["fused(2)", "fused(4)", "central(2)", "decoupled(2,2,2)", "sebulba(2,2)", "own"]
LAGGED = {
    ("coarse(2)", 1): shoal.single_learner_coarse(2, lag=1),
    ("coarse(1)", 2): shoal.single_learner_coarse(1, lag=2),
    ("sebulba(2,2)", 1): shoal.sebulba(2, 2, lag=1),
    ("decoupled(2,1,1)", 1): shoal.decoupled(2, 1, 1, lag=1),
    ("decoupled(2,2,2)", 2): shoal.decoupled(2, 2, 2, lag=2),
    ("own", 1): own_policy(lag=1),
}
LOOPS = pytest.mark.parametrize("loop", [CHASE, PPO])
# The cheap loop under every policy, and PPO, which is cut in the same places, under one of a kind.
FOR_PPO = ("fused(4)", "coarse(2)", "fine(2)", "multi_learner(2)", "decoupled(2,2,2)")


def cells(names):
    """Every loop under every policy; what is slow is run by `make test-slow`."""
    for name in names:
        yield pytest.param("chase", name)
        marks = () if name in FOR_PPO else (pytest.mark.slow,)
        yield pytest.param("ppo", name, marks=(no_gymnax, *marks))


def state_after(plan, backend, loop):
    result = shoal.run(plan, backend, ticks=TICKS, state=start_of(loop))
    assert result.ticks == TICKS
    return result.values


@cache
def fused(loop):
    return state_after(shoal.plan(graph_of(loop), shoal.fused(), ONE), "inline", loop)


def largest(got, wanted):
    assert got.keys() == wanted.keys()
    return max(difference(got[name], wanted[name]) for name in wanted)


def named(loop, state):
    return dict(zip(graph_of(loop).inputs, jax.tree.leaves(state), strict=True))


@LOOPS
def test_the_fused_program_is_the_loop(loop):
    origin = graph_of(loop).origin

    @jax.jit
    def ticks(state):
        tick = lambda state, _: (origin.algorithm.tick(origin.env, state)[0], None)  # noqa: E731
        return jax.lax.scan(tick, state, length=TICKS)[0]

    assert largest(fused(loop), named(loop, ticks(start_of(loop)))) < TOLERANCE


@pytest.mark.parametrize(("loop", "name"), [*cells(POLICIES)])
def test_every_cut_gives_the_fused_numbers(loop, name):
    plan = shoal.plan(graph_of(loop), POLICIES[name], FOUR)
    inline = state_after(plan, "inline", loop)
    assert largest(inline, fused(loop)) < TOLERANCE
    assert largest(state_after(plan, "threads", loop), inline) == 0


@pytest.mark.parametrize(("loop", "name"), [*cells(AGREEING)])
def test_replicas_that_share_a_device_give_the_fused_numbers(loop, name):
    plan = shoal.plan(graph_of(loop), POLICIES[name], ONE)
    assert largest(state_after(plan, "inline", loop), fused(loop)) < TOLERANCE


@pytest.mark.parametrize(
    ("loop", "name", "lag"),
    [pytest.param("chase", *key) for key in LAGGED]
    + [
        pytest.param("ppo", "coarse(2)", 1, marks=no_gymnax),
        pytest.param("ppo", "decoupled(2,2,2)", 2, marks=(no_gymnax, pytest.mark.slow)),
    ],
)
def test_a_lag_is_a_delay_of_the_fused_program(loop, name, lag):
    plan = shoal.plan(graph_of(loop), LAGGED[name, lag], FOUR)
    inline = state_after(plan, "inline", loop)
    wanted = run_reference(plan, named(loop, start_of(loop)), TICKS)
    assert largest(inline, wanted) < TOLERANCE
    assert largest(inline, fused(loop)) > 100 * TOLERANCE  # a lag does make a difference
    assert largest(state_after(plan, "threads", loop), inline) == 0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_delayed_reference_is_the_loop_with_a_delay_written_by_hand(lag):
    chase, state = Chase(), start_of("chase")
    past = [state.params] * lag
    tick = jax.jit(lambda state, params: chase.learn(state, *chase.live(state, params))[0])
    for _ in range(TICKS):
        past.append(state.params)
        state = tick(state, past.pop(0))
    plan = shoal.plan(graph_of("chase"), shoal.decoupled(2, 1, 1, lag=lag), ONE)
    got = run_reference(plan, named("chase", start_of("chase")), TICKS)
    assert largest(got, named("chase", state)) < TOLERANCE


@pytest.mark.parametrize("loop", [CHASE, pytest.param("ppo", marks=(no_gymnax, pytest.mark.slow))])
def test_the_same_seed_gives_the_same_state_with_1_2_and_4_replicas(loop):
    plans = [shoal.plan(graph_of(loop), shoal.single_learner_coarse(n), ONE) for n in (1, 2, 4)]
    one, two, four = (state_after(plan, "threads", loop) for plan in plans)
    assert largest(two, one) < TOLERANCE
    assert largest(four, one) < TOLERANCE


def test_metrics_are_those_of_the_fused_program():
    seen = {}
    for name, policy in (("fused", shoal.fused()), ("cut", shoal.decoupled(2, 1, 1))):
        rows = seen[name] = []
        plan = shoal.plan(graph_of("chase"), policy, ONE)
        shoal.run(plan, ticks=TICKS, watch=lambda tick, m, rows=rows: rows.append((tick, m)))
    assert [tick for tick, _ in seen["fused"]] == list(range(TICKS))
    for (tick, wanted), (same_tick, got) in zip(seen["fused"], seen["cut"], strict=True):
        assert tick == same_tick
        for name, x in wanted.items():
            np.testing.assert_allclose(got[name], x, atol=TOLERANCE)


def test_a_run_resumes_from_a_state_as_if_it_had_not_stopped():
    graph = graph_of("chase")
    half = shoal.run(shoal.plan(graph, shoal.single_learner_coarse(2), ONE), ticks=4)
    whole = shoal.run(shoal.plan(graph, shoal.fused(), ONE), ticks=TICKS - 4, state=half.state)
    assert largest(whole.values, fused("chase")) < TOLERANCE


def test_verifying_a_plan_runs_both_and_compares():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), FOUR)
    found = verify_plan(plan, "threads", ticks=2, state=start_of("chase"))
    assert found.holds
    assert 0 <= found.largest < TOLERANCE
