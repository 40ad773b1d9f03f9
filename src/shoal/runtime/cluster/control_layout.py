"""The layout of a run's control block: each endpoint's kept values and metrics, by offset."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np

from shoal.planning.channel_specs import ArraySpec, make_cell
from shoal.planning.plan import MOST_COPIED, Plan, Replica, WorkerId
from shoal.planning.segments import Program
from shoal.profiling.recorder import records_spans
from shoal.profiling.spans import BUFFER_WORDS
from shoal.runtime.channels.shared_memory import LINE, Allocator
from shoal.runtime.execution.snapshot import lagged, value_of
from shoal.runtime.execution.worker_status import activities

KEPT_SLOTS = 3  # one of them holds a tick that all endpoints kept, while others are written
FINAL = KEPT_SLOTS  # the slot for what endpoints carry when they end
SNAP, START = KEPT_SLOTS + 1, KEPT_SLOTS + 2  # the slots for snapshots and for the start state
SHOWN = 32  # ticks of metrics that wait for the driver
MOST_LAGS = 1024  # lags of one endpoint in a tick
NOTE = 256  # bytes for the text that says what a scheduler waits for
T = TypeVar("T")


@dataclass(frozen=True)
class EndpointLayout:
    """One endpoint: its replica, its scheduler, what it carries, and its metrics."""

    replica: Replica
    scheduler: int
    ends: int  # of its fragment, which share the rows of each value
    carried: frozenset[str]
    shown: np.dtype[Any]  # the record of a tick: its number, its lags and its metrics


@dataclass(frozen=True)
class ControlLayout:
    """The offsets of the control words, kept values and metrics of a run in shared memory."""

    schedulers: tuple[WorkerId, ...]  # one waker each, and one more for the driver
    activities: tuple[str, ...]  # stages in Python, and waits
    cells: Mapping[str, ArraySpec]
    rows: int
    endpoints: Mapping[Replica, EndpointLayout]
    words: int
    records: int  # one for each scheduler
    wakers: int
    kept: tuple[Mapping[str, int], ...]
    marks: int
    shows: Mapping[Replica, int]
    spans: int = -1  # -1 if none are recorded

    @cached_property
    def record(self) -> np.dtype[Any]:
        """The record of a scheduler: what it has done, does, and waits for."""
        return scheduler_record(len(self.activities))

    def span(self, replica: Replica, cell: ArraySpec) -> tuple[slice, ...]:
        """The slices of a value that an endpoint holds."""
        if cell.axis is None:
            return (...,)  # type: ignore[return-value]
        rows = self.rows // self.endpoints[replica].ends
        return (*(slice(None),) * cell.axis, slice(replica[1] * rows, (replica[1] + 1) * rows))

    def replicas(self, schedulers: Collection[int]) -> list[Replica]:
        """The endpoints of some schedulers."""
        return [r for r, endpoint in self.endpoints.items() if endpoint.scheduler in schedulers]

    def by_end(self, of: Sequence[T]) -> dict[str, list[T]]:
        """For each fragment, what is given for the scheduler of each of its endpoints."""
        found: dict[str, list[T]] = {}
        for (fragment, _), endpoint in self.endpoints.items():
            found.setdefault(fragment, []).append(of[endpoint.scheduler])
        return found


def scheduler_record(activities: int) -> np.dtype[Any]:
    """The record of a scheduler, in cache lines of its own."""
    counts = ("started", "completed", "leaves", "stage", "stage_tick", "stage_since")
    fields = [
        *((name, "i8") for name in counts),
        ("spent", "i8", (activities,)),
        ("note", f"S{NOTE}"),
    ]
    size = np.dtype(fields).itemsize
    return np.dtype([*fields, ("rest", f"V{-size % LINE}")])


def metrics_record(metrics: list[tuple[str, str, tuple[int, ...]]]) -> np.dtype[Any]:
    """The record of an endpoint's tick, for metrics of these names, types and shapes."""
    head = [("tick", "i8"), ("lag_count", "i8"), ("lags", "i8", (MOST_LAGS,))]
    return np.dtype([*head, ("metrics", np.dtype(metrics, align=True))], align=True)


def make_control_layout(
    plan: Plan, programs: Mapping[str, Program], memory: Allocator
) -> ControlLayout:
    """Allocate the control block of a plan, for all workers that the run may have."""
    take, rows = memory.take, plan.graph.envs
    schedulers = tuple((f, w) for f in programs for w in range(plan.workers(f)))
    stages = dict.fromkeys(stage.stage for stage in plan.graph.stages if stage.host)
    timed = activities(stages, [channel.name for channel in plan.channels])
    cells = _cells(plan)
    sizes = {name: prod(c.rows(rows)) * np.dtype(c.dtype).itemsize for name, c in cells.items()}
    slots = range(START + 1) if sum(sizes.values()) <= MOST_COPIED else range(FINAL, START + 1)
    endpoints = {e.replica: e for e in _endpoints(plan, programs, schedulers)}
    count = len(schedulers)
    return ControlLayout(
        schedulers, timed, cells, rows, endpoints,
        words=take(5 * LINE),
        records=take(count * scheduler_record(len(timed)).itemsize),
        wakers=take((count + 1) * LINE),
        kept=tuple(
            {name: take(size) for name, size in sizes.items()} if slot in slots else {}
            for slot in range(START + 1)
        ),
        marks=take(len(endpoints) * (START + 1) * 8),
        shows={r: take(2 * LINE + SHOWN * e.shown.itemsize) for r, e in endpoints.items()},
        spans=take(count * BUFFER_WORDS * 8) if records_spans() else -1,
    )  # fmt: skip


def _cells(plan: Plan) -> dict[str, ArraySpec]:
    """The arrays that are kept: carried values, and older versions for readers that lag."""
    values = plan.graph.values
    found = {name: make_cell(values[name]) for name in plan.graph.inputs}
    for line in lagged(plan):
        found |= {name: make_cell(values[value_of(name)]) for name in line.past_names}
    return found


def _endpoints(
    plan: Plan, programs: Mapping[str, Program], schedulers: Sequence[WorkerId]
) -> Iterator[EndpointLayout]:
    values = plan.graph.values
    for fragment, program in programs.items():
        ends = plan.ends(fragment)
        rows = plan.batch(fragment) // ends
        metrics = [(name, values[v].dtype, make_cell(values[v]).rows(rows))
                   for name, v in program.metrics]  # fmt: skip
        shown = metrics_record(metrics)
        carried = frozenset(before for before, _ in program.carry)
        for line in lagged(plan):
            carried |= frozenset(line.past_names if line.writer == fragment else ())
        for worker in range(plan.workers(fragment)):
            number = schedulers.index((fragment, worker))
            for end in plan.ends_of(fragment, worker):
                yield EndpointLayout((fragment, end), number, ends, carried, shown)
