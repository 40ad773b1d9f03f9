"""The threads backend: a thread for each team, each sleeping by a bell of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.replica_runner import Failure
from shoal.runtime.execution.scheduler import Scheduler, Stopped


class ThreadWaker:
    """Wakes a thread; after `halt` nobody sleeps any more."""

    def __init__(self, halt: threading.Event) -> None:
        self._event, self._halt = threading.Event(), halt

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when rung, when `ready`, or after so many seconds; raise if all is to stop."""
        self._event.clear()
        if not self._halt.is_set() and not ready():
            self._event.wait(seconds)
        if self._halt.is_set():
            raise Stopped

    def notify(self) -> None:
        """Wake who waits."""
        self._event.set()


class Threads:
    """Teams on threads: the first failure stops all."""

    def __init__(
        self, teams: Sequence[Scheduler], bells: Sequence[ThreadWaker], halt: threading.Event
    ) -> None:
        self._teams, self._bells, self._halt = teams, bells, halt
        self.failure: Failure | None = None
        self.threads: list[threading.Thread] = []

    def start(self, limit: Limit) -> None:
        """Start a thread for each team."""
        self.threads = [
            threading.Thread(target=self._work, args=(team, limit), name=team.name, daemon=True)
            for team in self._teams
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, team: Scheduler, limit: Limit) -> None:
        try:
            team.turn(limit)
        except Stopped:
            return
        except Failure as failure:
            self.stop(failure)
        except BaseException as error:
            self.stop(Failure((team.name, 0), 0, error))

    def stop(self, failure: Failure | None = None) -> None:
        """Let nobody sleep any more; the first failure is kept."""
        self.failure = self.failure or failure
        self._halt.set()
        for bell in self._bells:
            bell.notify()

    def alive(self) -> bool:
        """Whether any team that counts ticks is still turning; if none, free ones stop too."""
        counted = [t for t, team in zip(self.threads, self._teams, strict=True) if not team.is_free]
        if not any(t.is_alive() for t in counted):
            self.stop()
        return any(t.is_alive() for t in self.threads)
