"""What is too large to be copied is held once, gives the same numbers, and must fit."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from laws.cases import FOUR, ONE, graph_of, start_of
from laws.differences import difference
from shoal.planning.fragment_program import write_program
from shoal.planning.segments import Segment
from shoal.runtime.execution.lowering import Lowering

TICKS = 20


@pytest.fixture
def large(monkeypatch):
    """Any state is too large to be copied."""
    monkeypatch.setattr("shoal.planning.plan.MOST_COPIED", 0)
    monkeypatch.setattr("shoal.runtime.cluster.control_layout.MOST_COPIED", 0)


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        (shoal.fused(), "inline"),
        (shoal.single_learner_coarse(2, lag=1), "threads"),
        (shoal.decoupled(2, 1, 1), "processes"),
    ],
    ids=["fused", "threads", "processes"],
)
def test_without_copies_the_numbers_are_the_same(policy, backend, request):
    plan = shoal.plan(graph_of("chase"), policy, FOUR)
    wanted = shoal.run(plan, backend, ticks=TICKS).values
    request.getfixturevalue("large")
    for state in (None, start_of("chase")):  # used up, or the caller's, which stays
        got = shoal.run(plan, backend, ticks=TICKS, state=state).values
        assert max(difference(got[name], wanted[name]) for name in wanted) == 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(start_of("chase")))


class Heap:
    """A loop that carries far more than it changes."""

    size = 2**20

    def init(self, key, env, envs):
        return {"heap": jnp.zeros((envs, self.size)), "at": jnp.int32(0)}

    def tick(self, env, state):
        heap = self.put(state["heap"], at=state["at"])
        return {"heap": heap, "at": state["at"] + 1}, {"sum": self.look(heap)}

    @shoal.stage(per="env")
    def put(self, heap, *, at):
        return heap.at[at % self.size].set(1.0)

    @shoal.stage
    def look(self, heap):
        return shoal.mean(jnp.mean(heap[:, 0]))


@pytest.mark.parametrize(
    "policy", [shoal.fused(), shoal.single_learner_coarse(1)], ids=["fused", "cut"]
)
def test_a_large_state_is_held_once_during_a_run(policy, large):
    plan = shoal.plan(shoal.trace(Heap(), envs=2), policy, ONE)
    whole = 2 * Heap.size * 4
    gc.collect()
    before, most = sum(x.nbytes for x in jax.live_arrays()), []

    def watch(tick, metrics):
        most.append(sum(x.nbytes for x in jax.live_arrays()) - before)

    result = shoal.run(plan, "threads", ticks=40, watch=watch)
    assert np.asarray(result.state["heap"])[:, :40].all()
    # The cut sends all of it to `look`, which holds what it was sent.
    assert max(most) <= (1.1 if policy.name == "fused" else 4.1) * whole


class Heaps(Heap):
    """Two heaps alike, and a stage that reads the later one first."""

    def init(self, key, env, envs):
        heap = jnp.zeros((envs, self.size))
        return {"a": heap, "b": heap, "at": jnp.int32(0)}

    def tick(self, env, state):
        b, a, first = self.put_both(state["b"], state["a"], at=state["at"])
        return {"a": a, "b": b, "at": state["at"] + 1}, {"sum": self.look(first)}

    @shoal.stage(per="env")
    def put_both(self, b, a, *, at):
        b, a = b.at[at % self.size].set(2.0), a.at[at % self.size].set(1.0)
        return b, a, a[:1] + b[:1]


def test_what_is_written_over_is_written_in_place():
    plan = shoal.plan(shoal.trace(Heaps(), envs=2), shoal.single_learner_coarse(1), ONE)
    (segment,) = [s for s in write_program(plan, "actor").operations if isinstance(s, Segment)]
    assert segment.donates >= {"a", "b"}
    specs = (plan.graph.values[name] for name in segment.reads)
    args = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
    # Where XLA has to copy a heap to write into the other's place, it needs room to do so.
    room = Lowering(plan, "actor").compile(segment).jitted.lower(*args).compile().memory_analysis()
    assert room.alias_size_in_bytes >= 2 * 2 * Heap.size * 4
    assert room.temp_size_in_bytes < Heap.size


def test_a_number_that_is_not_finite_is_reported_without_copies_too(large):
    class Bad(Heap):
        @shoal.stage
        def look(self, heap):
            return jnp.mean(heap) * jnp.nan

    with pytest.raises(shoal.ShoalError, match="is NaN at tick 0") as error:
        shoal.run(shoal.plan(shoal.trace(Bad(), envs=2), shoal.fused(), ONE), ticks=3)
    assert "too large to keep copies of it" in str(error.value)


def test_a_state_larger_than_memory_is_refused_before_anything_starts():
    small = shoal.Cluster((shoal.Host("host0", 2, (shoal.Device("cpu", 0),), memory=4_000_000),))
    with pytest.raises(shoal.ShoalError) as error:
        shoal.plan(shoal.trace(Heap(), envs=2), shoal.fused(), small)
    assert "host0 would hold 8.4 MB and has 4.0 MB" in str(error.value)
    assert "`heap`, 8.4 MB" in str(error.value)
