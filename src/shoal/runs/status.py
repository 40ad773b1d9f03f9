"""How the workers of a run are: written to its folder as it goes on, and read by anybody."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.errors import SettingError
from shoal.runs.checkpoints import ticks_in
from shoal.runs.disk import free, megabytes, size_of, unless_full
from shoal.runs.records import write_json
from shoal.runtime.logs import Say
from shoal.runtime.run import Statuses

FILE, WANTED = "status.json", "scale.json"
EVERY = 1.0  # seconds
TOLD = ("ticks", "restarts", "replaced", "lost_turns")  # of a run's summary, while it goes on


class Status:
    """Keeps a run's status.json up to date, and takes it away at the end."""

    def __init__(self, folder: Path, summary: Mapping[str, Any], say: Say) -> None:
        self._say, self._text = say, b""
        self._file, self._last, self._summary = folder / FILE, 0.0, summary
        self._wanted, self._asked = folder / WANTED, 0.0
        self._counts: dict[str, int] = {}

    def stand(self, statuses: Statuses) -> None:
        """Write how workers are, if it is time."""
        if time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            workers = {
                name: {
                    "tick": one.tick, "waits": one.waits_for, "pid": one.pid,
                    "stage": one.stage, "seconds": round(one.seconds, 1) if one.stage else 0.0,
                }
                for name, one in statuses().items()
            }  # fmt: skip
            told = {name: self._summary[name] for name in TOLD if name in self._summary}
            told |= {"driver": os.getpid(), "at": time.time(), "workers": workers}
            with unless_full():
                write_json(self._file, told)

    def scale(self) -> dict[str, int]:
        """How many replicas somebody wants of each fragment, if they have said so."""
        if time.monotonic() - self._asked >= EVERY / 4:
            self._asked = time.monotonic()
            with suppress(FileNotFoundError):
                self._read_wanted(self._wanted.read_bytes())
        return self._counts

    def _read_wanted(self, text: bytes) -> None:
        """Take in what is asked for; what isn't a count for each name is reported, and ignored."""
        if text == self._text:
            return
        self._text = text
        try:
            self._counts = check_counts(json.loads(text))
        except ValueError as error:
            self._say(f"{self._wanted} is ignored: {error}")

    def close(self) -> None:
        """The run has ended: nobody is any way any more."""
        self._file.unlink(missing_ok=True)
        self._wanted.unlink(missing_ok=True)


def check_counts(counts: Any) -> dict[str, int]:
    """`counts` if it is a mapping of names to numbers of replicas."""
    is_count = isinstance(counts, dict) and all(type(n) is int and n >= 0 for n in counts.values())
    if not is_count:
        raise ValueError('it must hold a JSON object of counts, such as {"actor": 4}')
    return counts


def newest_run(folder: Path) -> Path:
    """The run in a folder that was begun last."""
    found = {path.parent: path.stat().st_mtime for path in folder.glob("*/run.json")}
    if not found:
        raise SettingError(
            f"there is no run in {folder}", "Name its folder, or begin one with `shoal train`."
        )
    return max(found, key=found.__getitem__)


def want(folder: Path, counts: Mapping[str, int]) -> dict[str, int]:
    """Let a run have so many replicas of fragments; what all is wanted of it then.

    It is a file in the run's folder, which the run looks at: whoever may write there may ask.
    """
    summary, status = read_status(folder)
    if summary["status"] != "running" or status is None:
        raise SettingError(
            f"the run in {folder} isn't going on in processes of its own",
            "Only a run of the backends `processes` and `ray` can have more or fewer replicas.",
        )
    told = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    elastic: dict[str, list[int]] = told.get("elastic", {})
    counts = {n if n in elastic else n.removesuffix("s"): count for n, count in counts.items()}
    for name, count in counts.items():
        if name not in elastic:
            known = ", ".join(f"{n} ({a} to {b})" for n, (a, b) in elastic.items()) or "none"
            raise SettingError(
                f"fragment `{name}` of {folder} has a fixed number of replicas, or isn't there",
                f"Those whose replicas may come and go: {known}. Say so when the run starts, such "
                "as --actors 2-16.",
            )
        least, most = elastic[name]
        if not least <= count <= most:
            raise SettingError(
                f"{count} replicas of `{name}` are out of its bounds",
                f"Choose {least} to {most}.",
            )
    before = folder / WANTED
    said = {}
    with suppress(FileNotFoundError, ValueError):
        said = check_counts(json.loads(before.read_bytes()))
    write_json(before, said | counts)
    return said | counts


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
    table = Table("worker", "pid", "tick", "in stage", "waits for")
    for name, one in status["workers"].items():
        stage, seconds = one.get("stage", ""), one.get("seconds", 0.0)
        inside = f"{stage} for {seconds:.0f} s" if stage and seconds >= 1 else stage
        pid = str(one.get("pid") or "-")
        table.add_row(name, pid, f"{one['tick']:,}", inside or "-", one["waits"] or "-")
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
