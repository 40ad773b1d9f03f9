"""Observers see the newest values, change nothing, and no fragment waits for them."""

import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import shoal
from laws.cases import ONE, start_of
from laws.differences import difference
from laws.outside_loop import Chase
from shoal.runtime.run import RunCallbacks

TICKS, ENVS = 12, 8


class State(NamedTuple):
    chase: Any
    looks: jax.Array


@shoal.stage
def gaze(looks, params):
    """A function of the parameters alone."""
    return looks + 1, sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(params))


RELEASED = threading.Event()


@shoal.host(lambda looks, *params: looks, name="gaze")
def stare(looks, *params):
    """Block until the test releases it."""
    assert RELEASED.wait(60)
    return looks + 1


@dataclass(frozen=True)
class Looked:
    """The loop `Chase`, observed before every tick."""

    stares: bool = False

    def init(self, key, env, envs):
        return State(Chase().init(key, env, envs), jnp.int32(0))

    def tick(self, env, state):
        if self.stares:
            looks, seen = stare(state.looks, *jax.tree.leaves(state.chase.params)), 0.0
        else:
            looks, seen = gaze(state.looks, state.chase.params)
        chase, metrics = Chase().tick(env, state.chase)
        return State(chase, looks), metrics | ({} if self.stares else {"seen": seen})


@cache
def graph(stares=False):
    return shoal.trace(Looked(stares), envs=ENVS)


POLICIES = {
    "fused": shoal.fused(),
    "coarse": shoal.single_learner_coarse(2),
    "lagged": shoal.single_learner_coarse(2, lag=1),
    "decoupled": shoal.decoupled(2, 1, 1),
}


def run(distribution, backend="inline", stares=False):
    seen, looked = [], []

    def see(tick, metrics):
        seen.append((tick, metrics))
        if tick == TICKS - 1:
            RELEASED.set()

    watching = RunCallbacks(see, look=lambda tick, metrics: looked.append((tick, metrics)))
    plan = shoal.plan(graph(stares), distribution, ONE)
    state = graph(stares).origin.start(0, ENVS)
    result = shoal.run(plan, backend, ticks=TICKS, state=state, watch=watching)
    assert result.ticks == TICKS
    return result, seen, looked


@cache
def alone(name, backend):
    """The loop without an observer."""
    plan = shoal.plan(shoal.trace(Chase(), envs=ENVS), POLICIES[name], ONE)
    return shoal.run(plan, backend, ticks=TICKS, state=start_of("chase")).values


@cache
def in_step(name):
    """The observed values by tick, where observing is a stage in lockstep."""
    return {tick: float(metrics["seen"]) for tick, metrics in run(POLICIES[name])[1]}


CELLS = [(name, backend) for name in POLICIES for backend in ("inline", "threads")]


@pytest.mark.parametrize(("name", "backend"), [*CELLS, ("coarse", "processes")])
def test_an_observer_changes_nothing_and_sees_the_values_of_a_tick(name, backend):
    result, seen, looked = run(shoal.with_observer(POLICIES[name], "observer", "gaze"), backend)
    for value, wanted in alone(name, backend).items():
        assert difference(result.values[f"chase.{value}"], wanted) == 0, value
    assert [tick for tick, _ in seen] == list(range(TICKS))
    assert not any("seen" in metrics or "lag" in metrics for _, metrics in seen) or name == "lagged"
    ticks = [tick for tick, _ in looked]
    assert ticks == sorted(set(ticks))  # never the same one twice
    assert ticks[-1] == TICKS - 1 or backend == "inline"
    for tick, metrics in looked:
        assert float(metrics["seen"]) == pytest.approx(in_step(name)[tick], abs=1e-5)
    assert int(result.values["looks"]) == len(looked)


def test_no_fragment_waits_for_an_observer():
    RELEASED.clear()
    policy = shoal.with_observer(shoal.single_learner_coarse(2), "observer", "gaze")
    _, seen, looked = run(policy, "threads", stares=True)  # it looks on until the last tick is over
    assert [tick for tick, _ in seen] == list(range(TICKS))
    assert len(looked) <= 2


def test_observers_read_only_newer_values_and_no_fragment_reads_from_them():
    coarse = shoal.single_learner_coarse(2)
    plan = shoal.plan(graph(), shoal.with_observer(coarse, "observer", "gaze"), ONE)
    assert plan.observers == plan.asynchronous == {"observer"}
    bounded = [shoal.Wire(w.writer, w.reader, shoal.Latest(1)) for w in plan.distribution.wires]
    for wires in ((), tuple(bounded)):
        others = shoal.plan(graph(), replace(plan.distribution, wires=wires), ONE)
        assert others.observers == others.asynchronous == frozenset()


def test_observers_resume_from_a_snapshot():
    policy = shoal.with_observer(shoal.single_learner_coarse(2), "observer", "gaze")
    plan, kept = shoal.plan(graph(), policy, ONE), []
    due = iter([TICKS // 2])
    watching = RunCallbacks(lambda *_: None, lambda tick: next(due, None), kept.append)
    start = graph().origin.start(0, ENVS)
    whole = shoal.run(plan, "inline", ticks=TICKS, state=start, watch=watching)
    looked = []
    rest = RunCallbacks(lambda *_: None, look=lambda tick, metrics: looked.append(tick))
    again = shoal.run(plan, "inline", ticks=TICKS, state=kept[0], watch=rest)
    for name, wanted in whole.values.items():
        if name.startswith("chase"):
            assert difference(again.values[name], wanted) == 0
    assert looked
    assert min(looked) >= kept[0].tick
