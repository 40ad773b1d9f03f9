"""One host of a run: its shared memory, its worker processes and their events."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.planning.plan import Replica
from shoal.planning.restart_groups import Group, Kept
from shoal.profiling.clocks import HostSpans, host_spans
from shoal.profiling.spans import SpanBuffers
from shoal.runtime.channels.channel import take_back
from shoal.runtime.channels.shared_memory import Memory, join_fences
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.cluster.control_block import MANY, ControlBlock
from shoal.runtime.cluster.control_layout import FINAL, SNAP, START, ControlLayout
from shoal.runtime.cluster.launching import (
    WorkerExit,
    WorkerProcess,
    kill_marked,
    lost,
    name_of,
    spawn,
)
from shoal.runtime.cluster.worker_config import ProcessSpec, Restart
from shoal.runtime.execution.worker_status import WorkerStatus
from shoal.runtime.net.sockets import LOOPBACK, Address, listen

BATCH_DELAY_S = 0.05  # events wait this long for more, since each reply costs time
CLOSE_GRACE_S = 5.0  # for workers to close their environments and end
STOP_GRACE_S = 1.0  # the same after a stop or a failure
Shares = dict[tuple[Replica, str], np.ndarray]


class HostEvents(NamedTuple):
    """What has happened on a host since the last call of `receive`."""

    shown: list[tuple[int, Replica, dict[str, np.ndarray], tuple[int, ...]]]
    ended: dict[int, WorkerExit]  # exits of workers, by number
    running: int
    back: tuple[int, ...] = ()  # restarted workers that have completed a tick


class Left(NamedTuple):
    """The newest state that a lost worker's endpoints kept, and the tick of each."""

    ticks: dict[Replica, int]
    shares: Shares


@dataclass(frozen=True)
class Listeners:
    """The listener address and the group address of each worker of a host."""

    addresses: tuple[Address, ...]
    group_addresses: tuple[str, ...]


class HostAgent:
    """Starts and watches the workers of one host. The driver may be in this process or another."""

    def __init__(self, layout: ControlLayout, size: int) -> None:
        self._layout, self._memory = layout, Memory.make(size)
        self.control = ControlBlock(layout, self._memory)
        self._waker = self.control.driver_waker
        self._host, self._listeners = LOOPBACK, list[socket.socket]()
        self._late_listeners: dict[int, socket.socket] = {}  # listeners of workers that start later
        self._workers: dict[int, WorkerProcess] = {}
        self._known = set[int]()  # workers whose exit was reported to the driver
        self._mark = uuid.uuid4().hex
        self._cores: dict[int, tuple[int, ...]] = {}
        self._awaited: dict[int, dict[int, int]] = {}  # schedulers' ticks of restarted workers
        self._shows: dict[Replica, Any] = {}
        self._span_buffers = SpanBuffers()

    def open(self, listeners: int, workers: int, host: str = LOOPBACK) -> Listeners:
        """Open listeners on this host, and choose a group address for each worker."""
        self._host = host
        self._listeners = [listen(host) for _ in range(listeners)]
        addresses = tuple(listener.getsockname()[:2] for listener in self._listeners)
        return Listeners(addresses, tuple(f"{host}:{free_port(host)}" for _ in range(workers)))

    def start(
        self, specs: Sequence[ProcessSpec], given: Mapping[str, np.ndarray], ticks: int
    ) -> None:
        """Start workers from their first carried state, to run until `ticks`."""
        join_fences()
        for name, x in self.control.read(START).items():
            if name in given:
                x[...] = given[name]
        self.control.begin(ticks)
        cores = share_cores(specs)
        listeners = self._listeners or [None] * len(specs)
        try:
            for one, own, listener in zip(specs, cores, listeners, strict=True):
                self._cores[one.number] = own
                self._show(one)
                self._workers[one.number] = spawn(one, own, self._memory, self._mark, listener)
        except BaseException:
            self.close(0.0)  # the workers that have started would wait for the others forever
            raise

    def receive(self, seconds: float) -> HostEvents:
        """Wait up to `seconds` for events and return them."""
        if not self._is_new():
            self._waker.wait(self._is_new, seconds)
        until = time.monotonic() + BATCH_DELAY_S
        while not self._is_pressing() and (left := until - time.monotonic()) > 0:
            self._waker.wait(self._is_pressing, left)
        ended = {n: exit for n in self._workers if n not in self._known and (exit := self._exit(n))}
        self._known |= ended.keys()
        shown = [
            (tick, replica, metrics, lags)
            for replica, show in self._shows.items()
            for tick, metrics, lags in show.take()
        ]
        running = len(self._workers) - len(self._known)
        return HostEvents(shown, ended, running, tuple(self._back()))

    def _back(self) -> Iterator[int]:
        for number, ticks in list(self._awaited.items()):
            if all(
                self.control.completed(scheduler) > before for scheduler, before in ticks.items()
            ):
                del self._awaited[number]
                yield number

    def end(self, spec: ProcessSpec, note: str) -> Kept:
        """Kill a worker if it is alive; the tick of its endpoints in each slot."""
        if spec.number in self._workers:
            exit = self._exit(spec.number)
            grace = CLOSE_GRACE_S if exit and not exit.kind else 0.0
            self._workers[spec.number].close(time.monotonic() + grace)
            self._known.add(spec.number)
        for scheduler in spec.schedulers:
            self.control.note(scheduler, note)
        every = {slot: self.control.ticks(slot) for slot in range(SNAP + 1)}
        return {slot: {e: ticks[e] for e in spec.replicas} for slot, ticks in every.items()}

    def drop_in_flight(self, together: Sequence[Group], channels: ChannelLayouts) -> None:
        """Drop the in-flight messages of these endpoints; no reader here waits for them."""
        states = [channel.state for channel in channels.open(self._memory).values()]
        for group in together:
            take_back(states, {fragment for fragment, _ in group}, group[0][1])
        for scheduler in range(len(self._layout.schedulers)):
            self.control.waker(scheduler).notify()

    def left(self, spec: ProcessSpec, newest: Mapping[Replica, int]) -> Left:
        """What a worker's endpoints kept, from the slot that is given for each.

        State that they kept later is dropped: it would be mistaken for the restarted worker's.
        """
        kept = {slot: self.control.ticks(slot) for slot in range(SNAP + 1)}
        mine = [end for end in spec.replicas if end in newest]
        ticks = {end: kept[newest[end]][end] for end in mine}
        shares = self.control.shares({end: newest[end] for end in mine})
        for end in spec.replicas:
            for slot in kept:
                if kept[slot][end] > ticks.get(end, -1):
                    self.control.forget(slot, end)
        snapped = self.control.ticks(SNAP)
        for end in mine:
            if snapped[end] < 0:  # a requested snapshot needn't wait for the restarted worker
                own = {name: x for (of, name), x in shares.items() if of == end}
                self.control.write(SNAP, end, ticks[end], own)
        return Left(ticks, shares)

    def listen_for(self, number: int) -> Address:
        """Open a listener for a worker that starts later; its address."""
        self._late_listeners[number] = listen(self._host)
        return self._late_listeners[number].getsockname()[:2]

    def replace(self, spec: ProcessSpec, given: Shares, restart: Restart) -> None:
        """Start a worker in an empty place, from the carried state of its endpoints."""
        own = sorted(os.sched_getaffinity(0))
        cores = self._cores.setdefault(spec.number, (own[spec.number % len(own)],))
        self._show(spec)
        for (replica, name), x in given.items():
            self.control.hold_ready(replica, name, x)
        for end in spec.replicas:
            self.control.forget(FINAL, end)
        marks = [self.control.ticks(SNAP)[end] >= 0 for end in spec.replicas]
        snapped = self.control.asked.number - (not all(marks))
        self._awaited[spec.number] = {
            scheduler: self.control.completed(scheduler) for scheduler in spec.schedulers
        }
        for scheduler in spec.schedulers:
            self.control.note(scheduler, "")
            self.control.dismiss(scheduler, 0)
        restart = restart._replace(snapped=snapped)
        listener = self._late_listeners.pop(spec.number, None)
        self._known.discard(spec.number)
        self._workers[spec.number] = spawn(spec, cores, self._memory, self._mark, listener, restart)

    def dismiss(self, spec: ProcessSpec) -> None:
        """Stop an asynchronous worker after its current tick."""
        for scheduler in spec.schedulers:
            self.control.dismiss(scheduler)

    def _show(self, spec: ProcessSpec) -> None:
        """Open the buffers of a worker: of its endpoints' metrics, and of spans."""
        for end in spec.replicas:
            if end not in self._shows:
                self._shows[end] = self.control.show(end)
        is_recorded = self._layout.spans >= 0
        for worker_id, scheduler in zip(spec.worker_ids, spec.schedulers, strict=True):
            if not is_recorded:
                break
            self._span_buffers.add(name_of((worker_id,)), self.control.spans(scheduler))

    def _is_new(self) -> bool:
        return self._has_ended() or any(s.is_new() for s in self._shows.values())

    def _has_ended(self) -> bool:
        """Whether a worker has ended and its exit is not reported yet."""
        return any(n not in self._known and self._exit(n) for n in self._workers)

    def _exit(self, number: int) -> WorkerExit | None:
        """The exit of a worker, if it has ended."""
        return self._workers[number].poll(self._doing(number))

    def _doing(self, number: int) -> str:
        """The stage in Python that a worker is in and its tick, as text."""
        for worker_id in self._workers[number].worker_ids:
            status = self.control.status(self._layout.schedulers.index(worker_id), 0)
            if status.stage:
                return f"stage `{status.stage}` at tick {status.stage_tick}"
        return ""

    def _is_pressing(self) -> bool:
        """Whether there is nothing to receive, or so much that a worker may soon have to wait."""
        many = any(show.waiting >= MANY for show in self._shows.values())
        return many or self._has_ended() or not self._is_new()

    def statuses(self) -> dict[str, WorkerStatus]:
        """The status of each worker."""
        running = [w for n, w in self._workers.items() if n not in self._known]
        return {
            name_of((worker_id,)): self.control.status(
                self._layout.schedulers.index(worker_id), one.process.pid
            )
            for one in running
            for worker_id in one.worker_ids
        }

    def spans(self, measured: range) -> HostSpans:
        """The new spans of each worker, and this host's time."""
        return host_spans(self._span_buffers.read(measured))

    def fail(self, number: int, what: str, fix: str) -> None:
        """Kill a worker, and report it as lost with this error."""
        worker = self._workers[number]
        if not worker.exit:
            worker.kill(lost(worker.name, what, fix))

    def kept(self) -> Kept:
        """The tick of each endpoint of this host in each slot."""
        return {
            slot: {r: t for r, t in self.control.ticks(slot).items() if r in self._shows}
            for slot in range(SNAP + 1)
        }

    def shares(self, slots: Mapping[Replica, int]) -> Shares:
        """What endpoints of this host kept, from the slot that is given for each."""
        kept = {r: slot for r, slot in slots.items() if r in self._shows}
        kept = {r: slot for r, slot in kept.items() if self.control.ticks(slot)[r] >= 0}
        return self.control.shares(kept)

    def sent(self) -> Counter[str]:
        """The bytes that ended workers of this host have sent to other hosts, by channel."""
        return sum((Counter(w.exit.sent) for w in self._workers.values() if w.exit), Counter())

    def close(self, grace: float = CLOSE_GRACE_S) -> None:
        """End all workers and the processes that they started; kill them after a grace period."""
        self.control.halt()
        until = time.monotonic() + grace
        for number, worker in self._workers.items():
            worker.close(until, self._doing(number))
        if self._workers:
            kill_marked(self._mark)
        for listener in (*self._listeners, *self._late_listeners.values()):
            listener.close()


def free_port(host: str = LOOPBACK) -> int:
    """A free port of this host."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def share_cores(specs: Sequence[ProcessSpec]) -> list[tuple[int, ...]]:
    """The CPU cores of each process: one for each replica of many, the rest for the others.

    If there are fewer cores than processes, single replicas may use all; so may processes that
    compute on another device, which need cores only to compile.
    """
    cores = sorted(os.sched_getaffinity(0))
    alike = [one for one in specs if one.alike]
    rest = cores[len(alike) :] if len(cores) > len(alike) else cores
    turn = iter(range(len(specs)))
    return [
        (cores[next(turn) % len(cores)],) if one.alike else tuple(rest if one.on_cpu else cores)
        for one in specs
    ]
