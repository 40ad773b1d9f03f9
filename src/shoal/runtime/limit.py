"""How many ticks a run makes, and how it ends early: all workers stop after the same tick."""

from __future__ import annotations

import threading


class Limit:
    """The tick to stop before; shared by all workers of a run."""

    def __init__(self, ticks: int) -> None:
        self._ticks, self._started = ticks, 0
        self.is_stopping = False
        self._lock = threading.Lock()

    @property
    def ticks(self) -> int:
        """The tick to stop before."""
        return self._ticks

    def may_start(self, tick: int, count: int = 1) -> int:
        """How many of `count` ticks from `tick` on a worker may do; it has started them then."""
        with self._lock:
            allowed = max(0, min(count, self._ticks - tick))
            self._started = max(self._started, tick + allowed)
            return allowed

    def stop(self) -> None:
        """Let nobody start a tick that no other worker has started."""
        with self._lock:
            self.is_stopping = True
            self._ticks = min(self._ticks, self._started)
