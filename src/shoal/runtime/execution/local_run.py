"""A run of several workers that meet at channels, on threads or in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    """The channels whose readers are some ticks behind."""
    for c in plan.channels:
        if lag := lag_of(c.flow):
            yield Lagged(c.name, c.writer, c.reader, lag, c.values)


def past_names(line: Lagged) -> list[str]:
    """What is on its way through a lagged channel between ticks."""
    ages = range(1, line.lag + 1)
    return [past_name(line.reader, value, age) for value in line.values for age in ages]


class LocalRun:
    """All workers of a plan, their channels, and what they have shown."""

    def __init__(
        self,
        plan: Plan,
        programs: list[Program],
        start: Snapshot,
        wrap: Callable[[str, InProcessChannel], Channel] = lambda name, channel: channel,
    ) -> None:
        self._plan, self._start = plan, start
        self._crews = {p.fragment: make_executor(plan, p) for p in programs}
        self._lines = make_channels(
            make_channel_specs(plan), {name: _arrays(crew) for name, crew in self._crews.items()}
        )
        self.channels = {name: wrap(name, channel) for name, channel in self._lines.items()}
        self._collector = Collector(plan, programs, start.tick)
        self.workers: list[ReplicaRunner] = []
        for program in programs:
            crew = self._crews[program.fragment]
            for end in range(plan.ends(program.fragment)):
                self.workers.append(ReplicaRunner(crew, end, start, self.channels, self._collector))
        for line in lagged(plan):
            for worker in self._of(line.writer):
                worker.prime(line)
        if not plan.is_copied:
            self._start = start.without(b for b, a in plan.graph.carry if a != b)

    @property
    def teams_named(self) -> list[tuple[str, int]]:
        """A fragment and the number of a worker that holds some of its ends, for each team."""
        return [(f, worker) for f in self._crews for worker in range(self._plan.workers(f))]

    def teams(self, bells: Mapping[tuple[str, int], Waker]) -> list[Scheduler]:
        """A team for each worker of each fragment, by the bell that wakes it."""
        heard = {
            fragment: [bells[fragment, worker] for worker in range(self._plan.workers(fragment))
                       for _ in self._plan.ends_of(fragment, worker)]
            for fragment in self._crews
        }  # fmt: skip
        for channel in self._plan.channels:
            state = self._lines[channel.name].state
            state.subscribe(heard[channel.reader], heard[channel.writer])
        return [self._team(fragment, worker, bell) for (fragment, worker), bell in bells.items()]

    def _team(self, fragment: str, worker: int, bell: Waker) -> Scheduler:
        ends = self._plan.ends_of(fragment, worker)
        workers = [w for w in self._of(fragment) if w.replica[1] in ends]
        return make_team(self._plan, self._crews[fragment], workers, self.channels, bell)

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks that have arrived; raises at the first that has a NaN."""
        for tick, shown in self._collector.ready():
            if bad := bad_metrics(shown):
                raise not_finite(self._plan, self._good(tick), tick, bad)
            yield tick, shown

    def looked(self) -> Iterator[tuple[int, Shown]]:
        """What observers have shown."""
        return self._collector.looked()

    def statuses(self) -> dict[str, WorkerStatus]:
        """What each replica is doing."""
        return {
            f"{w.replica[0]}[{w.replica[1]}]": self._collector.status(w.replica, w.tick)
            for w in self.workers
        }

    def fail(self, worker: str, what: str, fix: str) -> None:
        """End the run: a thread can't be ended from outside."""
        raise RunError(what, fix)

    def scale(self, counts: Mapping[str, int]) -> None:
        """All replicas are there from the start."""

    def sent(self) -> Mapping[str, Any]:
        """Nothing leaves this process."""
        return {}

    def snapshots(self) -> Iterator[Snapshot]:
        """The snapshot that was asked for, when every end has given its part."""
        if shares := self._collector.shares():
            yield self._whole(shares)

    @property
    def tick(self) -> int:
        """The tick that all workers which count ticks have reached."""
        return min(w.tick for w in self.workers if not w.is_free)

    def final(self) -> Snapshot:
        """The state that all workers have reached together, who don't go on after it.

        If workers were stopped in the middle of a tick, it is the last state they all kept.
        """
        counted = [w for w in self.workers if not w.is_free]
        ticks = {w.tick for w in counted}
        if len(ticks) == 1 and not any(w.broken for w in counted):
            return self._whole({w.replica: _newest(w) for w in self.workers})
        return check_complete(self._good(min(ticks)), self._plan.graph.inputs)

    def run_many(self, asked: list[Runs]) -> list[list[Any]]:
        """Run segments that ends of a server ask for; whose they are shows by themselves."""
        for crew in self._crews.values():
            if isinstance(crew, CompiledExecutor) and crew.has(asked[0].segment):
                return crew.run_many(asked)
        raise AssertionError("nobody has this segment")

    def _of(self, fragment: str) -> list[ReplicaRunner]:
        return [w for w in self.workers if w.replica[0] == fragment]

    def _good(self, tick: int) -> Snapshot:
        """The newest state that all workers kept at or before `tick`."""
        kept = {w.replica: {k.tick: k for k in list(w.kept)} for w in self.workers}
        counted = [set(kept[w.replica]) for w in self.workers if not w.is_free]
        usable = [t for t in set.intersection(*counted) if t <= tick] if counted else []
        if not usable:
            return self._start
        # Free ends have ticks of their own; the newest they kept will do.
        return self._whole({r: k.get(max(usable), k[max(k)]) for r, k in kept.items() if k})

    def _whole(self, shares: Mapping[Replica, Share]) -> Snapshot:
        """A snapshot from every end's part of it."""
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
        """A value from its owner's ends, on one device, where it meets all the others."""
        value = self._plan.graph.values[name]
        parts = [jax.device_put(x, jax.devices()[0]) for x in rows]
        x = (
            parts[0]
            if value.axis is None or len(parts) == 1
            else jnp.concatenate(parts, value.axis)
        )
        is_raw = value.dtype.startswith("key<") and x.dtype == jnp.uint32
        return wrapped(x) if is_raw else x


def _arrays(crew: Executor) -> Any:
    """Where an executor wants its messages: on its devices, or in NumPy."""
    if isinstance(crew, CompiledExecutor) and not crew.spec.is_served:
        return crew.segments
    return None


def _newest(worker: ReplicaRunner) -> Share:
    """What an end carries, or carried last before it was stopped in the middle of a tick."""
    return worker.kept[-1] if worker.broken else worker.handed_over()


def make_team(
    plan: Plan,
    crew: Executor,
    workers: list[ReplicaRunner],
    channels: Mapping[str, Channel],
    bell: Waker | None,
) -> Scheduler:
    """The team of one of a fragment's workers."""
    clients = plan.distribution.clients(crew.spec.name)
    if clients is None:
        return Scheduler(workers, channels, bell)
    assert isinstance(crew, CompiledExecutor)
    return Scheduler(workers, channels, bell, clients[1], crew.run_many)


class Inline:
    """The inline backend's way with pieces: all happens on the caller's thread, when waited for."""

    def __init__(self, pieces: LocalRun) -> None:
        self._pieces, self._limit = pieces, Limit(0)
        self._team = Scheduler(pieces.workers, pieces.channels, None, None, pieces.run_many)
        self.ready, self.looked = pieces.ready, pieces.looked
        self.statuses, self.fail = pieces.statuses, pieces.fail
        self.scale, self.sent = pieces.scale, pieces.sent
        self.final, self.snapshots = pieces.final, pieces.snapshots

    def start(self, limit: Limit) -> None:
        """Remember how far to go."""
        self._limit = limit

    def alive(self, seconds: float) -> bool:
        """Do one tick."""
        begun = self._pieces.tick
        self._team.turn(_OneTick(self._limit, begun))  # type: ignore[arg-type]
        return self._pieces.tick > begun

    def close(self) -> None:
        """Nothing runs but the caller's thread."""


@dataclass(frozen=True)
class _OneTick:
    """Lets a limit's workers start one tick only."""

    limit: Limit
    tick: int

    @property
    def asked(self) -> Asked:
        """The snapshot that is wanted."""
        return self.limit.asked

    def may_turn(self) -> bool:
        """Whether one that turns at its own pace may begin another turn."""
        return self.limit.may_turn()

    def may_start(self, tick: int, count: int = 1) -> int:
        """How many ticks a worker may do."""
        return self.limit.may_start(tick) if tick == self.tick else 0


class Threaded:
    """The threads backend's way with pieces."""

    def __init__(self, pieces: LocalRun) -> None:
        halt = threading.Event()
        bells = {name: ThreadWaker(halt) for name in pieces.teams_named}
        self._threads = Threads(pieces.teams(bells), list(bells.values()), halt)
        self.ready, self.looked = pieces.ready, pieces.looked
        self.statuses, self.fail = pieces.statuses, pieces.fail
        self.scale, self.sent = pieces.scale, pieces.sent
        self._final, self.snapshots = pieces.final, pieces.snapshots

    def start(self, limit: Limit) -> None:
        """Begin; returns at once."""
        self._threads.start(limit)

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; raises a worker's failure once all have stopped."""
        until = time.monotonic() + seconds
        for thread in self._threads.threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._threads.alive():
            return True
        if self._threads.failure:
            raise self._threads.failure
        return False

    def final(self) -> Snapshot:
        """The state that all workers have reached together; nobody goes on."""
        self.close()
        return self._final()

    def close(self) -> None:
        """Let nobody wait any more."""
        self._threads.stop()
