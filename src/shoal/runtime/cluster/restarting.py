"""Ends and restarts restart groups, as the supervisor decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shoal.planning.plan import Plan, WorkerId
from shoal.planning.restart_groups import Kept, groups, newest_together, worker_groups
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.cluster.host_agent import Left, Shares
from shoal.runtime.cluster.hosts import WorkerHosts
from shoal.runtime.cluster.kept_state import KeptState
from shoal.runtime.cluster.launching import name_of
from shoal.runtime.cluster.supervisor import Group, ReportFailure, Workers
from shoal.runtime.cluster.worker_config import ProcessSpec, Restart
from shoal.runtime.execution.compiled_executor import raw
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.restart_policy import RestartPolicy, WorkerFailure


def make_workers(
    plan: Plan, worker_ids: Sequence[tuple[WorkerId, ...]], channels: ChannelLayouts, restarts: int
) -> Workers:
    """The static facts of a plan's workers; those that aren't in `channels` cross hosts."""
    found = worker_groups(plan, worker_ids)

    def is_restartable(group: Group) -> bool:
        fragments = {f for n in group for f, _ in worker_ids[n]}
        own = [c for c in plan.channels if {c.writer, c.reader} & fragments]
        far = [c for c in own if c.name not in channels.layouts]
        others = [c for c in far if plan.in_step(c.writer) != plan.in_step(c.reader)]
        free = plan.replaceable
        return fragments <= free and not any({c.writer, c.reader} <= free for c in others)

    return Workers(
        tuple(map(name_of, worker_ids)),
        tuple(held[0][0] for held in worker_ids),
        found,
        frozenset(n for n, group in enumerate(found) if is_restartable(group)),
        frozenset(
            n
            for n, held in enumerate(worker_ids)
            if any(f not in plan.asynchronous for f, _ in held)
        ),
        {f.name: (f.least, f.most) for f in plan.distribution.elastic},
        restarts,
    )


def starting_workers(plan: Plan, worker_ids: Sequence[tuple[WorkerId, ...]]) -> frozenset[int]:
    """The workers that a run starts with."""
    first = {f: plan.starting(f) for f in plan.places}
    return frozenset(n for n, held in enumerate(worker_ids) if held[0][1] < first[held[0][0]])


class GroupRestarter:
    """Ends and starts restart groups of one run."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        channels: ChannelLayouts,
        kept: KeptState,
        hosts: WorkerHosts,
        restart_policy: RestartPolicy,
    ) -> None:
        self._specs, self._channels, self._kept = specs, channels, kept
        self._plan, self._layout = kept.plan, kept.layout
        self._hosts, self._restart_policy = hosts, restart_policy
        self._left: dict[Group, Left] = {}
        self._fresh: dict[Group, Future[Shares]] = {}
        self._pool = ThreadPoolExecutor(1)  # recreating environments may take time

    def end(self, group: Group, incarnation: int) -> None:
        """End the workers of a group, and start to prepare its restart state."""
        left = self.release(group, "lost, and being replaced")
        self._left[group] = left
        self._fresh[group] = self._pool.submit(self._fresh_state, left, incarnation)

    def release(self, group: Group, note: str = "") -> Left:
        """End a group and drop its in-flight messages; the newest state that all of it kept."""
        held = {end for n in group for end in self._specs[n].replicas}
        together = [some for some in groups(self._plan) if held.issuperset(some)]
        kept: Kept = {}
        for n in group:
            spec, ended = self._specs[n], self._hosts.of
            for slot, ticks in ended(n, lambda host, spec=spec: host.end(spec, note)).items():
                kept[slot] = kept.get(slot, {}) | ticks
        for n in group:
            clear = together, self._channels
            self._hosts.of(n, lambda host, clear=clear: host.drop_in_flight(*clear))
        newest = newest_together(kept, together)
        every = [
            self._hosts.of(n, lambda host, spec=self._specs[n]: host.left(spec, newest))
            for n in group
        ]
        ticks = {end: tick for left in every for end, tick in left.ticks.items()}
        shares = {of: x for left in every for of, x in left.shares.items()}
        return Left(ticks, shares)

    def ready(self) -> Iterator[Group]:
        """Groups that can be started."""
        for group, fresh in list(self._fresh.items()):
            if fresh.done():
                yield group

    def start(self, group: Group, incarnation: int) -> None:
        """Start the workers of a group from the state they kept, or from a fresh one."""
        left = self._left.pop(group)
        shares = left.shares | self._fresh.pop(group).result()
        fragments = {f for n in group for f, _ in self._specs[n].worker_ids}
        own = [c for c in self._plan.channels if {c.writer, c.reader} <= fragments]
        apart = any(c.name not in self._channels.layouts for c in own)
        addresses = {
            n: self._hosts.of(n, lambda host, n=n: host.listen_for(n)) for n in group if apart
        }
        for n in group:
            spec = self._specs[n]
            mine = {(end, name): x for (end, name), x in shares.items() if end in spec.replicas}
            ticks = {end: tick for end, tick in left.ticks.items() if end in spec.replicas}
            given = spec, mine, Restart(incarnation, ticks, 0, addresses)
            self._hosts.of(n, lambda host, given=given: host.replace(*given))

    def _fresh_state(self, left: Left, incarnation: int) -> Shares:
        """Fresh values for what can't be kept, different for each incarnation."""
        if not any(stage.host for stage in self._plan.graph.stages):
            return {}
        given = {name: self._kept.given(name) for name in self._plan.graph.inputs}
        tick = max(left.ticks.values(), default=self._kept.start.tick) + incarnation
        fresh = self._restart_policy.fresh(Snapshot(tick, given)).values
        return {
            (end, name): raw(fresh[name])[self._layout.span(end, self._layout.cells[name])]
            for end in left.ticks
            for name in self._layout.endpoints[end].carried
            if name in fresh and fresh[name] is not given[name]
        }

    def report(self, failure: ReportFailure) -> None:
        """Report a failure."""
        exit = failure.exit
        found = WorkerFailure(exit.worker, exit.what, failure.seconds, failure.is_new)
        self._restart_policy.on_failure(found)

    def close(self) -> None:
        """Stop preparing restarts."""
        self._pool.shutdown(cancel_futures=True)
