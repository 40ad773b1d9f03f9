"""Runs a plan inside one process: its replicas exchange messages on threads or in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shoal.errors import RunError
from shoal.planning.channel_specs import make_channel_specs
from shoal.planning.plan import Plan, Replica
from shoal.planning.segments import Program
from shoal.profiling.recorder import records_spans
from shoal.profiling.spans import SpanBuffer, SpanBuffers
from shoal.runtime.channels.channel import Channel, Waker
from shoal.runtime.channels.in_process import InProcessChannel, make_channels
from shoal.runtime.execution.compiled_executor import CompiledExecutor, wrapped
from shoal.runtime.execution.executors import Executor, make_executor
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.metrics import Collector
from shoal.runtime.execution.replica_runner import Failure, ReplicaRunner, Runs
from shoal.runtime.execution.scheduler import Scheduler, Stopped
from shoal.runtime.execution.snapshot import (
    Asked,
    Share,
    Snapshot,
    check_complete,
    lagged,
    value_of,
)
from shoal.runtime.execution.worker_status import WorkerStatus


class LocalRun:
    """All replica runners of a plan, their channels and their metrics."""

    def __init__(
        self,
        plan: Plan,
        programs: list[Program],
        start: Snapshot,
        drive: Callable[[LocalRun], Inline | Threads],
        wrap: Callable[[str, InProcessChannel], Channel] = lambda name, channel: channel,
    ) -> None:
        self._plan, self._start = plan, start
        self._executors = {p.fragment: make_executor(plan, p) for p in programs}
        self._lines = make_channels(
            make_channel_specs(plan),
            {name: _arrays(executor) for name, executor in self._executors.items()},
        )
        self.channels = {name: wrap(name, channel) for name, channel in self._lines.items()}
        self._collector = Collector(plan, programs, start.tick)
        self._span_buffers = SpanBuffers()
        self.spans = self._span_buffers.read
        self.ready, self.looked = self._collector.ready, self._collector.looked
        self.workers: list[ReplicaRunner] = []
        for program in programs:
            executor = self._executors[program.fragment]
            for end in range(plan.ends(program.fragment)):
                self.workers.append(
                    ReplicaRunner(executor, end, start, self.channels, self._collector)
                )
        for line in lagged(plan):
            for worker in self._of(line.writer):
                worker.prime(line)
        if not plan.is_copied:
            self._start = start.without(b for b, a in plan.graph.carry if a != b)
        self._driver = drive(self)
        self.start, self.alive, self.close = (
            self._driver.start, self._driver.alive, self._driver.stop,
        )  # fmt: skip

    @property
    def scheduler_names(self) -> list[tuple[str, int]]:
        """The fragment and worker index of each scheduler."""
        return [(f, worker) for f in self._executors for worker in range(self._plan.workers(f))]

    def schedulers(self, wakers: Mapping[tuple[str, int], Waker]) -> list[Scheduler]:
        """Make a scheduler for each worker of each fragment, from the waker that wakes it."""
        wakers_of = {
            fragment: [wakers[fragment, worker] for worker in range(self._plan.workers(fragment))
                       for _ in self._plan.ends_of(fragment, worker)]
            for fragment in self._executors
        }  # fmt: skip
        for channel in self._plan.channels:
            state = self._lines[channel.name].state
            state.subscribe(wakers_of[channel.reader], wakers_of[channel.writer])
        return [
            self._scheduler(fragment, worker, waker) for (fragment, worker), waker in wakers.items()
        ]

    def _scheduler(self, fragment: str, worker: int, waker: Waker) -> Scheduler:
        ends = self._plan.ends_of(fragment, worker)
        workers = [w for w in self._of(fragment) if w.replica[1] in ends]
        executor = self._executors[fragment]
        many = executor.run_many if isinstance(executor, CompiledExecutor) else None
        scheduler = Scheduler(workers, self.channels, waker, executor.spec.serve, many)
        spend = partial(self._collector.spend, (fragment, worker))
        return self.recorded(f"{fragment}[{worker}]", scheduler.reports_to(lambda _: None, spend))

    def recorded(self, name: str, scheduler: Scheduler) -> Scheduler:
        """A scheduler that records spans, if they are wanted."""
        if not records_spans():
            return scheduler
        buffer = self._span_buffers.add(name, SpanBuffer.own())
        return scheduler.records_in(buffer, list(self._executors), copies=False)

    def statuses(self) -> dict[str, WorkerStatus]:
        """The current status of each worker."""
        found = {}
        for fragment, worker in self.scheduler_names:
            ends = self._plan.ends_of(fragment, worker)
            tick = min(w.tick for w in self._of(fragment) if w.replica[1] in ends)
            found[f"{fragment}[{worker}]"] = self._collector.status((fragment, worker), tick)
        return found

    def fail(self, worker: str, what: str, fix: str) -> None:
        """Fail the run: a thread can't be stopped from outside."""
        raise RunError(what, fix)

    def scale(self, counts: Mapping[str, int]) -> None:
        """All replicas are there from the start."""

    def sent(self) -> Mapping[str, Any]:
        """Nothing leaves this process."""
        return {}

    def snapshots(self) -> Iterator[Snapshot]:
        """The requested snapshot, once every endpoint has delivered its part."""
        if shares := self._collector.shares():
            yield self._whole(shares)

    @property
    def tick(self) -> int:
        """The tick that all synchronous workers have reached."""
        return min(w.tick for w in self.workers if not w.is_asynchronous)

    def final(self) -> Snapshot:
        """The state that all workers have reached together; none of them continues after it.

        If workers were stopped in the middle of a tick, it is the last state that they all kept.
        """
        self.close()
        counted = [w for w in self.workers if not w.is_asynchronous]
        ticks = {w.tick for w in counted}
        if len(ticks) == 1 and not any(w.broken for w in counted):
            return self._whole({w.replica: _newest(w) for w in self.workers})
        return check_complete(self.good(min(ticks)), self._plan.graph.inputs)

    def run_many(self, asked: list[Runs]) -> list[list[Any]]:
        """Run requested segments as a batch, in the fragment that they belong to."""
        for executor in self._executors.values():
            if isinstance(executor, CompiledExecutor) and executor.has(asked[0].segment):
                return executor.run_many(asked)
        raise AssertionError("no fragment has this segment")

    def _of(self, fragment: str) -> list[ReplicaRunner]:
        return [w for w in self.workers if w.replica[0] == fragment]

    def good(self, tick: int) -> Snapshot:
        """The newest state at or before `tick` that all workers kept."""
        kept = {w.replica: {k.tick: k for k in list(w.kept)} for w in self.workers}
        counted = [set(kept[w.replica]) for w in self.workers if not w.is_asynchronous]
        usable = [t for t in set.intersection(*counted) if t <= tick] if counted else []
        if not usable:
            return self._start
        # Asynchronous endpoints count their own ticks: use the newest state that each kept.
        return self._whole({r: k.get(max(usable), k[max(k)]) for r, k in kept.items() if k})

    def _whole(self, shares: Mapping[Replica, Share]) -> Snapshot:
        """A snapshot assembled from the parts of all endpoints."""
        plan, in_order = self._plan, sorted(shares.items())
        values, past = dict(self._start.values), {}
        for name, after in plan.graph.carry:
            if name != after:
                owner = min(plan.sites.holders(after, plan.homes))
                rows = [share.carried[name] for (f, _), share in in_order if f == owner]
                values[name] = self._joined(name, rows)
        for line in lagged(plan):
            held = [share.past for (f, _), share in in_order if f == line.writer]
            for name in line.past_names:
                past[name] = self._joined(value_of(name), [rows[name] for rows in held])
        tick = next(s.tick for (f, _), s in in_order if f not in plan.asynchronous)
        return Snapshot(tick, values, past)

    def _joined(self, name: str, rows: list[Any]) -> Any:
        """A value joined from its owner's endpoints, on the snapshot's device."""
        value = self._plan.graph.values[name]
        parts = [jax.device_put(x, jax.devices()[0]) for x in rows]
        x = (
            parts[0]
            if value.axis is None or len(parts) == 1
            else jnp.concatenate(parts, value.axis)
        )
        is_raw = value.dtype.startswith("key<") and x.dtype == jnp.uint32
        return wrapped(x) if is_raw else x


def _arrays(executor: Executor) -> Any:
    """The placement of an executor's messages: its devices, or None for NumPy."""
    if isinstance(executor, CompiledExecutor) and not executor.spec.is_served:
        return executor.segments
    return None


def _newest(worker: ReplicaRunner) -> Share:
    """The state of an endpoint; the last it kept if it was stopped in the middle of a tick."""
    return worker.kept[-1] if worker.broken else worker.handed_over()


class Inline:
    """Runs all endpoints on the caller's thread, in `alive`."""

    def __init__(self, run: LocalRun) -> None:
        self._run, self._limit = run, Limit(0)
        scheduler = Scheduler(run.workers, run.channels, None, None, run.run_many)
        self._scheduler = run.recorded("inline[0]", scheduler)

    def start(self, limit: Limit) -> None:
        """Store the limit; `alive` runs the ticks."""
        self._limit = limit

    def alive(self, seconds: float) -> bool:
        """Run one tick."""
        begun = self._run.tick
        self._scheduler.run(_OneTick(self._limit, begun))  # type: ignore[arg-type]
        return self._run.tick > begun

    def stop(self) -> None:
        """Do nothing: only the caller's thread runs."""


@dataclass(frozen=True)
class _OneTick:
    """A limit that lets workers start one tick only."""

    limit: Limit
    tick: int

    @property
    def asked(self) -> Asked:
        """The requested snapshot."""
        return self.limit.asked

    def may_turn(self) -> bool:
        """Whether an asynchronous endpoint may begin another turn."""
        return self.limit.may_turn()

    def may_start(self, tick: int, count: int = 1) -> int:
        """The number of ticks that a worker may run."""
        return self.limit.may_start(tick) if tick == self.tick else 0


class ThreadWaker:
    """Wakes a thread; once `halt` is set, no thread sleeps."""

    def __init__(self, halt: threading.Event) -> None:
        self._event, self._halt = threading.Event(), halt

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when notified, when `ready`, or after `seconds`; raise if the run stops."""
        self._event.clear()
        if not self._halt.is_set() and not ready():
            self._event.wait(seconds)
        if self._halt.is_set():
            raise Stopped

    def notify(self) -> None:
        """Wake the thread."""
        self._event.set()


class Threads:
    """Runs each scheduler on a thread of its own: the first failure stops all."""

    def __init__(self, run: LocalRun) -> None:
        self._halt = threading.Event()
        self._wakers = {name: ThreadWaker(self._halt) for name in run.scheduler_names}
        self._schedulers = run.schedulers(self._wakers)
        self._threads: list[threading.Thread] = []
        self._failure: Failure | None = None

    def start(self, limit: Limit) -> None:
        """Start a thread for each scheduler; returns at once."""
        self._threads = [
            threading.Thread(target=self._work, args=(one, limit), name=one.name, daemon=True)
            for one in self._schedulers
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, scheduler: Scheduler, limit: Limit) -> None:
        try:
            scheduler.run(limit)
        except Stopped:
            return
        except Failure as failure:
            self.stop(failure)
        except BaseException as error:
            self.stop(Failure((scheduler.name, 0), 0, error))

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; raises a worker's failure after all have stopped."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        running = [
            one
            for one, thread in zip(self._schedulers, self._threads, strict=True)
            if thread.is_alive()
        ]
        if all(one.is_asynchronous for one in running):
            self.stop()
        if not running and self._failure:
            raise self._failure
        return bool(running)

    def stop(self, failure: Failure | None = None) -> None:
        """Stop all threads; the first failure is kept."""
        self._failure = self._failure or failure
        self._halt.set()
        for waker in self._wakers.values():
            waker.notify()
