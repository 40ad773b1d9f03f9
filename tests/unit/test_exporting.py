"""Workers run programs that the driver lowered: they don't trace or plan, and share programs."""

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from laws.cases import ONE, graph_of
from shoal.errors import RunError
from shoal.planning.fragment_program import write_program
from shoal.planning.segments import Segment, walk
from shoal.runtime.execution.executors import make_spec
from shoal.runtime.execution.exporting import ExportedSegments, export_fragment
from shoal.runtime.execution.lowering import Lowering

HERE = "TEST_EXPORTING_DRIVER"


class OnlyHere:
    """A loop that can be traced in one process only."""

    def init(self, key, env, envs):
        return {"keys": jax.random.split(key, envs), "sum": jnp.zeros(envs)}

    def tick(self, env, state):
        assert os.environ[HERE] == str(os.getpid()), "traced in another process"
        keys, drawn = draw(state["keys"])
        total = collect(state["sum"], drawn)
        return {"keys": keys, "sum": total}, {"total": jnp.mean(total)}


@shoal.stage(per="env", role="env")
def draw(key):
    key, now = jax.random.split(key)
    return key, jax.random.normal(now)


@shoal.stage
def collect(total, drawn):
    return total + jnp.mean(drawn)


def own(replicas):
    """A policy with replicas that draw and one that collects."""
    return shoal.DistributionPolicy(
        "own",
        (
            shoal.Fragment("source", ("draw",), replicas),
            shoal.Fragment("sink", (shoal.THE_REST,)),
        ),
    )


def executors(plan, fragment, workers):
    """The exported fragment, and the segments of its workers."""
    plan = plan.over_processes
    exported = export_fragment(plan, make_spec(plan, write_program(plan, fragment)))
    return exported, [ExportedSegments(exported, worker) for worker in workers]


def test_a_worker_traces_nothing(monkeypatch):
    monkeypatch.setenv(HERE, str(os.getpid()))
    plan = shoal.plan(shoal.trace(OnlyHere(), envs=4), own(2), ONE)
    results = [shoal.run(plan, backend, ticks=3).values for backend in ("inline", "processes")]
    for name, x in results[0].items():
        a, b = (jax.random.key_data(y) if name == "keys" else y for y in (x, results[1][name]))
        assert np.array_equal(a, b), name


def test_a_segment_gives_the_same_bits_when_it_was_exported():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), ONE)
    for fragment in ("actor", "learner"):
        exported, (segments,) = executors(plan, fragment, [0])
        lowering = Lowering(plan.over_processes, fragment)
        for segment, size in exported.segments:
            assert size == 0
            code = jax.export.deserialize(bytearray(exported.segments[segment, 0].stablehlo))
            some = np.random.default_rng(0)
            args = [some.integers(0, 2, a.shape).astype(a.dtype) for a in code.in_avals]
            here = lowering.compile(segment)(0, *map(jnp.array, args))
            there = segments.compile(segment)(0, *map(jnp.array, args))
            for a, b in zip(here, there, strict=True):
                assert np.array_equal(a, b)


def test_a_fragment_is_lowered_once_for_all_its_replicas_and_runs():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(4), ONE)
    first, second = (executors(plan, "actor", [])[0] for _ in range(2))
    assert first is second
    assert len(first.segments) == len(
        [op for op in walk(first.spec.program.operations) if isinstance(op, Segment)]
    )


class Heap:
    """A loop with a state that a stage overwrites."""

    size = 1000

    def init(self, key, env, envs):
        return {"heap": jnp.zeros((envs, self.size)), "at": jnp.int32(0)}

    def tick(self, env, state):
        heap = fill(state["heap"], at=state["at"])
        return {"heap": heap, "at": state["at"] + 1}, {"sum": look(heap[:, 0])}


@shoal.stage(per="env")
def fill(heap, *, at):
    return heap.at[at % heap.size].set(2.0)


@shoal.stage
def look(first):
    return jnp.mean(first)


def test_donated_buffers_are_reused_in_a_worker():
    plan = shoal.plan(shoal.trace(Heap(), envs=2), shoal.single_learner_coarse(1), ONE)
    exported, (segments,) = executors(plan, "actor", [0])
    ((segment, _),) = (key for key in exported.segments if "heap" in key[0].donates)
    heap = jnp.zeros((2, Heap.size))
    args = {"heap": heap, "at": jnp.int32(0)}
    segments.compile(segment)(0, *(args[name] for name in segment.reads))
    assert heap.is_deleted()


class Talks(OnlyHere):
    """A loop whose compiled part calls Python."""

    def tick(self, env, state):
        return {**state, "sum": speak(state["sum"])}, {}


@shoal.stage(per="env")
def speak(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x)


def test_compiled_code_that_calls_python_is_rejected_with_a_fix():
    plan = shoal.plan(shoal.trace(Talks(), envs=4), shoal.single_learner_coarse(2), ONE)
    with pytest.raises(RunError, match="can't be sent to another process") as error:
        shoal.run(plan, "processes", ticks=1)
    assert "shoal.host" in error.value.fix


@pytest.mark.parametrize("policy", [shoal.single_learner_coarse(2), shoal.multi_learner(2)])
def test_a_plan_for_devices_that_the_driver_lacks_is_exported(policy):
    devices = (*(shoal.Device("cpu", i) for i in range(512)), shoal.Device("gpu", 0))
    far = shoal.Cluster((shoal.Host("far", 512, devices),))
    plan = shoal.plan(graph_of("chase"), policy, far).over_processes
    for fragment in plan.distribution.fragments:
        on = plan.places[fragment.name]
        places = tuple(replace(p, device=devices[500]) if p.device.kind == "cpu" else p for p in on)
        moved = replace(plan, places={**plan.places, fragment.name: places})
        spec = make_spec(moved, write_program(moved, fragment.name))
        assert export_fragment(moved, spec).segments
