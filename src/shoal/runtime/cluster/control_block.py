"""The control block in shared memory: tick limit, snapshot slots, metrics and worker status."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.planning.plan import Replica
from shoal.profiling.spans import BUFFER_WORDS, SpanBuffer
from shoal.runtime.channels.shared_memory import LINE, ORDERED, FutexWaker, Memory, fence
from shoal.runtime.cluster.control_layout import (
    MOST_LAGS,
    NOTE,
    SHOWN,
    SNAP,
    START,
    ControlLayout,
)
from shoal.runtime.execution.scheduler import Stopped
from shoal.runtime.execution.snapshot import Asked
from shoal.runtime.execution.worker_status import WorkerStatus

MANY = SHOWN // 2  # from this number of unread ticks on, the driver is woken
TICKS, HOLDING, HALT, NUMBER, SNAP_TICK = range(5)


class ControlBlock:
    """The control block of a run, mapped into this process."""

    def __init__(
        self, layout: ControlLayout, memory: Memory, check: Callable[[], None] = lambda: None
    ) -> None:
        self._layout, self._memory = layout, memory
        self._words = memory.words(layout.words, 5)
        self._records = memory.array(layout.records, (len(layout.schedulers),), layout.record)
        self._started = self._records["started"]
        self._endpoints = list(layout.endpoints)
        self._marks = memory.packed(layout.marks, len(self._endpoints) * (START + 1))
        self._numbers = {name: n for n, name in enumerate(layout.activities)}
        self._check = check

    def enter_stage(self, scheduler: int, stage: str, tick: int) -> None:
        """Record that a scheduler starts a stage in Python."""
        record = self._records[scheduler]
        record["stage_tick"], record["stage_since"] = tick, time.monotonic_ns()
        record["stage"] = 1 + self._numbers[f"in {stage}"]

    def leave_stage(self, scheduler: int) -> None:
        """Record that the stage has returned or failed."""
        record = self._records[scheduler]
        activity, since = self._layout.activities[record["stage"] - 1], record["stage_since"]
        record["stage"] = 0
        self.spend(scheduler, activity, time.monotonic() - float(since) / 1e9)

    def spend(self, scheduler: int, activity: str, seconds: float) -> None:
        """Count seconds that a scheduler has spent in a stage in Python, or waiting."""
        self._records["spent"][scheduler, self._numbers[activity]] += int(seconds * 1e9)

    def waker(self, scheduler: int, spin: float = 0.0) -> FutexWaker:
        """The waker of a scheduler's process."""
        return FutexWaker(self._memory, self._layout.wakers + scheduler * LINE, spin, self.check)

    @property
    def driver_waker(self) -> FutexWaker:
        """The waker of the driver. It does not raise when the workers are halted."""
        return FutexWaker(self._memory, self._layout.wakers + len(self._layout.schedulers) * LINE)

    def check(self) -> None:
        """Raise if the run was halted, or if another check of this process fails."""
        if self._words[HALT]:
            raise Stopped
        self._check()

    def add_check(self, check: Callable[[], None]) -> None:
        """Add a check that is made during every wait in this process."""
        before = self._check

        def both() -> None:
            before()
            check()

        self._check = both

    def note(self, scheduler: int, text: str) -> None:
        """Write what a scheduler waits for; empty once it resumes."""
        self._records[scheduler]["note"] = text.encode(errors="replace")[:NOTE]

    def status(self, scheduler: int, pid: int) -> WorkerStatus:
        """What a scheduler is doing, in the process `pid`."""
        record = self._records[scheduler].copy()
        note = record["note"].decode(errors="replace")
        ticks = int(record["started"] or record["completed"])
        spent = {
            n: ns / 1e9 for n, ns in zip(self._numbers, record["spent"].tolist(), strict=True) if ns
        }
        if not record["stage"]:
            return WorkerStatus(ticks, note, pid, spent=spent)
        seconds = (time.monotonic_ns() - int(record["stage_since"])) / 1e9
        stage = self._layout.activities[record["stage"] - 1].removeprefix("in ")
        return WorkerStatus(ticks, note, pid, stage, int(record["stage_tick"]), seconds, spent)

    def spans(self, scheduler: int) -> SpanBuffer:
        """The buffer in which a scheduler records spans."""
        first = self._layout.spans + scheduler * BUFFER_WORDS * 8
        words = self._memory.packed(first, BUFFER_WORDS)
        return SpanBuffer(words, fence) if not ORDERED else SpanBuffer(words)

    def count_tick(self, scheduler: int) -> None:
        """Count a tick that an endpoint of a scheduler has completed."""
        self._records[scheduler]["completed"] += 1

    def dismiss(self, scheduler: int, word: int = 1) -> None:
        """Stop an asynchronous scheduler after its current tick; with 0, let it run again."""
        self._records[scheduler]["leaves"] = word
        self.waker(scheduler).notify()

    def may_turn(self, scheduler: int) -> bool:
        """Whether an asynchronous scheduler may start another tick."""
        return not self._records[scheduler]["leaves"]

    def completed(self, scheduler: int) -> int:
        """The number of ticks that the endpoints of a scheduler have completed, over restarts."""
        return int(self._records[scheduler]["completed"])

    def begin(self, ticks: int) -> None:
        """Let every scheduler run until `ticks`."""
        self._words[TICKS] = ticks

    def halt(self) -> None:
        """End every wait: all schedulers stop."""
        self._words[HALT] = 1
        for scheduler in range(len(self._layout.schedulers)):
            self.waker(scheduler).notify()

    def hold(self) -> int:
        """Pause all schedulers until `stop_at` or `snap_at`; the number of ticks started so far."""
        self._words[HOLDING] = 1
        fence()
        return int(self._started.max(initial=0))

    def stop_at(self, tick: int) -> None:
        """Stop before `tick`, and resume the schedulers until then."""
        self._words[TICKS] = min(self._words[TICKS], tick)
        fence()
        self._words[HOLDING] = 0

    def snap_at(self, tick: int) -> None:
        """Request a snapshot before `tick`, which has not started, and resume the schedulers."""
        for replica in self._endpoints:
            self._marks[self._mark(SNAP, replica)] = 0
        self._words[SNAP_TICK] = tick
        self._words[NUMBER] += 1
        fence()
        self._words[HOLDING] = 0

    @property
    def asked(self) -> Asked:
        """The snapshot that was requested last."""
        return Asked(self._words[NUMBER], self._words[SNAP_TICK])

    def may_start(self, scheduler: int, tick: int) -> bool:
        """Whether a scheduler may start `tick`; it has started it then."""
        self._started[scheduler] = max(self._started[scheduler], tick + 1)
        fence()
        while self._words[HOLDING]:
            self.check()
            time.sleep(1e-4)
        return tick < self._words[TICKS]

    def write(self, slot: int, replica: Replica, tick: int, values: Mapping[str, Any]) -> None:
        """Write an endpoint's share of the carried state before `tick` to a slot that has room."""
        if not self._layout.kept[slot]:
            return
        mark = self._mark(slot, replica)
        self._marks[mark] = 0
        for name, x in values.items():
            if name in self._layout.cells:
                self._share(slot, replica, name)[...] = x
        self._marks[mark] = tick + 1

    def forget(self, slot: int, replica: Replica) -> None:
        """Mark an endpoint's share in a slot as missing."""
        self._marks[self._mark(slot, replica)] = 0

    def hold_ready(self, replica: Replica, name: str, x: Any) -> None:
        """Write a value that an endpoint starts from."""
        self._share(START, replica, name)[...] = x

    def shares(self, slots: Mapping[Replica, int]) -> dict[tuple[Replica, str], np.ndarray]:
        """The share of each endpoint, from the slot that is given for it."""
        return {
            (replica, name): np.array(self._share(slot, replica, name))
            for replica, slot in slots.items()
            for name in self._layout.cells
            if name in self._layout.endpoints[replica].carried
        }

    def read(self, slot: int) -> dict[str, np.ndarray]:
        """All arrays of a slot, by name."""
        layout = self._layout
        return {
            name: self._memory.array(
                first, layout.cells[name].rows(layout.rows), layout.cells[name].dtype
            )
            for name, first in layout.kept[slot].items()
        }

    def ticks(self, slot: int) -> dict[Replica, int]:
        """The tick before which each endpoint wrote its share of a slot; -1 if there is none."""
        return {r: self._marks[self._mark(slot, r)] - 1 for r in self._endpoints}

    def _mark(self, slot: int, replica: Replica) -> int:
        return slot * len(self._endpoints) + self._endpoints.index(replica)

    def _share(self, slot: int, replica: Replica, name: str) -> np.ndarray:
        layout = self._layout
        cell = layout.cells[name]
        whole = self._memory.array(layout.kept[slot][name], cell.rows(layout.rows), cell.dtype)
        return whole[layout.span(replica, cell)]

    def show(self, replica: Replica) -> MetricsBuffer:
        """The metrics buffer of one endpoint."""
        layout = self._layout
        return MetricsBuffer(self._memory, layout.shows[replica], layout.endpoints[replica].shown)


class MetricsBuffer:
    """The buffer of one endpoint's metrics, read by the driver."""

    def __init__(self, memory: Memory, first: int, record: np.dtype[Any]) -> None:
        self._puts, self._takes = (memory.words(first + i * LINE, 1) for i in range(2))
        self._slots = memory.array(first + 2 * LINE, (SHOWN,), record)
        metrics = self._slots["metrics"]
        self._metrics = {name: metrics[name] for name in metrics.dtype.names or ()}

    def is_new(self) -> bool:
        """Whether there are metrics that the driver has not read."""
        return self._takes[0] < self._puts[0]

    @property
    def waiting(self) -> int:
        """The number of ticks whose metrics the driver has not read."""
        return self._puts[0] - self._takes[0]

    def is_full(self) -> bool:
        """Whether the buffer has no free slot."""
        return self.waiting >= SHOWN

    def put(self, tick: int, metrics: Mapping[str, Any], lags: tuple[int, ...]) -> None:
        """Write a tick's metrics to the next slot, which must be free."""
        index, lags = self._puts[0] % SHOWN, lags[:MOST_LAGS]
        slot = self._slots[index]
        slot["tick"], slot["lag_count"] = tick, len(lags)
        slot["lags"][: len(lags)] = lags
        for name, xs in self._metrics.items():
            xs[index, ...] = np.asarray(metrics[name])
        self._puts[0] += 1

    def take(self) -> Iterator[tuple[int, dict[str, np.ndarray], tuple[int, ...]]]:
        """Read the waiting metrics in order and free their slots."""
        while self._takes[0] < self._puts[0]:
            index = self._takes[0] % SHOWN
            slot = self._slots[index]
            found = {name: np.array(xs[index]) for name, xs in self._metrics.items()}
            lags = tuple(slot["lags"][: slot["lag_count"]].tolist())
            yield int(slot["tick"]), found, lags
            self._takes[0] += 1


@dataclass
class SharedLimit:
    """The tick limit of one scheduler, read from the control block."""

    control: ControlBlock
    scheduler: int

    @property
    def asked(self) -> Asked:
        """The snapshot that was requested last."""
        return self.control.asked

    def may_turn(self) -> bool:
        """Whether an asynchronous scheduler may start another tick."""
        return self.control.may_turn(self.scheduler)

    def may_start(self, tick: int, count: int = 1) -> int:
        """Whether `tick` may start; the scheduler has started it then."""
        return int(self.control.may_start(self.scheduler, tick))


def watch_parent(parent: int) -> Callable[[], None]:
    """A check that ends this process at once if its parent has ended."""

    def check() -> None:
        if os.getppid() != parent:
            os._exit(1)

    return check
