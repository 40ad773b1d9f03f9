"""How the workers of a run are: written to its folder as it goes on, and read by anybody."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.checkpoints import ticks_in
from shoal.disk import free, megabytes, size_of, unless_full
from shoal.errors import SettingError
from shoal.records import write_json
from shoal.runtime.run import Standing

FILE = "status.json"
EVERY = 1.0  # seconds
TOLD = ("ticks", "restarts", "replaced", "lost_turns")  # of a run's summary, while it goes on


class Status:
    """Keeps a run's status.json up to date, and takes it away at the end."""

    def __init__(self, folder: Path, summary: Mapping[str, Any]) -> None:
        self._file, self._last, self._summary = folder / FILE, 0.0, summary

    def stand(self, standing: Standing) -> None:
        """Write how workers are, if it is time."""
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            workers = {name: {"tick": t, "waits": why} for name, (t, why) in standing().items()}
            told = {name: self._summary[name] for name in TOLD if name in self._summary}
            told |= {"driver": os.getpid(), "at": time.time(), "workers": workers}
            with unless_full():
                write_json(self._file, told)

    def close(self) -> None:
        """The run has ended: nobody is any way any more."""
        self._file.unlink(missing_ok=True)


def read_status(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A run's summary, and how its workers are, if they have told."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(
            f"there is no run in {folder}", "Name the folder of a run, or its name in runs/."
        ) from error
    try:
        return summary, json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return summary, None


def _losses(summary: Mapping[str, Any]) -> str:
    """What was lost so far, if anything was."""
    names = {"restarts": "gone back", "replaced": "replaced", "lost_turns": "turns lost"}
    return "".join(f", {summary[n]} {what}" for n, what in names.items() if summary.get(n))


def shown(folder: Path) -> tuple[str, Table | None]:
    """A run's status in a line, and its workers as a table."""
    summary, status = read_status(folder)
    summary |= {name: status[name] for name in TOLD if name in status} if status else {}
    told = f"{folder}: {summary['status']}, tick {summary['ticks']:,}"
    told += _losses(summary) + _saved(folder)
    if status is None:
        return told, None
    ago = time.time() - status["at"]
    told += f"; heard {ago:.0f} s ago"
    if ago > 10 * EVERY:
        told += " (its driver has stopped, or waits itself)"
    table = Table("worker", "tick", "waits for")
    for name, one in status["workers"].items():
        table.add_row(name, f"{one['tick']:,}", one["waits"] or "-")
    return told, table


def _saved(folder: Path) -> str:
    """What of a run is on the disk, and whether there is room for more."""
    there = ticks_in(folder / "checkpoints")
    if not there:
        return ""
    told = f"; newest checkpoint of tick {there[-1]:,}"
    needed, room = size_of(folder / "checkpoints" / str(there[-1])), free(folder)
    if needed > room:
        told += f", no room for another ({megabytes(needed)} needed, {megabytes(room)} free)"
    return told
