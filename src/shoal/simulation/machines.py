"""The machines of a simulation: cores that share their work, and accelerators that queue it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

Done = Callable[[], None]


class Server(Protocol):
    """Something that does work in its time."""

    def add(self, seconds: float, demand: float, done: Done) -> None:
        """Begin some work, or queue it; calls `done` at its end."""
        ...


class Clock:
    """Virtual time: events in order, and servers that plan their next one when all else is done."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, 0
        self._heap: list[tuple[float, int, Done]] = []
        self._number = count()
        self._unplanned: dict[SharedCores, None] = {}

    def at(self, time: float, do: Done) -> None:
        """Do something at a time that isn't past."""
        heapq.heappush(self._heap, (time, next(self._number), do))

    def plan(self, server: SharedCores) -> None:
        """Let a server plan its next event before time moves."""
        self._unplanned[server] = None

    def run(self, until: Callable[[], bool]) -> None:
        """Run events until `until`, or none is left."""
        while not until():
            while self._unplanned:
                server, _ = self._unplanned.popitem()
                server.plan()
            if not self._heap:
                return
            self.now, _, do = heapq.heappop(self._heap)
            self.events += 1
            do()


@dataclass(eq=False)
class SharedCores:
    """Cores among which work is shared equally: all of it slows down alike where there is more.

    `_progress` is the seconds of work that each job has been given since the start.
    """

    clock: Clock
    cores: float
    _progress: float = 0.0
    _seen: float = 0.0
    _demand: float = 0.0
    _jobs: list[tuple[float, int, float, Done]] = field(default_factory=list)
    _number: int = 0
    _planned: int = 0

    def add(self, seconds: float, demand: float, done: Done) -> None:
        """Begin some work that keeps `demand` cores busy for `seconds`, if it gets them."""
        self._advance()
        self._number += 1
        heapq.heappush(self._jobs, (self._progress + seconds, self._number, demand, done))
        self._demand += demand
        self.clock.plan(self)

    @property
    def _rate(self) -> float:
        return min(1.0, self.cores / self._demand) if self._demand > 0 else 1.0

    def _advance(self) -> None:
        self._progress += (self.clock.now - self._seen) * self._rate
        self._seen = self.clock.now

    def plan(self) -> None:
        """Plan the end of the job that ends first; what was planned before is void."""
        self._advance()
        self._planned += 1
        if self._jobs:
            number, left = self._planned, max(0.0, self._jobs[0][0] - self._progress)
            self.clock.at(self.clock.now + left / self._rate, lambda: self._ended(number))

    def _ended(self, number: int) -> None:
        if number != self._planned:
            return
        self._advance()
        first = self._jobs[0][0]
        self._progress = max(self._progress, first)  # rounding leaves a little
        while self._jobs and self._jobs[0][0] <= first:
            _, _, demand, done = heapq.heappop(self._jobs)
            self._demand -= demand
            done()
        if not self._jobs:
            self._demand = 0.0
        self.clock.plan(self)


@dataclass(eq=False)
class Accelerator:
    """A device that does one thing after the other."""

    clock: Clock
    _free: float = 0.0

    def add(self, seconds: float, demand: float, done: Done) -> None:
        """Queue some work."""
        self._free = max(self._free, self.clock.now) + seconds
        self.clock.at(self._free, done)
