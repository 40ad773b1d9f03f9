"""Rolls a run back to its newest snapshot after a failure, and resumes on the hosts left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.errors import LostError, PlaceError, ShoalError
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.logs import Log
from shoal.runtime.restart_policy import RestartPolicy, WorkerFailure, recent
from shoal.runtime.run import (
    BACKENDS,
    Result,
    RunCallbacks,
    Watch,
    as_snapshot,
    check_backend,
    load_ray,
    run,
)
from shoal.signals import requested

CLUSTER_TIMEOUT_S = 120.0  # for a cluster to have enough hosts again


@dataclass(frozen=True)
class RecoveryPolicy:
    """How a run recovers: how often within five minutes it may roll back.

    A snapshot is kept in memory every `every` seconds, unless the caller already requests them.
    `on_failure(error, tick)` is called at each failure, with the tick that the run resumes from.
    `fresh` recreates what a snapshot can't hold. A worker that can restart while the others
    continue does, up to `replaces` times within five minutes (None: `restarts`), and then
    `replaced` is called.
    """

    restarts: int = 3
    every: float = 10.0
    on_failure: Callable[[LostError, int], None] = lambda error, tick: None
    fresh: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    replaced: Callable[[WorkerFailure], None] = lambda loss: None
    replaces: int | None = None
    say: Log = lambda line: None  # reports events of replicas

    def run(
        self,
        plan: Plan,
        backend: str = "processes",
        *,
        ticks: int,
        state: Any = None,
        watch: Watch | RunCallbacks | None = None,
    ) -> Result:
        """Run `plan` as `shoal.run` does, and roll back to the newest state after a failure.

        Ticks that run again are not shown again.
        """
        check_backend(backend)
        watching = (
            watch if isinstance(watch, RunCallbacks) else RunCallbacks(watch or (lambda *_: None))
        )
        times = self.restarts if self.replaces is None else self.replaces
        restart_policy = RestartPolicy(times, self.fresh, self.replaced, self.say)
        watching = replace(watching, say=self.say, restart_policy=restart_policy)
        if not self.restarts:
            return run(plan, backend, ticks=ticks, state=state, watch=watching)
        start = as_snapshot(plan.graph, state)
        memory = _Memory(watching, start, self.every)
        failures: tuple[float, ...] = ()
        lost: LostError | None = None
        while True:
            try:
                return run(plan, backend, ticks=ticks, state=start, watch=memory.watching)
            except LostError as error:
                failures = recent(failures, time.monotonic())
                if len(failures) > self.restarts:
                    raise
                memory.kept = start = self.fresh(memory.newest(getattr(error, "snapshot", None)))
                self.on_failure(error, start.tick)
                lost = error
            except PlaceError as error:
                # For a while a cluster lists lost hosts, and omits hosts that return.
                _check_timeout(failures, lost, error)
            if lost is not None:
                plan = _redrawn(plan, backend, lost, failures)


@dataclass
class _Memory:
    """The state of a run that survives a rollback: the ticks seen and the newest snapshot."""

    inner: RunCallbacks
    kept: Snapshot
    every: float
    seen: int = 0
    since: float = field(default_factory=time.monotonic)

    @property
    def watching(self) -> RunCallbacks:
        return replace(self.inner, see=self._see, due=self._due, keep=self._keep)

    def newest(self, other: Snapshot | None) -> Snapshot:
        """The newer of the snapshot kept here and that of the failed run."""
        return other if other is not None and other.tick > self.kept.tick else self.kept

    def _see(self, tick: int, metrics: Mapping[str, Any]) -> None:
        if tick >= self.seen:
            self.seen = tick + 1
            self.inner.see(tick, dict(metrics))

    def _due(self, tick: int) -> int | None:
        due = self.inner.due(tick)
        if due is None and time.monotonic() - self.since >= self.every:
            return tick + 1
        return due

    def _keep(self, snapshot: Snapshot) -> None:
        self.since = time.monotonic()
        if snapshot.tick > self.kept.tick:
            self.kept = snapshot
            self.inner.keep(snapshot)


def _check_timeout(failures: Sequence[float], lost: LostError | None, error: ShoalError) -> None:
    """Raise if the cluster is still too small long after the last failure, or never had one."""
    if lost is None:
        raise error
    if time.monotonic() - failures[-1] > CLUSTER_TIMEOUT_S:
        lost.add_note(f"What is left is too little: {error}")
        raise lost from error


def _redrawn(plan: Plan, backend: str, lost: LostError, failures: Sequence[float]) -> Plan:
    """The plan on the hosts that are left; waits a while for enough of them."""
    find_cluster = BACKENDS[backend].find_cluster
    while find_cluster is not None and not requested():
        try:
            cluster = find_cluster("")
            drawn = make_plan(plan.graph, plan.distribution, cluster)
            load_ray().check_fits(drawn)
            return drawn
        except (PlaceError, LostError) as error:
            _check_timeout(failures, lost, error)
            time.sleep(1.0)
    return plan
