"""Assembles snapshots from the states that workers keep on all hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shoal.planning.plan import Plan, Replica
from shoal.planning.restart_groups import Kept, groups, newest_together
from shoal.runtime.cluster.control_layout import FINAL, KEPT_SLOTS, SNAP, ControlLayout
from shoal.runtime.cluster.host_agent import HostAgent
from shoal.runtime.cluster.hosts import WorkerHosts
from shoal.runtime.execution.compiled_executor import raw, wrapped
from shoal.runtime.execution.snapshot import Snapshot, check_complete


class KeptState:
    """The states that the endpoints of a run have kept in the slots of their control blocks."""

    def __init__(
        self, plan: Plan, layout: ControlLayout, start: Snapshot, hosts: WorkerHosts
    ) -> None:
        self.plan, self.layout, self.start, self._hosts = plan, layout, start, hosts
        self._counted = [r for r in layout.endpoints if r[0] not in plan.asynchronous]

    def snapshot(self, awaited: set[Replica]) -> Iterator[Snapshot]:
        """The requested snapshot, once these endpoints have written their part."""
        ticks = self._ticks()[SNAP]
        if all(ticks[end] >= 0 for end in awaited):
            yield self._whole(self._slots(SNAP), ticks[self._counted[0]])

    def final(self) -> Snapshot:
        """The state that all endpoints reached together, or the newest that they all kept."""
        ended = self._ticks()[FINAL]
        counted = {ended[r] for r in self._counted}
        if len(counted) == 1 and min(counted) >= 0:
            return self._whole(self._slots(FINAL), counted.pop())
        good = self.good(min((t for t in counted if t >= 0), default=2**62))
        return check_complete(good, self.plan.graph.inputs)

    def good(self, tick: int) -> Snapshot:
        """The newest state that all endpoints kept at or before `tick`."""
        kept = self._ticks()
        ticks = [{kept[slot][r] for r in self._counted} for slot in range(KEPT_SLOTS)]
        usable = {t.copy().pop(): b for b, t in enumerate(ticks) if len(t) == 1 and max(t) >= 0}
        usable = {t: slot for t, slot in usable.items() if t <= tick}
        if not usable:
            return self.start
        best = max(usable)
        return self._whole(self._slots(usable[best]), best)

    def given(self, name: str) -> Any:
        """A value at the start, or zeros of its shape."""
        given = {**self.start.past, **self.start.values}
        cell = self.layout.cells[name]
        return given[name] if name in given else np.zeros(cell.rows(self.layout.rows), cell.dtype)

    def _ticks(self) -> Kept:
        """The tick of each endpoint in each slot, over all hosts."""
        found: Kept = {slot: dict.fromkeys(self.layout.endpoints, -1) for slot in range(SNAP + 1)}
        for kept in self._hosts.each(HostAgent.kept):
            for slot, ticks in kept.items():
                found[slot] |= ticks
        return found

    def _slots(self, slot: int) -> dict[Replica, int]:
        """The slot to read for each endpoint; asynchronous ones may need their newest instead.

        Endpoints in lockstep must have kept it before the same tick. A replica that has left has
        kept its last state.
        """
        kept, together = self._ticks(), groups(self.plan)
        newest = newest_together({b: kept[b] for b in range(FINAL + 1)}, together)
        mine = newest_together({slot: kept[slot]} if slot >= FINAL else {}, together)
        return newest | mine | dict.fromkeys(self._counted, slot)

    def _whole(self, slots: Mapping[Replica, int], tick: int) -> Snapshot:
        """The snapshot of all shares; a value that no endpoint kept is taken from the start."""
        cells, inputs = self.layout.cells, self.plan.graph.inputs
        found = {name: raw(self.given(name)) for name in cells}
        for shares in self._hosts.each(lambda host: host.shares(slots)):
            for (replica, name), x in shares.items():
                found[name][self.layout.span(replica, cells[name])] = x
        as_jax = {
            name: wrapped(jax.numpy.asarray(x)) if cells[name].is_key else jax.numpy.asarray(x)
            for name, x in found.items()
        }
        past = {name: x for name, x in as_jax.items() if name not in inputs}
        values = {name: as_jax[name] for name in inputs}
        return Snapshot(tick, values, past)
