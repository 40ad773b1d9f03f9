"""How often lost workers may restart, and the report of a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.logs import Log

WINDOW_S = 300.0  # in which failures of a worker are counted


class WorkerFailure(NamedTuple):
    """A lost worker, and the seconds until its replacement completed a tick, if it has."""

    worker: str
    why: str
    seconds: float | None = None
    is_new: bool = True

    def __str__(self) -> str:
        after = "not replaced" if self.seconds is None else f"replaced after {self.seconds:.1f} s"
        return f"{self.why}; {after}"


@dataclass(frozen=True)
class RestartPolicy:
    """How often each worker may restart within five minutes, and the callbacks.

    `on_failure` is called at each failure, and again when the replacement has completed a tick or
    the run is over. `say` reports other events of replicas. `fresh` recreates what could not be
    kept.
    """

    restarts: int = 0
    fresh: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    on_failure: Callable[[WorkerFailure], None] = lambda failure: None
    say: Log = lambda line: None


def recent(failures: Iterable[float], now: float) -> tuple[float, ...]:
    """The failures within the window, and the current one."""
    return (*(then for then in failures if now - then < WINDOW_S), now)
