"""Collects metrics from all endpoints of a tick, converted to NumPy off the critical path."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from shoal.graph.ir import Graph
from shoal.planning.plan import Plan, Replica, WorkerId
from shoal.planning.policy import is_late
from shoal.planning.segments import Program
from shoal.runtime.execution.replica_runner import ReplicaRunner
from shoal.runtime.execution.snapshot import Share
from shoal.runtime.execution.worker_status import WorkerStatus

Shown = dict[str, np.ndarray]
LAG = "lag"  # the metric with the lag, in ticks, of each message that a tick used


def lag_name(graph: Graph) -> str:
    """The name of the lag metric; with a suffix if the loop has a metric of that name."""
    taken = {link.outer for link in graph.metrics}
    return (
        LAG if LAG not in taken else next(n for i in count(2) if (n := f"{LAG}#{i}") not in taken)
    )


class Collector:
    """Collects each endpoint's metrics of each tick; returns them by complete ticks, in order.

    Asynchronous endpoints count their own ticks: their metrics since the last tick are added to the
    next. Metrics of observers are kept apart, by the tick whose values they read.
    """

    def __init__(self, plan: Plan, programs: list[Program], first: int = 0) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Replica, dict[str, Any], tuple[int, ...]]] = (
            queue.SimpleQueue()
        )
        counted = [p for p in programs if p.fragment not in plan.asynchronous]
        shows = [p for p in counted if p.metrics] or counted
        self._ends = {p.fragment: plan.ends(p.fragment) for p in shows}
        asynchronous = plan.asynchronous - plan.observers
        self._asynchronous = {
            p.fragment for p in programs if p.fragment in asynchronous and p.metrics
        }
        self._observers = {p.fragment for p in programs if p.fragment in plan.observers}
        self._axis = {m.outer: plan.graph.values[m.inner].axis for m in plan.graph.metrics}
        self._shape = {m.outer: plan.graph.values[m.inner].shape for m in plan.graph.metrics}
        late = [c for c in plan.channels if is_late(c.flow) and c.reader not in plan.observers]
        self._measures = {c.writer for c in late} & set(self._ends)
        self._looked: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._parts: dict[int, dict[Replica, dict[str, Any]]] = {}
        self._lags: dict[int, list[int]] = {}
        self._late: list[tuple[Replica, dict[str, Any]]] = []
        self._names = {p.fragment: [name for name, _ in p.metrics] for p in programs}
        self._lag_name = lag_name(plan.graph)
        self._next = first
        self._all = sum(plan.ends(p.fragment) for p in programs)
        self._snapped: queue.SimpleQueue[tuple[Replica, Share]] = queue.SimpleQueue()
        self._shares: dict[Replica, Share] = {}
        self._each = {
            p.fragment: plan.ends(p.fragment) // plan.workers(p.fragment) for p in programs
        }
        self._in_stage: dict[WorkerId, tuple[str, int, float]] = {}
        self._spent: dict[WorkerId, dict[str, float]] = {}

    def enter_stage(self, replica: Replica, stage: str, tick: int) -> None:
        """Record that a replica starts to run a stage in Python."""
        self._in_stage[self._worker_of(replica)] = stage, tick, time.monotonic()

    def leave_stage(self, replica: Replica) -> None:
        """Record that the stage has returned or failed."""
        worker = self._worker_of(replica)
        stage, _, since = self._in_stage.pop(worker)
        self.spend(worker, f"in {stage}", time.monotonic() - since)

    def spend(self, worker: WorkerId, activity: str, seconds: float) -> None:
        """Count seconds that a worker has spent in a stage in Python, or waiting."""
        spent = self._spent.setdefault(worker, {})
        spent[activity] = spent.get(activity, 0.0) + seconds

    def status(self, worker: WorkerId, tick: int) -> WorkerStatus:
        """The current status of a worker."""
        stage, at, since = self._in_stage.get(worker, ("", 0, 0.0))
        spent = dict(self._spent.get(worker, {}))
        return WorkerStatus(tick, "", os.getpid(), stage, at, time.monotonic() - since, spent)

    def _worker_of(self, replica: Replica) -> WorkerId:
        return replica[0], replica[1] // self._each[replica[0]]

    def keep(self, worker: ReplicaRunner) -> None:
        """Make an endpoint keep a copy of its state."""
        worker.kept.append(worker.share())

    def snap(self, worker: ReplicaRunner) -> None:
        """Store an endpoint's part of a snapshot."""
        self._snapped.put((worker.replica, worker.share()))

    def shares(self) -> dict[Replica, Share] | None:
        """The parts of a snapshot from all endpoints; None until all have arrived."""
        while not self._snapped.empty():
            replica, share = self._snapped.get()
            self._shares[replica] = share
        if len(self._shares) < self._all:
            return None
        whole, self._shares = self._shares, {}
        return whole

    def show(
        self, tick: int, replica: Replica, metrics: dict[str, Any], lags: tuple[int, ...]
    ) -> None:
        """Store metrics as they are on the device; never waits for them."""
        observes = replica[0] in self._observers
        if not observes and replica[0] not in self._ends and replica[0] not in self._asynchronous:
            return
        for x in metrics.values():
            if hasattr(x, "copy_to_host_async"):
                x.copy_to_host_async()
        if observes:
            self._looked.put((tick, metrics))
        else:
            self._queue.put((tick, replica, metrics, lags))

    def looked(self) -> Iterator[tuple[int, Shown]]:
        """New metrics of observers, each with the tick whose values were read."""
        while not self._looked.empty():
            tick, metrics = self._looked.get()
            yield tick, {name: np.asarray(x) for name, x in metrics.items()}

    @property
    def next_tick(self) -> int:
        """The first tick whose metrics haven't been returned yet."""
        return self._next

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Ticks whose metrics are complete, in order."""
        while not self._queue.empty():
            tick, replica, metrics, lags = self._queue.get()
            if replica[0] in self._asynchronous:
                self._late.append((replica, metrics))
                continue
            self._parts.setdefault(tick, {})[replica] = metrics
            if replica[0] in self._measures:
                self._lags.setdefault(tick, []).extend(lags)
        while len(self._parts.get(self._next, ())) == sum(self._ends.values()) > 0:
            shown = self._joined(sorted(self._parts.pop(self._next).items(), key=lambda x: x[0]))
            shown |= self._joined_late()
            if self._measures:
                shown[self._lag_name] = np.array(self._lags.pop(self._next, []), np.int64)
            yield self._next, shown
            self._next += 1

    def _joined(self, parts: list[tuple[Replica, dict[str, Any]]]) -> Shown:
        shown: dict[str, list[np.ndarray]] = {}
        for _, metrics in parts:
            for name, x in metrics.items():
                shown.setdefault(name, []).append(np.asarray(x))
        return {name: self._join(name, xs) for name, xs in shown.items()}

    def _joined_late(self) -> Shown:
        late, self._late = self._late, []
        found = self._joined(late)
        for fragment in self._asynchronous:
            for name in self._names[fragment]:
                axis, shape = self._axis[name], self._shape[name]
                if name not in found and axis is not None:
                    found[name] = np.zeros((*shape[:axis], 0, *shape[axis + 1 :]), np.float32)
        return found

    def _join(self, name: str, xs: list[np.ndarray]) -> np.ndarray:
        axis = self._axis[name]
        if axis is not None and len(xs) > 1:
            return np.concatenate(xs, axis)
        return xs[0]
