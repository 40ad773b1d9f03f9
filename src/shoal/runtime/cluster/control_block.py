"""The control block in shared memory: tick limit, snapshot slots, metrics and worker status."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.planning.plan import Replica
from shoal.runtime.channels.shared_memory import LINE, Allocator, FutexWaker, Memory, fence
from shoal.runtime.cluster.control_layout import (
    MOST_LAGS,
    NOTE,
    SHOWN,
    SNAP,
    START,
    ControlLayout,
    EndpointLayout,
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
        count = len(layout.schedulers)
        self._started, self._completed, self._lost, self._leaves = (
            memory.words(layout.counts + i * count * LINE, count) for i in range(4)
        )
        self._endpoints = list(layout.endpoints)
        self._marks = memory.packed(layout.marks, len(self._endpoints) * (START + 1))
        self._in_flight = memory.packed(layout.in_flight, START + 1)
        self._notes = memory.array(layout.notes, (count, NOTE), "uint8")
        self._stages = memory.words(layout.stages, 3 * count)
        self._spent = memory.packed(layout.spent, count * len(layout.activities))
        self._numbers = {name: n for n, name in enumerate(layout.activities)}
        self._check = check

    def enter_stage(self, scheduler: int, stage: str, tick: int) -> None:
        """Record that a scheduler starts a stage in Python."""
        self._stages[3 * scheduler + 1], self._stages[3 * scheduler + 2] = tick, time.monotonic_ns()
        self._stages[3 * scheduler] = 1 + self._numbers[f"in {stage}"]

    def leave_stage(self, scheduler: int) -> None:
        """Record that the stage has returned or failed."""
        number, _, since = self._stages[3 * scheduler : 3 * scheduler + 3]
        self._stages[3 * scheduler] = 0
        self.spend(scheduler, self._layout.activities[number - 1], time.monotonic() - since / 1e9)

    def spend(self, scheduler: int, activity: str, seconds: float) -> None:
        """Count seconds that a scheduler has spent in a stage in Python, or waiting."""
        at = scheduler * len(self._numbers) + self._numbers[activity]
        self._spent[at] += int(seconds * 1e9)

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
        said = text.encode(errors="replace")[: NOTE - 1]
        self._notes[scheduler, : len(said)] = np.frombuffer(said, np.uint8)
        self._notes[scheduler, len(said)] = 0

    def status(self, scheduler: int, pid: int) -> WorkerStatus:
        """What a scheduler is doing, in the process `pid`."""
        note = self._notes[scheduler].tobytes().partition(b"\0")[0].decode(errors="replace")
        ticks = int(self._started[scheduler] or self._completed[scheduler])
        number, tick, since = self._stages[3 * scheduler : 3 * scheduler + 3]
        all_spent = self._spent[scheduler * len(self._numbers) :]
        spent = {name: ns / 1e9 for name, ns in zip(self._numbers, all_spent, strict=False) if ns}
        if not number:
            return WorkerStatus(ticks, note, pid, spent=spent)
        seconds = (time.monotonic_ns() - since) / 1e9
        stage = self._layout.activities[number - 1].removeprefix("in ")
        return WorkerStatus(ticks, note, pid, stage, tick, seconds, spent)

    def count_tick(self, scheduler: int) -> None:
        """Count a tick that an endpoint of a scheduler has completed."""
        self._completed[scheduler] += 1

    def add_dropped(self, scheduler: int, count: int) -> None:
        """Count ticks that were in flight when a scheduler was lost as dropped."""
        self._lost[scheduler] += count

    def dismiss(self, scheduler: int, word: int = 1) -> None:
        """Stop an asynchronous scheduler after its current tick; with 0, let it run again."""
        self._leaves[scheduler] = word
        self.waker(scheduler).notify()

    def may_turn(self, scheduler: int) -> bool:
        """Whether an asynchronous scheduler may start another tick."""
        return not self._leaves[scheduler]

    def losses(self) -> list[int]:
        """The number of dropped ticks of each scheduler, as far as this host knows."""
        return list(self._lost)

    def completed(self, scheduler: int) -> int:
        """The number of ticks that the endpoints of a scheduler have completed, over restarts."""
        return self._completed[scheduler]

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
        return max(self._started, default=0)

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

    def write_in_flight(self, slot: int, count: int) -> None:
        """Write how many asynchronous ticks were in flight when a slot was written."""
        self._in_flight[slot] = count

    def in_flight(self) -> list[int]:
        """The number of ticks in flight when each slot was written."""
        return list(self._in_flight)

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

    def show(self, replica: Replica) -> MetricsRing:
        """The metrics ring of one endpoint."""
        layout = self._layout
        return MetricsRing(self._memory, layout.shows[replica], layout.endpoints[replica])


@dataclass
class MetricsRing:
    """A ring buffer of one endpoint's metrics, read by the driver."""

    memory: Memory
    first: int
    endpoint: EndpointLayout
    _slots: list[tuple[memoryview, dict[str, np.ndarray]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._puts, self._takes = (self.memory.words(self.first + i * LINE, 1) for i in range(2))
        slots = Allocator()
        slots.take(2 * LINE)
        for _ in range(SHOWN):
            words = self.memory.packed(self.first + slots.take((2 + MOST_LAGS) * 8), 2 + MOST_LAGS)
            arrays = {}
            for spec in self.endpoint.shown:
                place = self.first + slots.take(spec.nbytes)
                arrays[spec.name] = self.memory.array(place, spec.shape, spec.dtype)
            self._slots.append((words, arrays))

    def is_new(self) -> bool:
        """Whether there are metrics that the driver has not read."""
        return self._takes[0] < self._puts[0]

    @property
    def waiting(self) -> int:
        """The number of ticks whose metrics the driver has not read."""
        return self._puts[0] - self._takes[0]

    def is_full(self) -> bool:
        """Whether the ring has no free slot."""
        return self.waiting >= SHOWN

    def put(self, tick: int, metrics: Mapping[str, Any], lags: tuple[int, ...]) -> None:
        """Write a tick's metrics to the next slot, which must be free."""
        words, arrays = self._slots[self._puts[0] % SHOWN]
        count = min(len(lags), MOST_LAGS)
        words[0], words[1] = tick, count
        for i in range(count):
            words[2 + i] = lags[i]
        for name, x in arrays.items():
            x[...] = np.asarray(metrics[name])
        self._puts[0] += 1

    def take(self) -> Iterator[tuple[int, dict[str, np.ndarray], tuple[int, ...]]]:
        """Read the waiting metrics in order and free their slots."""
        while self._takes[0] < self._puts[0]:
            words, arrays = self._slots[self._takes[0] % SHOWN]
            found = {name: np.array(x) for name, x in arrays.items()}
            lags = tuple(words[2 : 2 + words[1]])
            yield words[0], found, lags
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
