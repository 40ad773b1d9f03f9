"""The limit of a run: its number of ticks, its early stop, and its snapshot requests."""

from __future__ import annotations

import threading

from shoal.runtime.execution.snapshot import Asked


class Limit:
    """The tick to stop before, and the one to take a snapshot before; shared by all workers."""

    def __init__(self, ticks: int, first: int = 0) -> None:
        self._ticks, self._started = ticks, first
        self.is_stopping = False
        self.asked = Asked()
        self._lock = threading.Lock()

    @property
    def ticks(self) -> int:
        """The tick to stop before."""
        return self._ticks

    def may_start(self, tick: int, count: int = 1) -> int:
        """The number of ticks, at most `count` from `tick`, that a worker may start; marks them so.

        A worker has to ask again at a tick for which a snapshot is requested.
        """
        with self._lock:
            until = self.asked.tick if tick < self.asked.tick else self._ticks
            allowed = max(0, min(count, min(until, self._ticks) - tick))
            self._started = max(self._started, tick + allowed)
            return allowed

    def may_turn(self) -> bool:
        """Whether an asynchronous endpoint may begin another turn."""
        return True

    def ask(self, tick: int) -> None:
        """Request a snapshot before `tick`, or before the first later one that hasn't started."""
        with self._lock:
            self.asked = Asked(self.asked.number + 1, max(tick, self._started))

    def stop(self) -> None:
        """Stop the run: no worker starts a tick that no other has started."""
        with self._lock:
            self.is_stopping = True
            self._ticks = min(self._ticks, self._started)
