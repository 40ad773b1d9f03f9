"""How many ticks a run makes, how it ends early, and when all its ends are to be looked at."""

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
        """How many of `count` ticks from `tick` on a worker may do; it has started them then.

        It may not go past a tick that a snapshot is wanted of, without looking again.
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
        """Want a snapshot before `tick`, or before the first later one that hasn't been started."""
        with self._lock:
            self.asked = Asked(self.asked.number + 1, max(tick, self._started))

    def stop(self) -> None:
        """Let no worker start a tick that no other has started."""
        with self._lock:
            self.is_stopping = True
            self._ticks = min(self._ticks, self._started)
