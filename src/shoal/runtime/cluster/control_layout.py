"""Makes the layout of a plan's control block: the kept values and each endpoint's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.planning.channel_specs import ArraySpec, make_cell
from shoal.planning.plan import Plan
from shoal.planning.segments import Program
from shoal.runtime.channels.shared_memory import Room
from shoal.runtime.cluster.control_block import ControlLayout, EndpointLayout, MetricSpec
from shoal.runtime.execution.snapshot import lagged, value_of
from shoal.runtime.execution.worker_status import activities

Programs = Mapping[str, Program]


def make_control_layout(plan: Plan, programs: Programs, room: Room) -> ControlLayout:
    """The control block layout of a plan, for all workers that the run may have."""
    schedulers = tuple((f, w) for f in programs for w in range(plan.workers(f)))
    stages = dict.fromkeys(stage.stage for stage in plan.graph.stages if stage.host)
    timed = activities(stages, [channel.name for channel in plan.channels])
    endpoints = tuple(_endpoints(plan, programs))
    return ControlLayout.plan(schedulers, _cells(plan), plan.graph.envs, endpoints, timed, room)


def _cells(plan: Plan) -> dict[str, ArraySpec]:
    """The arrays that are kept: carried values, and older versions for readers that lag."""
    values = plan.graph.values
    found = {name: make_cell(values[name]) for name in plan.graph.inputs}
    for line in lagged(plan):
        found |= {name: make_cell(values[value_of(name)]) for name in line.past_names}
    return found


def _endpoints(plan: Plan, programs: Programs) -> Iterator[EndpointLayout]:
    values = plan.graph.values
    for fragment, program in programs.items():
        ends = plan.ends(fragment)
        rows = plan.batch(fragment) // ends
        shown = tuple(
            MetricSpec(name, make_cell(values[v]).rows(rows), values[v].dtype)
            for name, v in program.metrics
        )
        lines = [line for line in lagged(plan) if line.writer == fragment]
        carried = frozenset(before for before, _ in program.carry)
        carried |= {name for line in lines for name in line.past_names}
        for end in range(ends):
            yield EndpointLayout((fragment, end), ends, carried, shown)
