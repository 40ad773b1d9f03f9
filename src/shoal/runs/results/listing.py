"""Runs on disk as rows of a list, and groups of runs, such as the seeds of one experiment."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import SettingError, printable
from shoal.runs.files.folder import is_locked

DEEP = ("*", "*/*")  # where runs are in a folder of runs: in it, or in a group of seeds
EVALUATIONS = "evaluations"  # a folder of a run


@dataclass(frozen=True)
class ListedRun:
    """A run in a few facts, from its `summary.json`."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def status(self) -> str:
        """How it ended, or that it runs."""
        status = str(self.facts.get("status", "unreadable"))
        return "killed" if status == "running" and not is_locked(self.folder) else status

    @property
    def age(self) -> float:
        """Seconds since it was last written to."""
        return max(0.0, time.time() - _written(self.folder))

    def evaluations(self) -> list[dict[str, Any]]:
        """The results of `shoal eval`, those of the newest tick last."""
        files = (self.folder / EVALUATIONS).glob("*.json")
        return sorted(filter(None, map(read_facts, files)), key=lambda one: one.get("tick", 0))


@dataclass(frozen=True)
class Group:
    """Runs that are compared as one, such as the seeds of an experiment."""

    name: str
    runs: tuple[ListedRun, ...]


def runs_in(root: Path) -> list[ListedRun]:
    """The runs in a folder and in the groups in it, the newest first."""
    found = {path.parent for deep in DEEP for path in root.glob(f"{deep}/run.json")}
    ordered = sorted(found, key=_written, reverse=True)
    return [listed(folder) for folder in ordered]


def listed(folder: Path) -> ListedRun:
    """The run in a folder."""
    return ListedRun(folder, read_facts(folder / "summary.json"))


def group(name: str, root: Path = Path("runs")) -> Group:
    """The runs that a name stands for: one run, the runs in a folder, or those of a pattern."""
    try:
        found = next(filter(None, (_found(base, name) for base in (Path(), root))), [])
    except (OSError, ValueError, NotImplementedError):  # too long, with a NUL, no such pattern
        found = []
    if not found or not name:  # which would be all of them
        raise SettingError(
            f"there is no run in {printable(name)[:60]}",
            "Name a run, a folder of runs as --seeds makes, or a pattern; `shoal runs` lists them.",
        )
    return Group(name, tuple(map(listed, sorted(found))))


def _found(base: Path, name: str) -> list[Path]:
    """The folders of the runs that a name stands for in a folder."""
    place = base / name
    if (place / "run.json").exists():
        return [place]
    if found := [path.parent for path in place.glob("*/run.json")]:
        return found
    return [path.parent for path in base.glob(f"{name}/run.json")] if "*" in name else []


def removable(names: Sequence[str]) -> list[Path]:
    """The folders of runs that names stand for, none of which runs."""
    folders = [run.folder for name in names for run in group(name).runs]
    for folder in folders:
        if is_locked(folder):
            raise SettingError(f"the run in {folder} is running", "Interrupt it first.")
        if folder.is_symlink():
            raise SettingError(f"{folder} is a link", "Remove what it points to by hand.")
    return folders


def remove(folders: Sequence[Path]) -> None:
    """Remove runs, and groups that become empty."""
    for folder in folders:
        shutil.rmtree(folder)
        if folder.parent.name != "runs" and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's metrics; those that are damaged are left out."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def read_facts(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it can't be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _written(folder: Path) -> float:
    for name in ("summary.json", "run.json"):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
