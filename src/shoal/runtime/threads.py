"""The threads backend: a thread for each worker, and the firing machine behind one lock."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from shoal.errors import RunError
from shoal.runtime.fire import Did, Ended, Event, Fire, Gate, Replica, State, Stuck, Wants, on_event
from shoal.runtime.limit import Limit
from shoal.runtime.worker import Failure, Worker


class Stopped(Exception):
    """Raised in workers that wait when the run stops."""


class Crossing:
    """The firing machine, shared by threads: each waits here until its move is allowed."""

    def __init__(self, gates: dict[str, Gate], replicas: Iterable[Replica]) -> None:
        self._lock = threading.Lock()
        replicas = list(replicas)
        self._state = State(gates, frozenset(replicas))
        self._leave = {r: threading.Semaphore(0) for r in replicas}
        self._stopped = False
        self.failure: Failure | None = None

    def tell(self, event: Event) -> None:
        """Report an event; returns once the reporting replica may go on."""
        with self._lock:
            self._state, actions = on_event(self._state, event)
            for action in actions:
                self._carry_out(action)
        if isinstance(event, Wants):
            self._leave[event.replica].acquire()
        if self._stopped:
            raise Stopped

    def _carry_out(self, action: Fire | Stuck) -> None:
        match action:
            case Fire(replica):
                self._leave[replica].release()
            case Stuck(waits):
                error = RunError(
                    "the plan is stuck: " + "; ".join(waits), "This is a fault of Shoal's planner."
                )
                self._stop(Failure(("plan", 0), 0, error))

    def stop(self, failure: Failure | None = None) -> None:
        """Let nobody move any more; the first failure is kept."""
        with self._lock:
            self._stop(failure)

    def _stop(self, failure: Failure | None) -> None:
        self.failure = self.failure or failure
        self._stopped = True
        for leave in self._leave.values():
            leave.release()


def run_threads(
    workers: Iterable[Worker], gates: dict[str, Gate], limit: Limit
) -> tuple[Crossing, list[threading.Thread]]:
    """Start a thread for each worker; the caller joins them, and reads the crossing's failure."""
    workers = list(workers)
    crossing = Crossing(gates, [w.replica for w in workers])

    def work(worker: Worker) -> None:
        try:
            for event in worker.ticks(limit):
                crossing.tell(event)
                assert isinstance(event, Wants | Did)
            crossing.tell(Ended(worker.replica))
        except Stopped:
            return
        except BaseException as error:
            crossing.stop(Failure(worker.replica, worker.tick, error))

    threads = [
        threading.Thread(
            target=work, args=(w,), name=f"{w.replica[0]}[{w.replica[1]}]", daemon=True
        )
        for w in workers
    ]
    for thread in threads:
        thread.start()
    return crossing, threads
