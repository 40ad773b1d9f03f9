"""Metrics on their way out: gathered from all ends of a tick, to NumPy off the loop's path."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shoal.planning.plan import Plan
from shoal.runtime.fire import Replica
from shoal.runtime.program import Program

Shown = dict[str, np.ndarray]


class Collector:
    """Takes each end's metrics of each tick; gives them back by whole ticks, in order."""

    def __init__(self, plan: Plan, programs: list[Program]) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Replica, dict[str, Any]]] = queue.SimpleQueue()
        self._ends = {p.fragment: plan.endpoints(p.fragment) for p in programs if p.metrics}
        self._axis = {m.outer: plan.graph.values[m.inner].axis for m in plan.graph.metrics}
        self._parts: dict[int, dict[Replica, dict[str, Any]]] = {}
        self._next = 0

    def add(self, tick: int, replica: Replica, metrics: dict[str, Any]) -> None:
        """Take metrics as they lie on the device; never waits for them."""
        if replica[0] not in self._ends:
            return
        for x in metrics.values():
            if isinstance(x, jax.Array):
                x.copy_to_host_async()
        self._queue.put((tick, replica, metrics))

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Ticks whose metrics have all come in, in order."""
        while not self._queue.empty():
            tick, replica, metrics = self._queue.get()
            self._parts.setdefault(tick, {})[replica] = metrics
        while len(self._parts.get(self._next, ())) == sum(self._ends.values()) > 0:
            yield self._next, self._joined(self._parts.pop(self._next))
            self._next += 1

    def _joined(self, parts: dict[Replica, dict[str, Any]]) -> Shown:
        shown: dict[str, list[np.ndarray]] = {}
        for replica in sorted(parts):
            for name, x in parts[replica].items():
                shown.setdefault(name, []).append(np.asarray(x))
        return {name: self._join(name, xs) for name, xs in shown.items()}

    def _join(self, name: str, xs: list[np.ndarray]) -> np.ndarray:
        axis = self._axis[name]
        return xs[0] if axis is None or len(xs) == 1 else np.concatenate(xs, axis)
