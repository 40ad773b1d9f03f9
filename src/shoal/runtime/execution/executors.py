"""Makes the specs and executors of a plan's fragments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shoal.graph.ir import Stage
from shoal.graph.layout import Sharded
from shoal.kernels import Part, launch_on, mode
from shoal.planning.channel_specs import ArraySpec, make_cell
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.planning.program import Call
from shoal.planning.segments import Buffer, NumpyWork, Program, walk
from shoal.runtime.execution.compiled_executor import CompiledExecutor
from shoal.runtime.execution.exporting import ExportedSegments
from shoal.runtime.execution.fragment import FragmentSpec, HostExecutor
from shoal.runtime.execution.lowering import (
    Lowering,
    donated_ticks,
    lowering_of,
    many_ticks,
    parts_of,
)
from shoal.tracing.hosting import Task
from shoal.tracing.interpret import host_task

Executor = CompiledExecutor | HostExecutor


def make_executor(plan: Plan, program: Program) -> Executor:
    """Make the executor that runs a fragment's endpoints in this process."""
    spec = make_spec(plan, program)
    if not program.compiles:
        return HostExecutor(spec)
    return CompiledExecutor(spec, segments_of(plan, program.fragment))


def segments_of(plan: Plan, fragment: str) -> Lowering | ExportedSegments:
    """A fragment's segments: from the saved plan, or else lowered from the loop."""
    if (saved := plan.saved.get((fragment, plan.apart))) is None:
        return lowering_of(plan, fragment)
    return plan.lowered.setdefault(fragment, ExportedSegments(saved))


def compiled_ticks(segments: Lowering | ExportedSegments, program: Program) -> Callable[..., Any]:
    """A function that runs many ticks per call, compiled once for all runs of a plan."""
    if isinstance(segments, ExportedSegments):
        return segments.compile_ticks()
    if program not in segments.compiled:
        ticks = many_ticks(segments, program)
        segments.compiled[program] = segments.jit(ticks, donated_ticks(program))
    return segments.compiled[program]


def kernel_parts(plan: Plan) -> list[Part]:
    """The parts of a plan of one program that can run as kernels, and why the others can't."""
    fragments = [fragment.name for fragment in plan.distribution.fragments]
    if mode() == "off" or len(fragments) > 1:
        return []
    program = write_program(plan, fragments[0])
    if not program.compiles_whole:
        return []
    lowering = lowering_of(plan, program.fragment)
    if launch_on(lowering.devices) is None:
        return [Part("all of it", "", "kernels need NVIDIA GPUs, Ampere or newer")]
    return parts_of(lowering, program)


def make_spec(plan: Plan, program: Program) -> FragmentSpec:
    """Make the spec that all endpoints of a fragment share."""
    if saved := plan.saved.get((program.fragment, plan.apart)):
        return saved.spec
    fragment, lowering = program.fragment, lowering_of(plan, program.fragment)
    ends, clients = plan.ends(fragment), plan.distribution.clients(fragment)
    return FragmentSpec(
        program,
        _tasks(lowering, program),
        dict(_cells(lowering, program)),
        _batch_axes(lowering, program) if clients else {},
        ends,
        len(plan.ends_of(fragment, 0)),
        plan.graph.envs // ends,
        is_free=fragment in plan.asynchronous,
        serve=clients[1] if clients else None,
        is_copied=plan.is_copied or not program.compiles,
        alone=_alone(plan, lowering),
    )


def _tasks(lowering: Lowering, program: Program) -> dict[str, Task]:
    """The host stages of a program, each as a task on one endpoint's environments."""
    together = lowering.one_program and not lowering.is_apart
    rows = lowering.graph.envs if together else lowering.share_rows
    found = {}
    for name in (op.node for op in walk(program.operations) if isinstance(op, Call)):
        node = lowering.nodes[name]
        assert isinstance(node, Stage)
        found[name] = host_task(node, rows)
    return found


def _cells(lowering: Lowering, program: Program) -> dict[str, ArraySpec]:
    """The array specs of carried values, constants, stacked values and host results."""
    names = [before for before, _ in program.carry] + list(program.constants)
    for op in walk(program.operations):
        match op:
            case Call():
                names += op.writes
            case NumpyWork(work):
                names += [item.outer for item in work if isinstance(item, Buffer)]
            case _:
                pass
    return {name: make_cell(lowering.in_one(name)) for name in names}


def _batch_axes(lowering: Lowering, program: Program) -> dict[str, int]:
    """The axis of the rows of each value that has rows."""
    values = lowering.graph.values
    every = walk(program.operations)
    names = {name for op in every for name in (*op.reads, *op.writes) if name in values}
    layouts = {name: lowering.layout(name) for name in names}
    return {name: at.axis for name, at in layouts.items() if isinstance(at, Sharded)}


def _alone(plan: Plan, lowering: Lowering) -> frozenset[str]:
    """Carried values that only one endpoint holds, on the device of the start state.

    None in processes: the driver, whose devices aren't theirs, has the start state.
    """
    fragment = lowering.fragment
    if plan.apart or lowering.mesh is not None or plan.ends(fragment) > 1:
        return frozenset()
    if lowering.devices[0] != jax.devices()[0]:
        return frozenset()
    return frozenset(
        before for before, after in plan.graph.carry
        if before != after and plan.sites.holders(after, plan.homes) == {fragment}
    )  # fmt: skip
