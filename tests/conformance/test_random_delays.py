"""Lag stays within its bound on every backend under random delays of actors and learner."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.planning.policy import PER_BATCH, PER_ENV, Fragment, Latest, Wire

ENVS, TICKS, LONGEST = 4, 25, 0.006


def spec(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def some_time(seed):
    """Mostly short delays, sometimes long ones, so that the fastest replica changes."""
    time.sleep(LONGEST * np.random.default_rng(seed).random() ** 3)


class Dawdling:
    """Each side takes some time of its own; acting says which version it acted with."""

    def __init__(self, seed):
        self.seed = seed

    def init(self, key, env, envs):
        return {"version": jnp.int32(0), "turns": jnp.zeros(envs, jnp.int32)}

    def tick(self, env, state):
        turns, made_with = self.act(state["turns"], version=state["version"])
        turns = self.dawdle(turns)
        version, late = self.learn(state["version"], made_with, turns)
        return {"version": self.ponder(version), "turns": turns}, {"late": late}

    @shoal.stage(per="env")
    def act(self, turns, *, version):
        return turns + 1, version

    @shoal.host(spec, per="env")
    def dawdle(self, turns):
        some_time([self.seed, *turns.tolist()])
        return turns

    @shoal.stage
    def learn(self, version, made_with, turns):
        return version + 1, version - jnp.min(made_with) + 0 * jnp.max(turns)

    @shoal.host(spec)
    def ponder(self, version):
        some_time([self.seed, 77, int(version)])
        return version


def newest(max_lag):
    """Actors that wait only for the lag bound; every rollout is used."""
    actor, learner = Fragment("actor", (PER_ENV,), 2), Fragment("learner", (PER_BATCH,))
    return shoal.DistributionPolicy(
        "newest", (actor, learner), (Wire("learner", "actor", Latest(max_lag)),)
    )


POLICIES = {
    "first 2 of 4": (shoal.impala(4, 2, 2), 2),
    "first of 2": (shoal.impala(2, 1, 3), 3),
    "newest": (newest(2), 2),
    "newest, never late": (newest(0), 0),
}


@pytest.mark.parametrize("backend", ["inline", "threads", "processes"])
@pytest.mark.parametrize("name", POLICIES)
def test_lag_stays_within_its_bound_under_random_delays(name, backend):
    policy, bound = POLICIES[name]
    plan = shoal.plan(shoal.trace(Dawdling(seed=3), None, envs=ENVS), policy)
    measured, reported = [], []

    def watch(tick, metrics):
        measured.append(int(np.max(metrics.get("lag", 0))))
        reported.append(int(metrics["late"]))

    shoal.run(plan, backend, ticks=TICKS, watch=watch)
    assert len(reported) == TICKS
    assert 0 <= min(reported) <= max(reported) <= bound
    assert measured == reported
