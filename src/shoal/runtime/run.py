"""Runs a plan: starts its workers, passes on metrics, stops at a failure, returns the state."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from typing import Any, Protocol

import jax

from shoal.compile_cache import use_compile_cache
from shoal.errors import (
    MissingExtraError,
    SettingError,
    ShoalError,
    UnknownNameError,
)
from shoal.graph.ir import Graph
from shoal.planning.cluster import Cluster
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.planning.segments import Program
from shoal.profiling.spans import NewSpans
from shoal.runtime.debug.blame import bad_metrics, not_finite
from shoal.runtime.execution.fused_run import FusedRun
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.local_run import Inline, LocalRun, Threads
from shoal.runtime.execution.metrics import Shown
from shoal.runtime.execution.replica_runner import Failure
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.execution.worker_status import WorkerStatus
from shoal.runtime.logs import Log
from shoal.runtime.restart_policy import RestartPolicy
from shoal.signals import SignalOwner, owned


def run_on_processes(*run: Any) -> RunHandle:
    """A run in worker processes; only such a run loads what starts and connects them."""
    return import_module("shoal.runtime.cluster.driver").run_on_processes(*run)


def load_ray() -> Any:
    """Import and return the Ray backend; raises if Ray is not installed."""
    try:
        return import_module("shoal.runtime.cluster.ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtraError("ray", "ray") from error


Start = Callable[[Plan, list[Program], Snapshot, RestartPolicy], "RunHandle"]


@dataclass(frozen=True)
class Backend:
    """A backend: how plans are run, and what it supports."""

    start: Start
    # Whether a plan of one program runs in workers, rather than fused in the caller's process.
    is_apart: Callable[[Plan, str], bool] = lambda plan, fragment: False
    ends_steps: bool = True  # whether a step that takes too long can be killed
    scales: bool = False  # whether it can scale replicas
    restarts: int = 0  # by default
    find_cluster: Callable[[str], Cluster] | None = None  # the one at an address, or at hand


BACKENDS = {
    "inline": Backend(
        lambda plan, programs, start, _: LocalRun(plan, programs, start, Inline), ends_steps=False
    ),
    "threads": Backend(lambda plan, programs, start, _: LocalRun(plan, programs, start, Threads)),
    "processes": Backend(
        run_on_processes, lambda plan, fragment: plan.distribution.ends(fragment) > 1, scales=True
    ),
    "ray": Backend(
        lambda *run: load_ray().run_on_ray(*run),
        lambda plan, fragment: True,
        scales=True,
        restarts=3,
        find_cluster=lambda address: load_ray().ray_cluster(address),
    ),
}
STOP_TIMEOUT_S = 1.0  # seconds for workers to finish their tick after Ctrl-C
HUNG_STEP_TIMEOUT_S = 60.0  # after which a stage in Python that hasn't returned is reported
LOOK_S = 1.0  # between checks of the workers' status
Watch = Callable[[int, Shown], None]
Statuses = Callable[[], dict[str, WorkerStatus]]
ReadSpans = Callable[[range], Mapping[str, NewSpans]]


@dataclass(frozen=True)
class RunCallbacks:
    """The callbacks of a run.

    `see(tick, metrics)` gets the metrics of each tick, in order. `due(tick)` is called when `tick`
    ticks have been seen, and returns the tick before which a snapshot is wanted, or None; `keep`
    gets the snapshot after the metrics of all ticks before it. `look(tick, metrics)` gets the
    metrics of observers when they arrive. `stand` gets a function that returns the status of the
    workers, `spans` one that returns their new spans, and `last_spans` the same at the end.
    An exception in a callback stops the run. `restart_policy` says how lost workers
    restart while the others continue. `scale` returns the wanted number of replicas of elastic
    fragments. `stops` returns whether the run is to end after the ticks in flight.
    """

    see: Watch
    due: Callable[[int], int | None] = lambda tick: None
    keep: Callable[[Snapshot], None] = lambda snapshot: None
    look: Watch = lambda tick, metrics: None
    stand: Callable[[Statuses], None] = lambda statuses: None
    spans: Callable[[ReadSpans], None] = lambda read: None
    last_spans: Callable[[ReadSpans], None] = lambda read: None
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    scale: Callable[[], Mapping[str, int]] = dict
    stops: Callable[[], bool] = lambda: False
    say: Log = lambda line: None  # reports a line to the user
    step_timeout: float | None = None  # seconds that one call of a stage in Python may take


@dataclass(frozen=True)
class Result:
    """The result of a run: the carried state, also as the algorithm's tree, and its times."""

    snapshot: Snapshot
    state: Any
    compile_seconds: float
    seconds: float
    first: int = 0  # the tick it resumed from
    stopped_by: int = 0  # the signal that ended it early, if one did
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes between hosts, by channel

    @property
    def values(self) -> dict[str, Any]:
        """The carried values by name."""
        return dict(self.snapshot.values)

    @property
    def ticks(self) -> int:
        """The number of ticks that made the state."""
        return self.snapshot.tick


class RunHandle(Protocol):
    """A running plan."""

    def start(self, limit: Limit) -> None:
        """Start to run ticks up to the limit."""
        ...

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether the run continues. Raises a worker's failure."""
        ...

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of complete ticks, in order."""
        ...

    def looked(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of observers, with the tick that they observed."""
        ...

    def statuses(self) -> dict[str, WorkerStatus]:
        """The status of each worker."""
        ...

    def spans(self, measured: range) -> Mapping[str, NewSpans]:
        """The new spans of each worker; in `measured` ticks, workers wait for their devices."""
        ...

    def fail(self, worker: str, what: str, fix: str) -> None:
        """Kill a worker and count it as lost, with this error."""
        ...

    def scale(self, counts: Mapping[str, int]) -> None:
        """Scale elastic fragments to these numbers of replicas."""
        ...

    def sent(self) -> Mapping[str, int]:
        """The bytes sent between hosts, by channel."""
        ...

    def snapshots(self) -> Iterator[Snapshot]:
        """The snapshot that the limit requests, once it is complete; each is returned once."""
        ...

    def good(self, tick: int) -> Snapshot:
        """The newest state that was kept at or before `tick`."""
        ...

    def final(self) -> Snapshot:
        """The final state, which no worker changes any more. Call it before `close`."""
        ...

    def close(self) -> None:
        """End all workers, also after a failure."""
        ...


def run(
    plan: Plan,
    backend: str = "threads",
    *,
    ticks: int,
    state: Any = None,
    watch: Watch | RunCallbacks | None = None,
) -> Result:
    """Run `plan` until `ticks` ticks are done, from `state` or from a fresh start with seed 0.

    A run from a snapshot continues its tick count. `watch(tick, metrics)` is called in order as
    metrics arrive; an exception in it stops the run. After Ctrl-C and SIGTERM workers finish
    their current tick, and the result names the signal.
    """
    use_compile_cache()
    check_backend(backend)
    callbacks = (
        watch if isinstance(watch, RunCallbacks) else RunCallbacks(watch or (lambda *_: None))
    )
    check_step_timeout(plan, backend, callbacks.step_timeout)
    start = as_snapshot(plan.graph, state)
    del state  # a large state is held only once
    with owned() as owner:
        if owner.requested:
            return Result(start, _as_tree(plan.graph, start), 0.0, 0.0, start.tick, owner.requested)
        began, first = time.perf_counter(), start.tick
        limit = Limit(ticks, first)
        handle = make_run(plan, backend, start, callbacks.restart_policy)
        del start
        with owner.saving():
            return _run(plan, handle, limit, callbacks, _Clock(owner, first, began))


@dataclass
class _Clock:
    """The start time of a run, the times of its ticks, and the signal that stops it."""

    owner: SignalOwner
    tick: int
    began: float
    first: float = 0.0
    last: float = 0.0

    def see(self, tick: int) -> None:
        self.last = time.perf_counter()
        self.first = self.last if tick == self.tick else self.first


def _run(
    plan: Plan, handle: RunHandle, limit: Limit, callbacks: RunCallbacks, clock: _Clock
) -> Result:
    """Start a run, and process it to its end."""
    ticks, first = limit.ticks, clock.tick
    clock.first = clock.last = clock.began
    _ask(limit, callbacks.due(first))
    handle.start(limit)
    try:
        for tick in _seen_ticks(plan, handle, limit, callbacks, clock):
            clock.see(tick)
        end = handle.final()
        sent = handle.sent()
    except Failure as failure:
        raise failure.explained from failure.error
    except BaseException:
        limit.stop()
        _wait(handle, STOP_TIMEOUT_S)
        raise
    finally:
        with suppress(ShoalError):  # of a host that is lost; what ended the run is raised already
            callbacks.last_spans(handle.spans)
        handle.close()
    stopped_by = clock.owner.requested if end.tick < ticks else 0
    times = clock.first - clock.began, clock.last - clock.first
    return Result(end, _as_tree(plan.graph, end), *times, first, stopped_by, sent)


def _as_tree(graph: Graph, end: Snapshot) -> Any:
    """A snapshot as the algorithm's own tree."""
    leaves = [end.values[name] for name in graph.inputs]
    return jax.tree.unflatten(jax.tree.structure(graph.origin.spec(graph.envs)), leaves)


def as_snapshot(graph: Graph, state: Any) -> Snapshot:
    """The start of a run as a snapshot: from a snapshot, an algorithm's tree, or seed 0."""
    if isinstance(state, Snapshot):
        return state
    if state is None:
        return fresh_start(graph, 0)
    return Snapshot(0, dict(zip(graph.inputs, jax.tree.leaves(state), strict=True)))


def fresh_start(graph: Graph, seed: int) -> Snapshot:
    """A new start state; the run may donate its buffers."""
    leaves = jax.tree.leaves(graph.origin.start(seed, graph.envs))
    return Snapshot(0, dict(zip(graph.inputs, leaves, strict=True)), is_owned=True)


def check_backend(name: str) -> str:
    """Return `name` if it is a backend, or raise."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    return name


def check_step_timeout(plan: Plan, backend: str, seconds: float | None) -> None:
    """Check that the backend can enforce a step timeout, if one is set."""
    if seconds is None:
        return
    if not 0 < seconds < inf:
        raise SettingError(
            f"step_timeout={seconds:g} is not a valid timeout", "Set seconds above 0."
        )
    if not any(stage.host for stage in plan.graph.stages):
        raise SettingError(
            "a step timeout is set, and no stage of this loop runs in Python",
            "Leave it out: what is compiled can't be ended in the middle.",
        )
    if not BACKENDS[backend].ends_steps:
        raise SettingError(
            f"a step timeout is set, and the backend `{backend}` runs steps on the caller's thread",
            "Use threads, processes or ray, whose steps can be watched.",
        )


def make_run(plan: Plan, backend: str, start: Snapshot, restarts: RestartPolicy) -> RunHandle:
    """Make a run that is ready to start: one fused program, or workers."""
    programs = [write_program(plan, f.name) for f in plan.distribution.fragments]
    one = programs[0]
    apart = BACKENDS[backend].is_apart(plan, one.fragment)
    if len(programs) == 1 and plan.ends(one.fragment) == 1 and one.compiles_whole and not apart:
        return FusedRun(plan, one, start)
    return BACKENDS[backend].start(plan, programs, start, restarts)


def _seen_ticks(
    plan: Plan, handle: RunHandle, limit: Limit, callbacks: RunCallbacks, clock: _Clock
) -> Iterator[int]:
    """Yield ticks as their metrics are seen; a snapshot is kept in order between them.

    With asynchronous endpoints the last part of a snapshot may arrive later.
    """
    seen, asked, taken = clock.tick, limit.asked.number > 0, deque[Snapshot]()
    steps = StepWatch(callbacks.say, callbacks.step_timeout)

    def keep() -> bool:
        taken.extend(handle.snapshots())
        if not taken or taken[0].tick > seen:
            return False
        callbacks.keep(taken.popleft())
        return True

    for more in _polls(handle, limit, callbacks, clock.owner):
        for tick, metrics in handle.ready():
            if bad := bad_metrics(metrics):
                raise not_finite(plan, handle.good(tick), tick, bad)
            asked = asked and not keep()
            callbacks.see(tick, metrics)
            seen = tick + 1
            yield tick
        for tick, metrics in handle.looked():
            callbacks.look(tick, metrics)
        callbacks.spans(handle.spans)
        if more:
            callbacks.stand(handle.statuses)
            steps.look(handle)
            handle.scale(callbacks.scale())
        asked = (asked and not keep()) or (more and _ask(limit, callbacks.due(seen)))


@dataclass
class StepWatch:
    """Reports stages in Python that don't return, and kills workers after the step timeout."""

    say: Log
    timeout: float | None = None
    _last: float = 0.0
    _reported: set[tuple[str, int]] = field(default_factory=set)

    def look(self, handle: RunHandle) -> None:
        """Check the status of the workers, if it is time."""
        if time.monotonic() - self._last < min(LOOK_S, (self.timeout or LOOK_S) / 4):
            return
        self._last = time.monotonic()
        for worker, status in handle.statuses().items():
            if not status.stage:
                continue
            pid = f" (pid {status.pid})"
            if self.timeout is not None and status.seconds >= self.timeout:
                handle.fail(
                    worker,
                    f"worker {worker}{pid} has been in {status.where}, longer than the step "
                    f"timeout of {self.timeout:g} s",
                    "Find out why the step doesn't return, or allow more with --step-timeout.",
                )
            elif status.seconds >= HUNG_STEP_TIMEOUT_S:
                self._report(worker, status, f"worker {worker}{pid} has been in {status.where}")

    def _report(self, worker: str, status: WorkerStatus, line: str) -> None:
        """Report a stage that hasn't returned, once."""
        if (worker, status.stage_tick) not in self._reported:
            self._reported.add((worker, status.stage_tick))
            self.say(f"{line}; --step-timeout SECONDS would end it")


def _ask(limit: Limit, tick: int | None) -> bool:
    """Request a snapshot before `tick`, if that is before the end; whether it was requested."""
    if tick is None or tick >= limit.ticks:
        return False
    limit.ask(tick)
    return True


def _polls(
    handle: RunHandle, limit: Limit, callbacks: RunCallbacks, owner: SignalOwner
) -> Iterator[bool]:
    """Yield whether the run continues, until it ends or the stop timeout is over."""
    until = float("inf")
    while handle.alive(0.05):
        yield True
        if not limit.is_stopping and (owner.requested or callbacks.stops()):
            limit.stop()
            if owner.requested:
                callbacks.say(owner.message)
        if limit.is_stopping:
            until = min(until, time.monotonic() + STOP_TIMEOUT_S)
            if time.monotonic() >= until:
                return
    yield False


def _wait(handle: RunHandle, seconds: float) -> None:
    """Give workers time to end, ignoring their failures."""
    until = time.monotonic() + seconds
    with suppress(Failure, ShoalError):
        while time.monotonic() < until and handle.alive(0.05):
            deque(handle.ready(), maxlen=0)
