"""Recurrent PPO, A2C and IMPALA: the fused numbers under every cut, or a bounded lag."""

from functools import cache

import numpy as np
import pytest

import shoal
from laws.cases import FOUR, ONE
from laws.differences import difference
from shoal.algorithms import A2C, IMPALA, PPO
from shoal.runtime.debug.verify import verify_plan

pytest.importorskip("gymnax")

ENVS, TICKS, TOLERANCE = 4, 5, 1e-5
SMALL = {"num_steps": 4, "hidden": (8,), "learning_rate": 0.01, "memory_width": 8}
TWICE = {"update_epochs": 2, "num_minibatches": 2, "sequence_length": 1}
LOOPS = {
    "ppo, gru": PPO(**SMALL, **TWICE, memory="gru", norm_reward=True, decoupled=True),
    "ppo, transformer": PPO(**SMALL, **TWICE, memory="transformer"),
    "a2c": A2C(**SMALL, norm_obs=True),
    "a3c": A2C(**SMALL),
    "impala, lstm": IMPALA(**SMALL, memory="lstm"),
}
POLICIES = {
    "fused": shoal.fused(),
    "coarse(2)": shoal.single_learner_coarse(2),
    "fine(2)": shoal.single_learner_fine(2),
    "fine(2), ring": shoal.single_learner_fine(2, ring=2),
    "multi_learner(2)": shoal.multi_learner(2),
    "central(2)": shoal.central(2),
    "decoupled(2,2,2)": shoal.decoupled(2, 2, 2),
}
slow = pytest.mark.slow
CUT = [
    ("ppo, gru", "coarse(2)"),
    ("ppo, gru", "central(2)"),
    pytest.param("ppo, gru", "fine(2), ring", marks=slow),
    pytest.param("ppo, gru", "decoupled(2,2,2)", marks=slow),
    pytest.param("ppo, transformer", "multi_learner(2)", marks=slow),
    ("a2c", "multi_learner(2)"),
    pytest.param("a2c", "central(2)", marks=slow),
    ("impala, lstm", "fine(2)"),
    pytest.param("impala, lstm", "decoupled(2,2,2)", marks=slow),
]


@cache
def graph_of(loop):
    return shoal.trace(LOOPS[loop], shoal.envs.make("CartPole-v1"), envs=ENVS)


@cache
def start_of(loop):
    return graph_of(loop).origin.start(0, ENVS)


@cache
def ran(loop, policy):
    plan = shoal.plan(graph_of(loop), POLICIES[policy], FOUR)
    return shoal.run(plan, "threads", ticks=TICKS, state=start_of(loop)).values


@pytest.mark.parametrize(("loop", "policy"), CUT)
def test_every_cut_gives_the_fused_numbers(loop, policy):
    wanted = ran(loop, "fused")
    got = ran(loop, policy)
    assert max(difference(got[name], wanted[name]) for name in wanted) < TOLERANCE


def test_memory_crosses_between_processes():
    plan = shoal.plan(graph_of("ppo, gru"), shoal.single_learner_coarse(2), ONE)
    assert verify_plan(plan, "processes", ticks=TICKS, state=start_of("ppo, gru")).holds


@pytest.mark.parametrize(
    ("loop", "policy", "backend"),
    [
        ("impala, lstm", shoal.impala(2, take=1, max_lag=2), "threads"),
        ("ppo, gru", shoal.impala(2, take=1, max_lag=2), "inline"),
        ("a3c", shoal.central(2, max_lag=2), "processes"),
    ],
)
def test_an_asynchronous_plan_stays_within_its_bound(loop, policy, backend):
    lags, seen = [], []

    def watch(tick, metrics):
        lags.extend(metrics["lag"])
        seen.append(metrics["loss"])

    shoal.run(shoal.plan(graph_of(loop), policy, ONE), backend, ticks=8, watch=watch)
    assert len(lags) == 8
    assert max(lags) <= 2
    assert np.all(np.isfinite(seen))
