"""How often lost workers may restart, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.logs import Say

WINDOW_S = 300.0  # in which failures of a worker are counted


class WorkerFailure(NamedTuple):
    """A worker that was lost, and after how many seconds another had made a turn, if one has."""

    worker: str
    why: str
    lost: int  # messages that it had in flight, as far as is known
    seconds: float | None = None
    is_new: bool = True

    def __str__(self) -> str:
        some = f"{self.lost} {'turn' if self.lost == 1 else 'turns'} of its lost"
        after = "not back" if self.seconds is None else f"replaced after {self.seconds:.1f} s"
        return f"{self.why}; {after}; {some}"


@dataclass(frozen=True)
class RestartPolicy:
    """How often each worker may restart within five minutes, and what is called then.

    `tell` is called at each failure, and again when another worker has completed a tick in that
    place or the run is over; `say` with what else happens to replicas. `fresh` makes anew
    what could not be kept.
    """

    restarts: int = 0
    fresh: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    tell: Callable[[WorkerFailure], None] = lambda failure: None
    say: Say = lambda line: None


def recent(failures: Iterable[float], now: float) -> tuple[float, ...]:
    """The failures that count, with the one of this moment."""
    return (*(then for then in failures if now - then < WINDOW_S), now)
