"""A run's folder: its name, its lock, and its files, validated when read, written atomically."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from shoal.errors import RunError, SettingError, ShoalError
from shoal.runs.files.disk import FULL
from shoal.shapes import (
    Count,
    Index,
    Seconds,
    Seed,
    ShapeError,
    Steps,
    Timeout,
    read_json,
    why_unreadable,
)

FORM = 1
RUNNING: dict[Path, dict[str, Any]] = {}  # folders of runs in progress, and their summaries so far
NAME_BYTES = 200  # of a run's name; file systems allow 255 of a file's
LOCK_TRIES = 3  # `shoal status` holds a lock for a moment, to see whether a run does
WRITTEN = (
    *("run.json", "summary.json", "plan.txt", "plan.json", "workers.log"),
    *("metrics.jsonl", "load.jsonl", "spans.bin"),
)


class Extension(TypedDict):
    """A change of a run's length that changed its learning-rate schedule."""

    tick: Index
    from_ticks: Count
    to_ticks: Count


class RunFile(TypedDict):
    """The content of `run.json`, from which the run is made again."""

    form: int
    shoal: NotRequired[str]
    jax: NotRequired[str]
    algorithm: dict[str, Any] | None
    env: Any
    distribution: dict[str, Any]
    backend: str
    envs: Count
    ticks: Count
    seed: Seed
    checkpoint_every: str | Count
    keep: Count
    restarts: NotRequired[Index]
    replaces: NotRequired[Index]
    step_timeout: NotRequired[Timeout | None]
    elastic: NotRequired[dict[str, list[Count]]]
    extended: NotRequired[list[Extension]]
    log: NotRequired[list[str]]
    made: NotRequired[list[dict[str, Any]]]


class Losses(TypedDict):
    """How often a run has lost workers or rollouts."""

    restarts: NotRequired[Steps]
    replaced: NotRequired[Steps]


class SummaryFile(Losses):
    """The part of `summary.json` that a status shows."""

    status: str
    ticks: Steps


class WorkerRow(TypedDict):
    """A worker's tick, what it waits for, and since when it is in which stage."""

    tick: int
    waits: str
    pid: NotRequired[int | None]
    stage: NotRequired[str]
    seconds: NotRequired[Seconds]
    spent: NotRequired[dict[str, Seconds]]


class StatusFile(Losses):
    """The content of `status.json`."""

    ticks: NotRequired[Steps]
    driver: NotRequired[int]
    at: Seconds
    locked: NotRequired[bool]  # whether the file system shows the run's lock
    seconds: NotRequired[Seconds]
    lag: NotRequired[dict[str, Any]]
    workers: dict[str, WorkerRow]


def new_folder(root: Path, name: str | None, title: str) -> Path:
    """A new folder for a run: with this name, or numbered after what is trained."""
    plain = re.sub(r"[^\w .+=@()-]+", "-", title)[:100].strip("- ")
    try:
        if name is None:
            return _numbered(root, plain)
        folder = root / check_name(name)
        if any((folder / file).exists() for file in (*WRITTEN, "checkpoints")):
            raise SettingError(
                f"{folder} already holds a run",
                f"Continue it with `shoal resume {folder}`, choose another name, or remove it.",
            )
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingError(
            f"can't make a folder for the run in {root}: {why}",
            "Give --folder a directory that you may write to.",
        ) from error
    return folder


def _numbered(root: Path, title: str) -> Path:
    for number in range(1, 1_000_000):
        folder = root / f"{title}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise SettingError(f"{root} is full", "Remove old runs.")


def check_name(name: str) -> str:
    """`name`, if it can be that of one new folder inside of another."""
    wrong = ""
    if not name.strip() or name != name.strip():
        wrong = "is blank, or begins or ends with a blank"
    elif "/" in name or "\\" in name or name in (".", ".."):
        wrong = "is a path"
    elif not name.isprintable():
        wrong = "has characters that can't be printed"
    elif len(name.encode()) > NAME_BYTES:
        wrong = f"is longer than {NAME_BYTES} bytes"
    elif name.startswith("-"):
        wrong = "begins like an option"
    if wrong:
        shown = ascii(name) if len(name) <= 40 else f"{name[:40]!a}..."
        raise SettingError(
            f"the name {shown} of a run {wrong}",
            "Use letters, digits, `.`, `_` and `-`; --folder says where runs are kept.",
        )
    return name


def read_run(folder: Path) -> RunFile:
    """The `run.json` of a folder, validated."""
    try:
        return read_json(folder / "run.json", RunFile, FORM)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SettingError(
            f"there is no run in {folder} to resume: it has no run.json",
            "Name the folder of a run, such as runs/ppo-CartPole-v1-1.",
        ) from error
    except (OSError, ShapeError) as error:
        raise SettingError(
            f"{folder}/run.json can't be read: {why_unreadable(error)}",
            "Restore it from a copy; the checkpoints beside it are as they were.",
        ) from error


def newest_run(folder: Path) -> Path:
    """The run in a folder that was started last."""
    files = [path for deep in ("*", "*/*") for path in folder.glob(f"{deep}/run.json")]
    found = {path.parent: path.stat().st_mtime for path in files}
    if not found:
        raise SettingError(
            f"there is no run in {folder}", "Name its folder, or begin one with `shoal train`."
        )
    return max(found, key=found.__getitem__)


def check_plain(folder: Path) -> None:
    """Refuse a folder with links, pipes or devices: writes to it would land elsewhere."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                kind = "a link" if path.is_symlink() else "no plain file"
                raise SettingError(
                    f"{path} is {kind}, and a run writes to what is in its folder",
                    "Put the file itself there, or add --trust (in Python: trust=True).",
                )


def check_writable(folder: Path) -> None:
    """Refuse, before anything is written, a run folder that can't be written to."""
    try:
        for place in (folder, folder / "checkpoints"):
            if place.is_dir():
                probe = place / f".{os.getpid()}.tmp"
                probe.touch()
                probe.unlink()
        for path in (folder / name for name in (*WRITTEN, "evaluation.jsonl")):
            if os.path.lexists(path):
                with open(path, "rb+"):
                    pass
    except OSError as error:
        raise SettingError(
            f"can't write in {folder}: {error.strerror} ({Path(error.filename or folder).name})",
            "Make it writable, or copy the run to a place that is.",
        ) from error


@contextmanager
def recorded(folder: Path, summary: dict[str, Any]) -> Iterator[None]:
    """Write a valid summary in all cases, with the error if the run failed."""
    RUNNING[folder] = summary
    before = _identity(folder)
    try:
        write_json(folder / "summary.json", summary)
        yield
        _check_same(folder, before)
    except KeyboardInterrupt:
        summary.update(status="interrupted")
        raise
    except BaseException as error:
        what = error.what if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        summary.update(status="failed", error=what)
        if isinstance(getattr(error, "state", None), dict):
            summary["ticks"] = getattr(error, "tick", summary["ticks"])
        if isinstance(error, OSError):
            _check_same(folder, before)
        raise
    finally:
        if _identity(folder) == before:
            write_json(folder / "summary.json", summary)
        del RUNNING[folder]


def _identity(folder: Path) -> tuple[int, int] | None:
    """The identity of the directory at a path; None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _check_same(folder: Path, before: tuple[int, int] | None) -> None:
    if _identity(folder) != before:
        raise RunError(
            f"the run's folder {folder} was moved or removed while it ran, so its last state could "
            "not be saved there",
            "If it was moved, resume from the checkpoints it holds: shoal resume FOLDER.",
        )


def mark_interrupted() -> None:
    """Write to the folders of all runs in progress that they end here, before leaving at once."""
    for folder, summary in list(RUNNING.items()):
        write_json(folder / "summary.json", summary | {"status": "interrupted"})


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of `folder`; the lock is released when the process exits."""
    try:
        file = open(folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise SettingError(
            f"can't write in {folder}: {error.strerror}",
            "Make it writable, or copy the run to a place that is.",
        ) from error
    with file:
        if not _lock(file.fileno(), fcntl.LOCK_EX, LOCK_TRIES):
            file.seek(0)
            pid = "".join(filter(str.isdigit, file.read(20))) or "?"
            raise SettingError(
                f"the run in {folder} is still running, as process {pid}",
                "Wait for it, or interrupt it first.",
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process runs in `folder`: its lock never outlives it."""
    try:
        file = os.open(folder / "lock", os.O_RDONLY | os.O_NONBLOCK)  # a pipe wouldn't open else
        try:
            return not _lock(file, fcntl.LOCK_SH, 1)
        finally:
            os.close(file)
    except OSError:
        return False


def _lock(file: int, kind: int, tries: int) -> bool:
    """Try to lock an open file, at most `tries` times."""
    for again in reversed(range(tries)):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if again:
                time.sleep(0.05)
    return False


class Lines:
    """Rows of a file, each written whole; rows that find the disk full are kept and retried."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._file, self._say = open(path, "ab", buffering=0), say  # noqa: SIM115  it is one itself
        self._end, self._waiting = os.fstat(self._file.fileno()).st_size, b""
        self._lock = threading.Lock()

    @property
    def is_behind(self) -> bool:
        """Whether there are rows that found no room yet."""
        return bool(self._waiting)

    def add(self, row: str) -> None:
        """Write a row, and those that found no room before."""
        with self._lock:
            first, data = not self._waiting, self._waiting + _encoded(row)
            try:
                self._write(data)
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._waiting, why = data, error.strerror
        if first:
            self._say(f"{self.path.name} waits for room on the disk ({why}).")

    def _write(self, data: bytes) -> None:
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError:
            self._file.truncate(self._end)  # half a row is none
            raise
        self._end, self._waiting = self._end + len(data), b""

    def close(self) -> None:
        """Write the rows that found no room before, if there is room now; else report the loss."""
        if self._waiting:
            with suppress(OSError):
                self._write(self._waiting)
        self._file.close()
        if self._waiting:
            count = self._waiting.count(b"\n")
            self._say(f"{count} rows of {self.path.name} found no room on the disk and are lost.")

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _encoded(row: str) -> bytes:
    return row.encode(errors="backslashreplace") + b"\n"


def cut_rows(path: Path, tick: int) -> int:
    """Leave only the rows of ticks before `tick`; returns how many rows can't be read."""
    if not path.exists():
        return 0
    end, later, bad = 0, [], 0
    with open(path, "rb+") as file:
        for line in file:
            at = _tick_of(line)
            bad += at is None and line.endswith(b"\n")
            if at is None or at >= tick:
                later.append(b"")
            elif later:
                later.append(line)
            else:
                end += len(line)
        if not any(later):
            file.truncate(end)
            return bad
        file.seek(0)
        kept = file.read(end) + b"".join(later)
    write_whole(path, kept)
    return bad


def _tick_of(line: bytes) -> int | None:
    """The tick that a row is of; None if the row is damaged."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    found = row.get("tick") if isinstance(row, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def as_json(data: Any, indent: int | None = None) -> str:
    """`data` as JSON, which has no infinities: they are the texts "Infinity" and "-Infinity".

    Python's `float`, JavaScript's `Number` and most parsers of numbers read these back.
    """
    return json.dumps(_written(data), indent=indent, allow_nan=False)


def _written(data: Any) -> Any:
    match data:
        case float() if not math.isfinite(data):
            return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
        case dict():
            return {name: _written(x) for name, x in data.items()}
        case list() | tuple():
            return [_written(x) for x in data]
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; on a full disk, in place."""
    write_whole(path, (as_json(data, indent=2) + "\n").encode())


def _no_link(path: str, flags: int) -> int:
    """Open a file that isn't a link: one in a folder of others may lead elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; on a full disk, in place."""
    draft = path.with_suffix(".tmp")
    try:
        with open(draft, "wb", opener=_no_link) as file:
            file.write(data)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        if error.errno not in FULL or not path.exists():
            raise
        with open(path, "rb+", buffering=0) as file:  # a file that is there has room of its own
            file.write(data)
            file.truncate()
