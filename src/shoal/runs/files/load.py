"""How a run's workers spend their time: counted by the runtime, kept in `load.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.runs.files.folder import Lines, as_json
from shoal.runtime.execution.worker_status import WorkerStatus
from shoal.runtime.logs import Log

LOAD_FILE = "load.jsonl"
FINENESS = 500  # rows are as far apart as this part of the run so far, and a second at least


def rounded(spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by activity, to a millisecond."""
    return {activity: round(seconds, 3) for activity, seconds in spent.items()}


class LoadLog:
    """Appends what every worker has spent its time on so far to a file, less and less often.

    Counts are totals, so that any two rows give the shares of the time between them.
    """

    def __init__(self, path: Path, say: Log) -> None:
        self._path, self._say = path, say
        self._lines: Lines | None = None
        self._first = self._last = 0.0
        self._row: dict[str, Any] = {}

    def add(self, at: float, seconds: float, statuses: Mapping[str, WorkerStatus]) -> None:
        """Add the counts of workers at a time; `seconds` is how long the run has taken."""
        if not statuses:
            return
        self._first = self._first or at
        workers = {name: {"tick": one.tick, **rounded(one.spent)} for name, one in statuses.items()}
        self._row = {"at": round(at, 3), "seconds": round(seconds, 3), "workers": workers}
        if at - self._last >= max(1.0, (at - self._first) / FINENESS):
            self._last = at
            self._write()

    def _write(self) -> None:
        with suppress(OSError):
            self._lines = self._lines or Lines(self._path, self._say)
            self._lines.add(as_json(self._row))

    def close(self) -> None:
        """Write the last counts and close the file."""
        if self._row and self._row["at"] > self._last:
            self._write()
        if self._lines is not None:
            self._lines.close()
