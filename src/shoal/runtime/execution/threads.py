"""The threads backend: one thread and one waker for each scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.replica_runner import Failure
from shoal.runtime.execution.scheduler import Scheduler, Stopped


class ThreadWaker:
    """Wakes a thread; once `halt` is set, no thread sleeps."""

    def __init__(self, halt: threading.Event) -> None:
        self._event, self._halt = threading.Event(), halt

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when notified, when `ready`, or after `seconds`; raise if the run stops."""
        self._event.clear()
        if not self._halt.is_set() and not ready():
            self._event.wait(seconds)
        if self._halt.is_set():
            raise Stopped

    def notify(self) -> None:
        """Wake the thread."""
        self._event.set()


class Threads:
    """Schedulers on threads: the first failure stops all."""

    def __init__(
        self, schedulers: Sequence[Scheduler], wakers: Sequence[ThreadWaker], halt: threading.Event
    ) -> None:
        self._schedulers, self._wakers, self._halt = schedulers, wakers, halt
        self.failure: Failure | None = None
        self.threads: list[threading.Thread] = []

    def start(self, limit: Limit) -> None:
        """Start a thread for each scheduler."""
        self.threads = [
            threading.Thread(target=self._work, args=(one, limit), name=one.name, daemon=True)
            for one in self._schedulers
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, scheduler: Scheduler, limit: Limit) -> None:
        try:
            scheduler.turn(limit)
        except Stopped:
            return
        except Failure as failure:
            self.stop(failure)
        except BaseException as error:
            self.stop(Failure((scheduler.name, 0), 0, error))

    def stop(self, failure: Failure | None = None) -> None:
        """Stop all threads; the first failure is kept."""
        self.failure = self.failure or failure
        self._halt.set()
        for waker in self._wakers:
            waker.notify()

    def alive(self) -> bool:
        """Whether any synchronous scheduler still runs; if none, the asynchronous ones stop."""
        counted = [
            t
            for t, one in zip(self.threads, self._schedulers, strict=True)
            if not one.is_asynchronous
        ]
        if not any(t.is_alive() for t in counted):
            self.stop()
        return any(t.is_alive() for t in self.threads)
