"""The supervisor: a pure state machine for failures, restarts and scaling of workers.

`on_event(state, event)` returns the next state and a list of actions. There are two recoveries. A
restart group that is independent of the others' progress restarts in place while they continue.
After any other failure all workers roll back to the newest consistent snapshot (`recovery.py`). A
replica that is added or removed starts and ends as one that is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from shoal.runtime.cluster.launching import WorkerExit, lost
from shoal.runtime.restart_policy import recent

EMPTY_PLACE_TIMEOUT_S = 5.0  # after which the loss of a worker that isn't replaced is reported
Group = tuple[int, ...]  # workers that restart together


@dataclass(frozen=True)
class Workers:
    """All workers that a run may have, and their static facts."""

    names: tuple[str, ...]
    fragments: tuple[str, ...]  # fragment of each worker
    groups: tuple[Group, ...]  # restart group of each worker
    restartable: frozenset[int]  # those that may restart while the others continue
    counted: frozenset[int]  # those that count ticks: the run ends when they have ended
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of elastic fragments
    restarts: int = 0  # of each worker within WINDOW_S


@dataclass(frozen=True)
class PendingRestart:
    """The progress of a group's restart."""

    since: float
    incarnation: int
    exit: WorkerExit | None = None  # none if the places were empty before
    started: bool = False
    expires: float = inf  # when the failure is reported, if the places stay empty
    resumed: frozenset[int] = frozenset()  # workers that have completed a tick since


@dataclass(frozen=True)
class State:
    """The present workers, the wanted replicas and the pending restarts."""

    workers: Workers
    present: frozenset[int]
    wanted: Mapping[str, int]  # replicas of elastic fragments
    leaving: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    failures: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    pending: Mapping[Group, PendingRestart] = field(default_factory=dict)
    incarnation: int = 0
    failed: WorkerExit | None = None  # failure that ends the run

    @property
    def is_done(self) -> bool:
        """Whether all workers that count ticks have ended."""
        return self.workers.counted <= self.ended

    @property
    def is_over(self) -> bool:
        """Whether the run has failed or is done, so that nothing starts any more."""
        return self.failed is not None or self.is_done

    @property
    def restarting(self) -> set[int]:
        """Workers whose restart is pending."""
        return {number for group in self.pending for number in group}

    def is_starting(self, number: int) -> bool:
        """Whether the restart of a worker is being prepared."""
        pending = self.pending.get(self.workers.groups[number])
        return pending is not None and not pending.started

    def staying(self, fragment: str) -> list[int]:
        """Workers of a fragment that are present and not leaving."""
        here = sorted(self.present - self.leaving)
        return [n for n in here if self.workers.fragments[n] == fragment]

    def can_spare(self, number: int) -> bool:
        """Whether there are enough replicas without a worker."""
        fragment = self.workers.fragments[number]
        others = [n for n in self.staying(fragment) if n != number]
        return len(others) >= self.workers.bounds.get(fragment, (inf, inf))[0]


@dataclass(frozen=True)
class WorkerExited:
    """A worker has ended."""

    number: int
    exit: WorkerExit
    now: float


@dataclass(frozen=True)
class HostLost:
    """A host is lost, with these workers."""

    numbers: tuple[int, ...]
    now: float


@dataclass(frozen=True)
class WorkerPlaced:
    """There is room for a worker that was to be placed."""

    number: int
    now: float


@dataclass(frozen=True)
class PlaceMissing:
    """There is no room for a worker that was to be placed."""

    number: int


@dataclass(frozen=True)
class GroupReady:
    """The restart state of a group is ready."""

    group: Group


@dataclass(frozen=True)
class WorkersResumed:
    """Workers that have been restarted have completed a tick."""

    numbers: frozenset[int]
    now: float


@dataclass(frozen=True)
class ScaleRequested:
    """Other numbers of replicas are wanted."""

    counts: Mapping[str, int]


@dataclass(frozen=True)
class RunClosed:
    """The run is closed, with or without a failure."""


@dataclass(frozen=True)
class TimePassed:
    """Time has passed without another event."""

    now: float


Placing = WorkerPlaced | PlaceMissing
Asking = ScaleRequested | TimePassed | RunClosed
Event = WorkerExited | HostLost | Placing | GroupReady | WorkersResumed | Asking


@dataclass(frozen=True)
class EndGroup:
    """End the rest of a group, and prepare its restart; `GroupReady` follows."""

    group: Group
    incarnation: int


@dataclass(frozen=True)
class StartGroup:
    """Start the workers of a group."""

    group: Group
    incarnation: int


@dataclass(frozen=True)
class PlaceWorker:
    """Find room for a worker; `WorkerPlaced` or `PlaceMissing` follows."""

    number: int


@dataclass(frozen=True)
class StopWorker:
    """Stop a worker after its current tick."""

    number: int


@dataclass(frozen=True)
class RemoveWorker:
    """Release the in-flight messages and the place of a worker that has left."""

    number: int


@dataclass(frozen=True)
class ReportFailure:
    """Report that a worker is lost, or after how many seconds its group resumed."""

    group: Group
    exit: WorkerExit
    seconds: float | None = None
    is_new: bool = False


@dataclass(frozen=True)
class LogLine:
    """Log a line."""

    line: str


@dataclass(frozen=True)
class GiveUp:
    """End the run with this failure; the caller may roll back."""

    exit: WorkerExit


Starting = EndGroup | StartGroup | PlaceWorker
Reporting = ReportFailure | LogLine | GiveUp
Action = Starting | StopWorker | RemoveWorker | Reporting
Step = tuple[State, list[Action]]


def on_event(state: State, event: Event) -> Step:
    """The next state, and the actions to execute."""
    if state.is_over and not isinstance(event, WorkerExited | TimePassed | RunClosed):
        return state, []
    return _decide(state, event)


def _decide(state: State, event: Event) -> Step:
    match event:
        case WorkerExited():
            step = _exited(state, event)
        case HostLost(numbers, now):
            step = _host_lost(state, numbers, now)
        case WorkerPlaced(number, now):
            step = _placed(state, number, now)
        case PlaceMissing(number):
            step = _not_placed(state, number)
        case GroupReady(group):
            step = _ready(state, group)
        case WorkersResumed(numbers, now):
            step = _resumed(state, numbers, now)
        case ScaleRequested(counts):
            step = _scaled(state, counts)
        case TimePassed(now):
            step = _time_passed(state, now)
        case RunClosed():
            step = _settle_all(state)
    return step


def _exited(state: State, event: WorkerExited) -> Step:
    number, exit = event.number, event.exit
    group = state.workers.groups[number]
    ended = replace(state, ended=state.ended | {number})
    if number in state.leaving:
        state, settled = _settle(_without(ended, number), group)
        return state, [*settled, RemoveWorker(number)]
    if state.is_starting(number):
        return state, []  # it ended together with the worker that restarts
    unneeded = state.is_done and number in state.workers.restartable
    if not exit.kind or state.failed or unneeded:
        return ended, []
    return _restart(state, number, exit, event.now)


def _restart(state: State, number: int, exit: WorkerExit, now: float) -> Step:
    """Restart the group of a failed worker, if it may restart."""
    failed, state = _count_failure(state, number, exit, now)
    if failed:
        return _fail(replace(state, ended=state.ended | {number}), failed)
    group = state.workers.groups[number]
    state, settled = _settle(state, group)  # it may fail again before it has resumed
    state, opened = _open(state, group, exit, now)
    return state, [*settled, *opened, ReportFailure(group, exit, is_new=True)]


def _count_failure(
    state: State, number: int, exit: WorkerExit, now: float
) -> tuple[WorkerExit | None, State]:
    """The failure that ends the run, if the worker may not restart, and the next state."""
    allowed = state.workers.restarts
    if exit.kind != "LostError" or not allowed or number not in state.workers.restartable:
        return exit, state
    times = recent(state.failures.get(number, ()), now)
    state = replace(state, failures={**state.failures, number: times})
    if len(times) <= allowed:
        return None, state
    often = "once" if allowed == 1 else f"{allowed} times"
    return replace(exit, kind="RunError", what=f"{exit.what}, after it was replaced {often}"), state


def _fail(state: State, exit: WorkerExit) -> Step:
    return replace(state, failed=state.failed or exit), [GiveUp(exit)] if not state.failed else []


def _host_lost(state: State, numbers: Iterable[int], now: float) -> Step:
    """Continue without these workers, or place them on other hosts."""
    actions: list[Action] = []
    for number in state.present.intersection(numbers):
        name, group = state.workers.names[number], state.workers.groups[number]
        fix = "`ray status` shows what is left."
        exit = lost(name, f"worker {name} is lost with its host", fix)
        failed, state = _count_failure(state, number, exit, now)
        state = _without(state, number)
        if failed or len(group) > 1:  # the state of the rest of its group is not usable alone
            state, more = _fail(state, failed or exit)
            actions += more
            continue
        state, settled = _settle(state, group)
        pending = PendingRestart(now, state.incarnation + 1, exit)
        new = ReportFailure(group, exit, is_new=True)
        if state.can_spare(number):
            pending = replace(pending, started=True, expires=now + EMPTY_PLACE_TIMEOUT_S)
        state = _with_pending(state, group, pending)
        actions += [*settled, new, *([] if pending.started else [PlaceWorker(number)])]
    return state, actions


def _without(state: State, number: int) -> State:
    """The state without a worker that has left."""
    present, leaving = state.present - {number}, state.leaving - {number}
    return replace(state, present=present, leaving=leaving)


def _placed(state: State, number: int, now: float) -> Step:
    """Start a worker that has been placed."""
    group = state.workers.groups[number]
    present, ended = state.present | {number}, state.ended - {number}
    state, settled = replace(state, present=present, ended=ended), list[Action]()
    if state.is_starting(number):
        return state, [EndGroup(group, state.pending[group].incarnation)]
    state, settled = _settle(state, group)
    state, opened = _open(state, group, None, now)
    return state, [*settled, *opened]


def _not_placed(state: State, number: int) -> Step:
    """Fail if a lost worker can't be placed; added workers are retried."""
    pending = state.pending.get(state.workers.groups[number])
    if pending is None or pending.exit is None or pending.started:
        return state, []
    return _fail(state, pending.exit)


def _ready(state: State, group: Group) -> Step:
    pending = state.pending.get(group)
    if pending is None or pending.started:
        return state, []
    started = _with_pending(state, group, replace(pending, started=True))
    return started, [StartGroup(group, pending.incarnation)]


def _resumed(state: State, numbers: frozenset[int], now: float) -> Step:
    actions: list[Action] = []
    for group, pending in state.pending.items():
        resumed = pending.resumed | numbers.intersection(group)
        state = _with_pending(state, group, replace(pending, resumed=resumed))
        if resumed.issuperset(group):
            state, settled = _settle(state, group, now - pending.since)
            actions += settled
    return state, actions


def _scaled(state: State, counts: Mapping[str, int]) -> Step:
    lines, wanted = list[Action](), dict(state.wanted)
    for name, count in counts.items():
        if name not in state.workers.bounds:
            lines.append(LogLine(f"`{name}` has a fixed number of replicas: ignored"))
            continue
        least, most = state.workers.bounds[name]
        within = min(max(count, least), most)
        if wanted[name] != within:
            wanted[name] = within
            lines.append(LogLine(f"{name}: scaling to {within} replicas"))
    return replace(state, wanted=wanted), lines


def _time_passed(state: State, now: float) -> Step:
    if state.is_over:
        return _settle_all(state)
    actions = list[Action]()
    for group, pending in state.pending.items():
        if now >= pending.expires:
            state, settled = _settle(state, group)
            actions += settled
    for fragment, count in state.wanted.items():
        here = state.staying(fragment)
        every = range(len(state.workers.names))
        absent = [n for n in every if state.workers.fragments[n] == fragment]
        absent = [n for n in absent if n not in state.present]
        actions += [PlaceWorker(n) for n in absent[: max(0, count - len(here))]]
        # A worker that is starting can't be stopped before it runs.
        stopped = [n for n in here[count:] if not state.is_starting(n)]
        actions += [StopWorker(n) for n in stopped]
        state = replace(state, leaving=state.leaving.union(stopped))
    return state, actions


def _open(state: State, group: Group, exit: WorkerExit | None, now: float) -> Step:
    incarnation = state.incarnation + 1
    state = _with_pending(state, group, PendingRestart(now, incarnation, exit))
    return state, [EndGroup(group, incarnation)]


def _with_pending(state: State, group: Group, pending: PendingRestart) -> State:
    incarnation = max(state.incarnation, pending.incarnation)
    return replace(state, pending={**state.pending, group: pending}, incarnation=incarnation)


def _settle(state: State, group: Group, seconds: float | None = None) -> Step:
    """Report how a pending restart ended, if there is one."""
    pending = state.pending.get(group)
    if pending is None:
        return state, []
    state = replace(state, pending={g: p for g, p in state.pending.items() if g != group})
    if pending.exit is not None:
        return state, [ReportFailure(group, pending.exit, seconds)]
    names = "+".join(state.workers.names[n] for n in group)
    return state, [LogLine(f"worker {names} has {'started' if seconds else 'not started'}")]


def _settle_all(state: State) -> Step:
    actions: list[Action] = []
    for group in state.pending:
        state, settled = _settle(state, group)
        actions += settled
    return state, actions
