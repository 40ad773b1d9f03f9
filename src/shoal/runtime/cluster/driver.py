"""The driver of a run over worker processes, and the `processes` backend of one host."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Never

from shoal.errors import ShoalError
from shoal.planning.channel_specs import make_channel_specs
from shoal.planning.plan import Plan, Replica
from shoal.planning.segments import Program
from shoal.profiling.clocks import HostClocks
from shoal.profiling.spans import NewSpans
from shoal.runtime.channels.shared_memory import Allocator
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.cluster import supervisor as sv
from shoal.runtime.cluster.assignment import ProcessAssignment
from shoal.runtime.cluster.control_layout import make_control_layout
from shoal.runtime.cluster.host_agent import CLOSE_GRACE_S, STOP_GRACE_S, HostAgent, Listeners
from shoal.runtime.cluster.hosts import Command, Hosts, LocalHosts, Wanted, WorkerHosts
from shoal.runtime.cluster.kept_state import KeptState
from shoal.runtime.cluster.restarting import (
    GroupRestarter,
    make_workers,
    starting_workers,
)
from shoal.runtime.cluster.supervisor import Action, Event, State, Workers, on_event
from shoal.runtime.execution.compiled_executor import raw
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.metrics import Collector
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.execution.worker_status import WorkerStatus
from shoal.runtime.net.wiring import divide, make_remote_channels
from shoal.runtime.restart_policy import RestartPolicy


class ProcessRun:
    """A run of a plan in worker processes, on one or more hosts."""

    _failure: ShoalError | None = None
    _asked = 0  # number of the snapshot requested last
    _stopped = False

    def __init__(
        self,
        plan: Plan,
        programs: list[Program],
        start: Snapshot,
        hosts: Hosts,
        restart_policy: RestartPolicy,
    ) -> None:
        plan, self._restart_policy = plan.over_processes, restart_policy
        by_name = {p.fragment: p for p in programs}
        self._plan, self._collector = plan, Collector(plan, programs, start.tick)
        self.ready, self.looked = self._collector.ready, self._collector.looked
        self._assignment = ProcessAssignment(plan, by_name, start)
        worker_ids, names = self._assignment.worker_ids, self._assignment.worker_map.hosts
        present, elastic = starting_workers(plan, worker_ids), plan.distribution.elastic
        held = _by_host(present, names)
        roaming = [f.name for f in elastic if hosts.grows]
        near, far = divide(make_channel_specs(plan), self._assignment.worker_map, roaming)
        memory = Allocator()
        channels = ChannelLayouts.plan(near, memory)
        layout = make_control_layout(plan, by_name, memory)
        workers = make_workers(plan, worker_ids, channels, restart_policy.restarts)
        wanted = {f.name: f.most if hosts.grows else plan.starting(f.name) for f in elastic}
        self._state = State(workers, present, wanted)
        self._hosts = WorkerHosts(hosts, list(held.values()))
        try:
            listeners = hosts.open(layout, memory.size, _wanted(plan, held, is_far=bool(far)))
            loose = optional_groups(workers)
            optional = frozenset().union(*loose)
            hosts.optional |= {i for i, own in enumerate(held.values()) if {*own} <= optional}
            addresses, group_addresses = _places(held.values(), listeners, len(worker_ids))
            absent = frozenset(range(len(worker_ids))) - present
            lines = make_remote_channels(far, self._assignment.worker_map, addresses, loose, absent)
            self._specs = self._assignment.specs(channels, layout, lines, group_addresses)
        except BaseException:
            hosts.close()
            raise
        self._carried = {before for before, after in plan.graph.carry if before != after}
        kept = start if plan.is_copied else start.without(self._carried)
        given = {**start.past, **start.values}
        self._given = {name: raw(given[name]) for name in layout.cells if name in given}
        states = self._kept = KeptState(plan, layout, kept, self._hosts)
        self.good = states.good
        self._restarter = GroupRestarter(self._specs, channels, states, self._hosts, restart_policy)
        self._clocks = HostClocks()
        self._limit, self._requested = Limit(0), dict[str, int]()
        self._awaited: set[Replica] = set()  # endpoints that have not written their snapshot

    def start(self, limit: Limit) -> None:
        """Start all workers."""
        self._limit, given, ticks = limit, self._given, limit.ticks
        if not self._plan.is_copied:
            self._given = {name: x for name, x in given.items() if name not in self._carried}
        self._ask()
        specs = [[self._specs[number] for number in held] for held in self._hosts.held]
        try:
            self._hosts.all.run(
                [lambda host, own=own: host.start(own, given, ticks) for own in specs]
            )
        except BaseException:
            self.close()  # the workers that have started would wait for the others forever
            raise

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether the run continues.

        Raises a worker's failure, but only after the metrics received before it were returned.
        """
        if self._failure is not None:
            self._raise(self._failure)
        if self._limit.is_stopping and not self._stopped:
            self._stopped = True
            started = self._hold()
            self._hosts.each(lambda host: host.control.stop_at(started))
        self._ask()
        return self._receive(seconds) or self._failure is not None

    def _raise(self, failure: ShoalError) -> Never:
        """Raise a failure that carries the newest state after which no tick is missing."""
        self._hosts.all.end(STOP_GRACE_S)
        good = self.good(self._collector.next_tick)
        for name, x in (("state", dict(good.values)), ("tick", good.tick), ("snapshot", good)):
            setattr(failure, name, x)
        raise failure

    def _ask(self) -> None:
        """Request the limit's snapshot from all workers, before the same tick."""
        if self._limit.asked.number > self._asked:
            # For workers that restart, the state that they kept is used.
            there = self._state.present - self._state.restarting
            self._asked, self._awaited = self._limit.asked.number, self._endpoints(there)
            tick = max(self._limit.asked.tick, self._hold())
            self._hosts.each(lambda host: host.control.snap_at(tick))

    def _hold(self) -> int:
        """Pause all workers; the number of ticks started so far."""
        return max(self._hosts.each(lambda host: host.control.hold()))

    def _receive(self, seconds: float) -> bool:
        """Receive events from all hosts and handle them; whether workers are still running."""
        share = seconds / len(self._hosts.held)
        receive: Command[Any] = lambda host: host.receive(share)  # noqa: E731
        events_of_hosts = self._hosts.all.run([receive] * len(self._hosts.held))
        now, events = time.monotonic(), list[Event]()
        for index, one in enumerate(events_of_hosts):
            if one is None:
                lost = self._hosts.lose(index)
                self._awaited -= self._endpoints(lost)
                events += [sv.HostLost(lost, now)] if lost else []
                continue
            for shown in one.shown:
                self._collector.show(*shown)
            events += [sv.WorkerExited(number, exit, now) for number, exit in one.ended.items()]
            events += [sv.WorkersResumed(frozenset(one.back), now)] if one.back else []
        self._handle(*events, *map(sv.GroupReady, self._restarter.ready()), sv.TimePassed(now))
        if self._state.is_over:
            self._hosts.each(lambda host: host.control.halt())
        return any(one.running for one in events_of_hosts if one is not None)

    def _handle(self, *events: Event) -> None:
        """Pass events to the supervisor and execute its actions."""
        queue = deque(events)
        while queue:
            self._state, actions = on_event(self._state, queue.popleft())
            for action in actions:
                queue.extend(self._do(action))

    def _do(self, action: Action) -> Iterable[Event]:
        """Execute one action; the events that follow from it at once."""
        match action:
            case sv.EndGroup(group, incarnation):
                self._restarter.end(group, incarnation)
            case sv.StartGroup(group, incarnation):
                self._restarter.start(group, incarnation)
            case sv.ReportFailure():
                self._restarter.report(action)
            case sv.PlaceWorker(number):
                host = self._assignment.worker_map.hosts[number]
                if not self._hosts.place(number, host, self._given, self._limit.ticks):
                    return [sv.PlaceMissing(number)]
                return [sv.WorkerPlaced(number, time.monotonic())]
            case sv.StopWorker(number):
                self._hosts.of(number, lambda host: host.dismiss(self._specs[number]))
            case sv.RemoveWorker(number):
                self._awaited -= self._endpoints([number])
                self._restarter.release(self._state.workers.groups[number])
                self._hosts.remove(number)
            case sv.LogLine(line):
                self._restart_policy.say(line)
            case sv.GiveUp(exit):
                self._failure = self._failure or exit.error
        return ()

    def _endpoints(self, numbers: Iterable[int]) -> set[Replica]:
        """The endpoints that these workers hold."""
        found = set(numbers)
        ends = self._assignment.worker_map.ends
        return {(f, end) for f, at in ends.items() for end, n in enumerate(at) if n in found}

    def scale(self, counts: Mapping[str, int]) -> None:
        """Scale elastic fragments to these numbers of replicas, within their bounds."""
        if counts != self._requested:
            self._requested = dict(counts)
            self._handle(sv.ScaleRequested(counts))

    def sent(self) -> Counter[str]:
        """The bytes that ended workers have sent to other hosts, by channel."""
        return sum(self._hosts.each(HostAgent.sent), Counter())

    def statuses(self) -> dict[str, WorkerStatus]:
        """The status of each worker."""
        return {k: v for found in self._hosts.each(HostAgent.statuses) for k, v in found.items()}

    def spans(self, measured: range) -> dict[str, NewSpans]:
        """The new spans of each worker, in the time of this host."""
        began = time.monotonic_ns()
        found = self._hosts.each(lambda host: host.spans(measured))
        return {k: v for one in found for k, v in self._clocks.in_local_time(one, began).items()}

    def fail(self, worker: str, what: str, fix: str) -> None:
        """Kill a worker and count it as lost with this error; it may restart."""
        names = [[f"{f}[{w}]" for f, w in held] for held in self._assignment.worker_ids]
        number = next(n for n, held in enumerate(names) if worker in held)
        self._hosts.of(number, lambda host: host.fail(number, what, fix))

    def snapshots(self) -> Iterator[Snapshot]:
        """The requested snapshot, once every endpoint has written its part."""
        if self._awaited:
            for snapshot in self._kept.snapshot(self._awaited):
                self._awaited = set()
                yield snapshot

    def final(self) -> Snapshot:
        """The state that all endpoints reached together, or the newest that they all kept."""
        self._hosts.all.end(STOP_GRACE_S if self._stopped else CLOSE_GRACE_S)
        return self._kept.final()

    def close(self) -> None:
        """End all workers and release everything."""
        self._handle(sv.RunClosed())
        self._restarter.close()
        self._hosts.all.close()


def optional_groups(workers: Workers) -> tuple[frozenset[int], ...]:
    """The restart groups whose workers may restart or leave while the run continues."""
    replaced = [n for n in sorted(workers.restartable)
                if workers.restarts or workers.fragments[n] in workers.bounds]  # fmt: skip
    return tuple(dict.fromkeys(frozenset(workers.groups[n]) for n in replaced))


def _by_host(present: Iterable[int], names: Sequence[str]) -> dict[str, list[int]]:
    """The present workers by host."""
    found: dict[str, list[int]] = {}
    for number in sorted(present):
        found.setdefault(names[number], []).append(number)
    return found


def _wanted(plan: Plan, held: Mapping[str, Sequence[int]], *, is_far: bool) -> list[Wanted]:
    """The resources that a run needs on each host."""
    places = [p for places in plan.places.values() for p in places]
    on_gpu = {p.host for p in places if p.device.kind == "gpu"}
    return [
        Wanted(host, len(own), len(own) if is_far else 0, host in on_gpu)
        for host, own in held.items()
    ]


def _places(
    held: Iterable[Sequence[int]], listeners: Sequence[Listeners], count: int
) -> tuple[list[Any], list[str]]:
    """The address of each worker's listener, if any, and its group address."""
    addresses: list[Any] = [("", 0)] * count
    group_addresses = [""] * count
    for own, one in zip(held, listeners, strict=True):
        for i, number in enumerate(own):
            addresses[number] = one.addresses[i] if one.addresses else None
            group_addresses[number] = one.group_addresses[i]
    return addresses, group_addresses


def run_on_processes(
    plan: Plan, programs: list[Program], start: Snapshot, restart_policy: RestartPolicy
) -> ProcessRun:
    """Make a run of a plan in processes on this host."""
    return ProcessRun(plan, programs, start, LocalHosts(), restart_policy)
