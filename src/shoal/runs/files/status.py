"""The status of a run's workers: written to its folder while it runs, for `shoal status`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from shoal.errors import SettingError, printable
from shoal.runs.files.checkpoints import ticks_in
from shoal.runs.files.disk import free, megabytes, size_of
from shoal.runs.files.folder import StatusFile, SummaryFile, is_locked, read_run, write_json
from shoal.runs.files.load import LOAD_FILE, LoadLog, rounded
from shoal.runtime.logs import Log
from shoal.runtime.run import BACKENDS, Statuses
from shoal.shapes import Index, ShapeError, read_json, why_unreadable

Lags = Callable[[], Mapping[str, Any]]
FILE, WANTED = "status.json", "scale.json"
EVERY = 1.0  # seconds
LATE_S = 10 * EVERY  # since a run in progress has written its status last
COPIED = ("ticks", "seconds", "restarts", "replaced")  # from a run's summary, while it runs


class Status:
    """Keeps a run's status.json up to date, and removes it at the end; load.jsonl stays.

    `lags` returns the lags so far, as a run's summary has them.
    """

    def __init__(
        self, folder: Path, summary: Mapping[str, Any], say: Log, lags: Lags = dict
    ) -> None:
        self._say, self._text, self._lags = say, b"", lags
        self._load = LoadLog(folder / LOAD_FILE, say)
        self._file, self._last, self._summary = folder / FILE, 0.0, summary
        self._wanted, self._asked = folder / WANTED, 0.0
        self._counts: dict[str, int] = {}

    def stand(self, statuses: Statuses) -> None:
        """Write the status of workers if it is due; a failure to write doesn't fail the run."""
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            found = statuses()
            workers = {
                name: {
                    "tick": one.tick, "waits": one.waits_for, "pid": one.pid,
                    "stage": one.stage, "seconds": round(one.seconds, 1) if one.stage else 0.0,
                    "spent": rounded(one.spent),
                }
                for name, one in found.items()
            }  # fmt: skip
            counts = {name: self._summary[name] for name in COPIED if name in self._summary}
            counts |= {"driver": os.getpid(), "at": time.time(), "workers": workers, **self._lags()}
            counts["locked"] = is_locked(self._file.parent)
            self._load.add(counts["at"], self._summary.get("seconds", 0.0), found)
            with suppress(OSError):
                write_json(self._file, counts)

    def scale(self) -> dict[str, int]:
        """The number of replicas requested per fragment; a damaged file is reported and ignored."""
        if time.monotonic() - self._asked >= EVERY / 4:
            self._asked = time.monotonic()
            if os.path.lexists(self._wanted):
                self._read_wanted()
        return self._counts

    def _read_wanted(self) -> None:
        """Parse the request once; a file that isn't counts by names is reported."""
        try:
            text = self._wanted.read_bytes()
        except OSError as error:  # such as a folder
            text = str(error).encode()
        if text == self._text:
            return
        self._text = text
        try:
            self._counts = read_json(self._wanted, dict[str, Index])
        except (OSError, ShapeError) as error:
            self._say(f"{self._wanted} is ignored: {why_unreadable(error)}")

    def close(self) -> None:
        """Remove the files that are of use during the run only."""
        self._load.close()
        for file in (self._file, self._wanted):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def want(folder: Path, counts: Mapping[str, int]) -> dict[str, int]:
    """Request numbers of replicas from a run; returns all numbers that are then requested.

    The request is a file in the run's folder: write access to the folder is what allows it.
    """
    summary, status = read_status(folder)
    run = read_run(folder) if status else {}
    backend = BACKENDS.get(run.get("backend", ""))
    is_running = summary["status"] == "running" and not _is_over(folder, summary, status)
    if not is_running or backend is None or not backend.scales:
        raise SettingError(
            f"the run in {folder} isn't running in processes of its own",
            "Only a run of the backends `processes` and `ray` can have more or fewer replicas.",
        )
    elastic = run.get("elastic", {})
    counts = {n if n in elastic else n.removesuffix("s"): count for n, count in counts.items()}
    for name, count in counts.items():
        if name not in elastic:
            known = ", ".join(f"{n} ({min(b)} to {max(b)})" for n, b in elastic.items()) or "none"
            raise SettingError(
                f"fragment `{name}` of {folder} has a fixed number of replicas, or isn't there",
                f"Those whose replicas may come and go: {known}. Say so when the run starts, such "
                "as --actors 2-16.",
            )
        least, most = min(elastic[name]), max(elastic[name])
        if not least <= count <= most:
            raise SettingError(
                f"{count} replicas of `{name}` are out of its bounds",
                f"Choose {least} to {most}.",
            )
    before: dict[str, int] = {}
    with suppress(OSError, ShapeError):
        before = read_json(folder / WANTED, dict[str, Index])
    try:
        write_json(folder / WANTED, before | counts)
    except OSError as error:
        raise SettingError(
            f"can't write in {folder}: {error.strerror}", "Make the folder writable."
        ) from error
    return before | counts


def read_status(folder: Path) -> tuple[SummaryFile, StatusFile | None]:
    """A run's summary, and the status of its workers, if there is one."""
    try:
        summary = read_json(folder / "summary.json", SummaryFile)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SettingError(
            f"there is no run in {folder}", "Name the folder of a run, or its name in runs/."
        ) from error
    except (OSError, ShapeError) as error:
        raise SettingError(
            f"{folder}/summary.json can't be read: {why_unreadable(error)}",
            f"`shoal resume {folder}` writes it again.",
        ) from error
    try:
        return summary, read_json(folder / FILE, StatusFile)
    except (OSError, ShapeError):
        return summary, None


def _losses(summary: SummaryFile) -> str:
    """The losses so far as text; empty if there are none."""
    counted = [n for n in ("restarts", "replaced") if summary.get(n)]
    return "".join(f", {summary[name]} {name}" for name in counted)


def shown(folder: Path) -> tuple[str, Table | None]:
    """A run's status in a line, and its workers as a table."""
    summary, status = read_status(folder)
    if status is not None:
        newer: Any = {name: count for name, count in status.items() if name in COPIED}
        summary.update(newer)
    is_over = _is_over(folder, summary, status)
    name = "killed" if is_over else printable(summary["status"])
    line = f"{folder}: {name}, tick {summary['ticks']:,}"
    line += _losses(summary) + _saved(folder)
    if is_over:
        return f"{line}; its process is gone. Continue it with `shoal resume {folder}`", None
    if status is None:
        return line, None
    line += f"; updated {_age(status):.0f} s ago"
    if _age(status) > LATE_S:
        line += " (its driver is stopped, or waits itself)"
    table = Table("worker", "pid", "tick", "in stage", "waits for")
    for name, one in status["workers"].items():
        stage, seconds = one.get("stage", ""), one.get("seconds", 0.0)
        inside = f"{stage} for {seconds:.0f} s" if stage and seconds >= 1 else stage
        pid, waits = str(one.get("pid") or "-"), one["waits"] or "-"
        cells = (name, pid, f"{one['tick']:,}", inside or "-", waits)
        table.add_row(*(escape(printable(cell)) for cell in cells))
    return line, table


def _age(status: StatusFile | None) -> float:
    """Seconds since a status was written; without one, more than a run in progress takes."""
    return time.time() - status["at"] if status else LATE_S + 1


def _is_over(folder: Path, summary: SummaryFile, status: StatusFile | None) -> bool:
    """Whether a run says that it is running and its process is gone.

    Not every file system knows locks: where the run saw that it does not, one that wrote its
    status just now is running, too.
    """
    knows_locks = status is not None and status.get("locked", False)
    is_silent = knows_locks or _age(status) > LATE_S
    return summary["status"] == "running" and is_silent and not is_locked(folder)


def _saved(folder: Path) -> str:
    """Which checkpoint of a run is the newest, and whether there is room for more."""
    found = ticks_in(folder / "checkpoints")
    if not found:
        return ""
    line = f"; newest checkpoint of tick {found[-1]:,}"
    needed, room = size_of(folder / "checkpoints" / str(found[-1])), free(folder)
    if needed > room:
        line += f", no room for another ({megabytes(needed)} needed, {megabytes(room)} free)"
    return line
