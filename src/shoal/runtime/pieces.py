"""A run of several workers that meet at channels, on threads or in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shoal.planning.plan import Plan
from shoal.runtime.blame import Good, bad_metrics, not_finite
from shoal.runtime.channels import InProcessChannel, make_gate
from shoal.runtime.collect import Collector, Shown
from shoal.runtime.inline import run_inline
from shoal.runtime.limit import Limit
from shoal.runtime.lower import Lowering
from shoal.runtime.program import Program
from shoal.runtime.threads import Crossing, run_threads
from shoal.runtime.worker import Kept, Worker, make_crew


class Pieces:
    """All workers of a plan, their channels, and what they have shown."""

    def __init__(self, plan: Plan, programs: list[Program], values: Mapping[str, Any]) -> None:
        self._plan, self._values = plan, dict(values)
        lowerings = {p.fragment: Lowering(plan, p.fragment) for p in programs}
        channels = {c.name: InProcessChannel(plan, c, lowerings[c.reader]) for c in plan.channels}
        self.gates = {c.name: make_gate(plan, c) for c in plan.channels}
        self._collector = Collector(plan, programs)
        self.workers: list[Worker] = []
        for program in programs:
            crew = make_crew(plan, lowerings[program.fragment], program)
            for end in range(plan.endpoints(program.fragment)):
                self.workers.append(Worker(crew, end, values, channels, self._collector.add))
        for channel in plan.channels:
            for worker in self._of(channel.writer):
                if channel.flow.lag:
                    worker.prime(channel.name, channel.flow.lag)

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks that have arrived; raises at the first that isn't finite."""
        for tick, shown in self._collector.ready():
            if bad := bad_metrics(shown):
                raise not_finite(self._plan, self._good(tick), tick, bad)
            yield tick, shown

    def final(self) -> tuple[dict[str, Any], int]:
        """The carried state, joined from all workers, and the ticks they have done.

        If workers were stopped in the middle of a tick, it is the last state they all kept.
        """
        ticks = {w.tick for w in self.workers}
        if len(ticks) == 1 and not any(w.broken for w in self.workers):
            ends = {w.replica: w.carried for w in self.workers}
            return self._values | self._join(ends), ticks.pop()
        good = self._good(min(ticks))
        return dict(good.values), good.tick

    def _of(self, fragment: str) -> list[Worker]:
        return [w for w in self.workers if w.replica[0] == fragment]

    def _good(self, tick: int) -> Good:
        """The newest state that all workers kept at or before `tick`."""
        kept = {w.replica: {k.tick: k for k in list(w.kept)} for w in self.workers}
        common = set.intersection(*(set(k) for k in kept.values())) if kept else set()
        usable = [t for t in common if t <= tick]
        if not usable:
            return Good(0, self._values)
        chosen = {replica: k[max(usable)] for replica, k in kept.items()}
        values = self._join({replica: k.carried for replica, k in chosen.items()})
        return Good(max(usable), self._values | values, self._past(chosen))

    def _past(self, kept: dict[tuple[str, int], Kept]) -> dict[str, Any]:
        """Older versions of lagged values, as the delayed reference names them."""
        past: dict[str, Any] = {}
        for channel in self._plan.channels:
            ends = [
                k.sent[channel.name]
                for r, k in sorted(kept.items())
                if r[0] == channel.writer and channel.flow.lag
            ]
            for age in range(channel.flow.lag):
                for value in channel.values:
                    rows = [messages[age][value] for messages in ends]
                    past[f"{channel.reader}:{value}@{age + 1}"] = self._whole(value, rows)
        return past

    def _join(self, ends: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
        """Carried values by name, whole again."""
        joined = {}
        for name, after in self._plan.graph.carry:
            if name != after:
                owner = min(self._plan.sites.holders(after, self._plan.homes))
                rows = [held[name] for replica, held in sorted(ends.items()) if replica[0] == owner]
                joined[name] = self._whole(name, rows)
        return joined

    def _whole(self, name: str, rows: list[Any]) -> Any:
        """A value from its owner's ends, on one device, where it meets all the others."""
        axis = self._plan.graph.values[name].axis
        parts = [jax.device_put(x, jax.devices()[0]) for x in rows]
        return parts[0] if axis is None or len(parts) == 1 else jnp.concatenate(parts, axis)


class Inline:
    """The inline backend's way with pieces: all happens on the caller's thread, when waited for."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self._limit = pieces, Limit(0)
        self.ready, self.final = pieces.ready, pieces.final

    def start(self, limit: Limit) -> None:
        """Remember how far to go."""
        self._limit = limit

    def alive(self, seconds: float) -> bool:
        """Do all the work."""
        run_inline(self._pieces.workers, self._pieces.gates, self._limit)
        return False


class Threaded:
    """The threads backend's way with pieces."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._crossing: Crossing | None = None
        self._threads: list[threading.Thread] = []
        self.ready, self.final = pieces.ready, pieces.final

    def start(self, limit: Limit) -> None:
        """Begin; returns at once."""
        self._crossing, self._threads = run_threads(self._pieces.workers, self._pieces.gates, limit)

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; raises a worker's failure once all have stopped."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(t.is_alive() for t in self._threads):
            return True
        if self._crossing and self._crossing.failure:
            raise self._crossing.failure
        return False
