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
from shoal.planning.policy import lag_of
from shoal.planning.segments import Program
from shoal.runtime.channels.channel import Channel, Waker
from shoal.runtime.channels.in_process import InProcessChannel, make_channels
from shoal.runtime.debug.blame import bad_metrics, not_finite
from shoal.runtime.execution.compiled_executor import CompiledExecutor, wrapped
from shoal.runtime.execution.executors import Executor, make_executor
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.metrics import Collector, Shown
from shoal.runtime.execution.replica_runner import Lagged, ReplicaRunner, Runs
from shoal.runtime.execution.scheduler import Scheduler
from shoal.runtime.execution.snapshot import (
    Asked,
    Share,
    Snapshot,
    check_complete,
    past_name,
    value_of,
)
from shoal.runtime.execution.threads import Threads, ThreadWaker
from shoal.runtime.execution.worker_status import WorkerStatus


def lagged(plan: Plan) -> Iterator[Lagged]:
    """The channels whose readers lag by a fixed number of ticks."""
    for c in plan.channels:
        if lag := lag_of(c.flow):
            yield Lagged(c.name, c.writer, c.reader, lag, c.values)


def past_names(line: Lagged) -> list[str]:
    """The names of the messages in flight on a lagged channel between ticks."""
    ages = range(1, line.lag + 1)
    return [past_name(line.reader, value, age) for value in line.values for age in ages]


class LocalRun:
    """All replica runners of a plan, their channels and their metrics."""

    def __init__(
        self,
        plan: Plan,
        programs: list[Program],
        start: Snapshot,
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
        scheduler = make_scheduler(
            self._plan, self._executors[fragment], workers, self.channels, waker
        )
        spend = partial(self._collector.spend, (fragment, worker))
        return scheduler.reports_to(lambda text: None, spend)

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks that have arrived; raises at the first that has a NaN."""
        for tick, shown in self._collector.ready():
            if bad := bad_metrics(shown):
                raise not_finite(self._plan, self._good(tick), tick, bad)
            yield tick, shown

    def looked(self) -> Iterator[tuple[int, Shown]]:
        """The metrics of observers, each with its tick."""
        return self._collector.looked()

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
        counted = [w for w in self.workers if not w.is_asynchronous]
        ticks = {w.tick for w in counted}
        if len(ticks) == 1 and not any(w.broken for w in counted):
            return self._whole({w.replica: _newest(w) for w in self.workers})
        return check_complete(self._good(min(ticks)), self._plan.graph.inputs)

    def run_many(self, asked: list[Runs]) -> list[list[Any]]:
        """Run requested segments as a batch, in the fragment that they belong to."""
        for executor in self._executors.values():
            if isinstance(executor, CompiledExecutor) and executor.has(asked[0].segment):
                return executor.run_many(asked)
        raise AssertionError("no fragment has this segment")

    def _of(self, fragment: str) -> list[ReplicaRunner]:
        return [w for w in self.workers if w.replica[0] == fragment]

    def _good(self, tick: int) -> Snapshot:
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
            for name in past_names(line):
                past[name] = self._joined(value_of(name), [rows[name] for rows in held])
        tick = next(s.tick for (f, _), s in in_order if f not in plan.asynchronous)
        in_flight = max(share.in_flight for share in shares.values())
        return Snapshot(tick, values, past, in_flight=in_flight)

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


def make_scheduler(
    plan: Plan,
    executor: Executor,
    workers: list[ReplicaRunner],
    channels: Mapping[str, Channel],
    waker: Waker | None,
) -> Scheduler:
    """The scheduler of one worker of a fragment."""
    clients = plan.distribution.clients(executor.spec.name)
    if clients is None:
        return Scheduler(workers, channels, waker)
    assert isinstance(executor, CompiledExecutor)
    return Scheduler(workers, channels, waker, clients[1], executor.run_many)


class Inline:
    """A run on the inline backend: everything happens on the caller's thread, in `alive`."""

    def __init__(self, run: LocalRun) -> None:
        self._run, self._limit = run, Limit(0)
        self._scheduler = Scheduler(run.workers, run.channels, None, None, run.run_many)
        self.ready, self.looked = run.ready, run.looked
        self.statuses, self.fail = run.statuses, run.fail
        self.scale, self.sent = run.scale, run.sent
        self.final, self.snapshots = run.final, run.snapshots

    def start(self, limit: Limit) -> None:
        """Store the limit; `alive` runs the ticks."""
        self._limit = limit

    def alive(self, seconds: float) -> bool:
        """Run one tick."""
        begun = self._run.tick
        self._scheduler.turn(_OneTick(self._limit, begun))  # type: ignore[arg-type]
        return self._run.tick > begun

    def close(self) -> None:
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


class Threaded:
    """A run on the threads backend."""

    def __init__(self, run: LocalRun) -> None:
        halt = threading.Event()
        wakers = {name: ThreadWaker(halt) for name in run.scheduler_names}
        self._threads = Threads(run.schedulers(wakers), list(wakers.values()), halt)
        self.ready, self.looked = run.ready, run.looked
        self.statuses, self.fail = run.statuses, run.fail
        self.scale, self.sent = run.scale, run.sent
        self._final, self.snapshots = run.final, run.snapshots

    def start(self, limit: Limit) -> None:
        """Start the threads; returns at once."""
        self._threads.start(limit)

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; raises a worker's failure after all have stopped."""
        until = time.monotonic() + seconds
        for thread in self._threads.threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._threads.alive():
            return True
        if self._threads.failure:
            raise self._threads.failure
        return False

    def final(self) -> Snapshot:
        """Stop all threads; returns the state that all workers have reached together."""
        self.close()
        return self._final()

    def close(self) -> None:
        """Stop all threads."""
        self._threads.stop()
