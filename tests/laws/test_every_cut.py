"""Whatever the cut, the replicas, the lag and the backend: the fused program's numbers."""

import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import shoal
from shoal.runtime.reference import run_reference
from shoal.runtime.verify import difference

sys.path.insert(0, str(Path(__file__).parent))

TICKS, ENVS, TOLERANCE = 10, 8, 1e-5
ONE = shoal.Cluster((shoal.Host("host0", 2, (shoal.Device("cpu", 0),)),))
FOUR = shoal.Cluster((shoal.Host("host0", 2, tuple(shoal.Device("cpu", i) for i in range(4))),))


def own_policy(lag: int = 0) -> shoal.DistributionPolicy:
    """Learning alone on one device; everything a row at a time in two replicas."""
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
LAGGED = {
    "coarse(2, lag=1)": shoal.single_learner_coarse(2, lag=1),
    "coarse(1, lag=2)": shoal.single_learner_coarse(1, lag=2),
    "sebulba(2,2, lag=1)": shoal.sebulba(2, 2, lag=1),
    "decoupled(2,1,1, lag=1)": shoal.decoupled(2, 1, 1, lag=1),
    "own(lag=1)": own_policy(lag=1),
}


@cache
def graph_of(loop):
    if loop == "chase":
        from outside_loop import Chase

        return shoal.trace(Chase(), envs=ENVS)
    pytest.importorskip("gymnax")
    from shoal.algorithms import PPO
    from shoal.envs import make

    settings = {"learning_rate": 3e-3, "normalise_observations": True}
    small = PPO(steps=8, epochs=2, minibatches=2, hidden=(8,), **settings)
    return shoal.trace(small, make("CartPole-v1"), envs=ENVS)


@cache
def fused(loop):
    return shoal.run(shoal.plan(graph_of(loop), shoal.fused(), ONE), ticks=TICKS).values


def largest(got, wanted):
    assert got.keys() == wanted.keys()
    return max(difference(got[name], wanted[name]) for name in wanted)


LOOPS = pytest.mark.parametrize("loop", ["chase", "ppo"])
BACKENDS = pytest.mark.parametrize("backend", ["inline", "threads"])


@LOOPS
@BACKENDS
@pytest.mark.parametrize("cluster", [ONE, FOUR], ids=["one device", "four devices"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_cut_gives_the_fused_numbers(loop, backend, cluster, name):
    plan = shoal.plan(graph_of(loop), POLICIES[name], cluster)
    got = shoal.run(plan, backend, ticks=TICKS)
    assert got.ticks == TICKS
    assert largest(got.values, fused(loop)) < TOLERANCE


@LOOPS
@BACKENDS
@pytest.mark.parametrize("name", LAGGED)
def test_a_lag_is_a_delay_of_the_fused_program(loop, backend, name):
    graph = graph_of(loop)
    plan = shoal.plan(graph, LAGGED[name], FOUR)
    got = shoal.run(plan, backend, ticks=TICKS).values
    start = dict(zip(graph.inputs, jax.tree.leaves(graph.origin.start(0, ENVS)), strict=True))
    assert largest(got, run_reference(plan, start, TICKS)) < TOLERANCE
    assert largest(got, fused(loop)) > 10 * TOLERANCE  # a lag does make a difference


@LOOPS
def test_the_delayed_reference_of_no_delay_is_the_fused_program(loop):
    graph = graph_of(loop)
    plan = shoal.plan(graph, shoal.decoupled(2, 1, 1), ONE)
    start = dict(zip(graph.inputs, jax.tree.leaves(graph.origin.start(0, ENVS)), strict=True))
    assert largest(run_reference(plan, start, TICKS), fused(loop)) < TOLERANCE


@LOOPS
def test_the_same_seed_gives_the_same_state_with_1_2_and_4_replicas(loop):
    plans = [shoal.plan(graph_of(loop), shoal.single_learner_coarse(n), ONE) for n in (1, 2, 4)]
    one, two, four = (shoal.run(plan, ticks=TICKS).values for plan in plans)
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


def test_a_run_goes_on_from_a_state_as_if_it_had_not_stopped():
    graph = graph_of("chase")
    half = shoal.run(shoal.plan(graph, shoal.single_learner_coarse(2), ONE), ticks=4)
    whole = shoal.run(shoal.plan(graph, shoal.fused(), ONE), ticks=TICKS - 4, state=half.state)
    assert largest(whole.values, fused("chase")) < TOLERANCE
