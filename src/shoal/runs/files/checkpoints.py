"""Checkpoints of a run: written atomically, beside the loop; the newest and the best are kept.

A checkpoint is a folder named after its tick: `state` holds the arrays (Orbax), `metadata.json`
describes them, with a checksum of each. It is written under another name and renamed when it is
complete, so no partial checkpoint is ever read, however the process ends.
"""

from __future__ import annotations

import errno
import json
import math
import os
import queue
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import CheckpointError, first_line
from shoal.runs.files.disk import FullError, check_room, muted, size_of, why_full
from shoal.runtime.execution.compiled_executor import raw, wrapped
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.logs import Log
from shoal.shapes import (
    Index,
    Seconds,
    ShapeError,
    Steps,
    read_json,
    why_unreadable,
)
from shoal.tracing.stage import path_name

FORM = 1
WRITING = ".writing"
OVERHEAD = 100_000  # bytes that a checkpoint takes besides its arrays, at most about
DAMAGED = ".damaged"
# Types that arrays of a state can have; a checkpoint that names another is damaged.
DTYPES = frozenset(
    [
        "bool",
        "int4",
        "uint4",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
    ]
)
Progress = Mapping[str, Any]  # counts of a run: steps, seconds, episodes, lags


class ArrayRow(TypedDict):
    """An array of a checkpoint; `sum` finds damage."""

    name: str
    shape: list[Index]
    dtype: str
    sum: int


class EpisodeRow(TypedDict, total=False):
    """The newest episodes by ticks, as counts and sums of returns, and how many there were."""

    newest: list[tuple[float, float]]
    total: Steps


class CheckpointFile(TypedDict):
    """The content of a checkpoint's `metadata.json`: its arrays, and the run's counts."""

    form: int
    tick: Index
    past: Index
    values: list[ArrayRow]
    sum: NotRequired[int]  # of all else in the file
    env_steps: NotRequired[Steps]
    seconds: NotRequired[Seconds]
    return_mean: NotRequired[float | None]
    resumed: NotRequired[list[Index]]
    episodes: NotRequired[EpisodeRow]
    lags: NotRequired[dict[Annotated[str, "a lag"], Steps]]


class Saved(NamedTuple):
    """A checkpoint as it was read: arrays in host memory, keys as their data."""

    snapshot: Snapshot
    record: CheckpointFile
    folder: Path


class Checkpoints:
    """Writes the checkpoints of a run in progress, one at a time, on a thread."""

    def __init__(self, folder: Path, keep: int, say: Log) -> None:
        self.folder, self._keep, self._say = folder, keep, say
        self.failed: dict[int, str] = {}  # ticks whose checkpoints were not written, and why
        self._written: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        threading.Thread(target=_load_orbax, name="orbax").start()
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{WRITING}"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, snapshot: Snapshot, progress: Progress) -> None:
        """Start writing a checkpoint once the one before is done; doesn't wait for its end."""
        self.wait()
        work = (snapshot, dict(progress))
        self._thread = threading.Thread(target=self._write, args=work, name="checkpoint")
        self._thread.start()

    def written(self) -> Iterator[Path]:
        """The checkpoints that have become complete; each is returned once."""
        while not self._written.empty():
            yield self._written.get()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, snapshot: Snapshot, progress: Progress) -> None:
        """Write a checkpoint and remove old ones; a full disk is reported and tolerated."""
        draft = self.folder / f"{snapshot.tick}{WRITING}"
        needed = 0
        try:
            needed = _needed(self.folder, snapshot)
            check_room(self.folder, needed)
            write(draft, snapshot, progress)
            forget(self.folder, snapshot.tick)  # of an earlier course of this run
            draft.rename(self.folder / str(snapshot.tick))
            self._written.put(self.folder / str(snapshot.tick))
            self.failed.pop(snapshot.tick, None)
            for tick in superfluous(self.folder, self._keep):
                forget(self.folder, tick)
        except Exception as error:
            shutil.rmtree(draft, ignore_errors=True)
            self._fail(snapshot.tick, self._why(error, needed))

    def _why(self, error: Exception, needed: int) -> str:
        if not self.folder.is_dir():
            return "the run's folder was moved or removed"
        return why_full(error, needed, self.folder) or _first_line(error)

    def refuse(self, tick: int) -> None:
        """Report that none is written at `tick`, since rows before it found no room on the disk."""
        needed = sum(size_of(self.folder / str(t)) for t in ticks_in(self.folder)[-1:])
        error = FullError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fail(tick, why_full(error, needed or OVERHEAD, self.folder))

    def _fail(self, tick: int, why: str) -> None:
        self.failed[tick] = why
        there = ticks_in(self.folder)[-1:]
        newest = f"the newest is of tick {there[0]}" if there else "there is none yet"
        self._say(
            f"checkpoint at tick {tick} not written: {why}; trying again at the next ({newest})"
        )

    def lost(self, tick: int) -> str:
        """What a resumed run would have to repeat, if the state at `tick` was not written."""
        if tick not in self.failed:
            return ""
        there = ticks_in(self.folder)[-1:]
        since = f"what came after tick {there[0]}" if there else f"everything up to tick {tick}"
        return f"the final checkpoint was not written, so {since} is lost: {self.failed[tick]}"


def _needed(folder: Path, snapshot: Snapshot) -> int:
    """Bytes that a checkpoint may take: no more than its arrays, or about twice the last one."""
    arrays = (*snapshot.values.values(), *snapshot.past.values())
    most = sum(x.size * x.dtype.itemsize for x in arrays) + OVERHEAD
    return min([most, *(2 * size_of(folder / str(tick)) for tick in ticks_in(folder)[-1:])])


def write(folder: Path, snapshot: Snapshot, progress: Progress) -> None:
    """Write a checkpoint to a folder of its own."""
    named = [(name, raw(x)) for name, x in (*snapshot.values.items(), *snapshot.past.items())]
    rows = [
        {"name": name, "shape": x.shape, "dtype": str(x.dtype), "sum": _sum(x)} for name, x in named
    ]
    folder.mkdir()  # not its parents: they are missing if the run's folder was moved
    arrays = {str(i): x if x.ndim else x[None] for i, (_, x) in enumerate(named) if x.size}
    with muted(), _orbax() as orbax:
        orbax.save((folder / "state").resolve(), arrays)
    counts = {"form": FORM, "tick": snapshot.tick, "past": len(snapshot.past)}
    record = {**progress, **counts, "values": rows}
    with open(folder / "metadata.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(record | {"sum": _sum_of(record)}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Saved:
    """The checkpoint in a folder; one that is damaged raises a CheckpointError."""
    record = read_record(folder)
    try:
        with muted(), _orbax() as orbax:
            arrays = dict(orbax.restore((folder / "state").resolve()))
    except Exception as error:  # libraries raise any error for damaged bytes
        why = error.strerror if isinstance(error, OSError) else "its arrays are damaged"
        raise _damaged(folder, why or "its arrays are damaged") from error
    try:
        found = {row["name"]: _array(arrays, i, row) for i, row in enumerate(record["values"])}
    except (ValueError, OverflowError, MemoryError) as error:
        raise _damaged(folder, _first_line(error)) from error
    names = list(found)
    count = len(names) - record["past"]
    values, past = ({n: found[n] for n in part} for part in (names[:count], names[count:]))
    return Saved(Snapshot(record["tick"], values, past), record, folder)


def _array(arrays: Any, index: int, row: ArrayRow) -> np.ndarray:
    """An array of a checkpoint, verified by its checksum."""
    if row["dtype"] not in DTYPES:
        raise ShapeError(f"{row['name']!r} has the unknown type {row['dtype']!r}")
    shape, dtype = tuple(row["shape"]), jnp.dtype(row["dtype"])
    found = np.zeros(shape, dtype) if 0 in shape else np.asarray(arrays.get(str(index)))
    if found.dtype != dtype or found.size != math.prod(shape):
        raise ShapeError(f"{row['name']!r} has another type or shape than was written")
    found = found.reshape(shape)
    if _sum(found) != row["sum"]:
        raise ShapeError(f"{row['name']!r} is not what was written")
    return found


def read_record(folder: Path) -> CheckpointFile:
    """The metadata of a checkpoint; raises a CheckpointError if it is damaged."""
    try:
        record = read_json(folder / "metadata.json", CheckpointFile, FORM)
    except (OSError, ShapeError) as error:
        raise _damaged(folder, f"metadata.json: {why_unreadable(error)}") from error
    if "sum" in record and record["sum"] != _sum_of(record):
        raise _damaged(folder, "metadata.json is not what was written")
    names = [row["name"] for row in record["values"]]
    if len(set(names)) < len(names) or record["past"] > len(names):
        raise _damaged(folder, "metadata.json names an array twice, or too many of the past")
    if folder.name.isdecimal() and int(folder.name) != record["tick"]:
        raise _damaged(folder, f"it says that it is of tick {record['tick']}")
    if not all(lag.isdecimal() for lag in record.get("lags", {})):
        raise _damaged(folder, "metadata.json counts lags that are no numbers")
    return record


def read_newest(folder: Path, say: Log) -> Saved | None:
    """The newest checkpoint that can be read; None where there are none."""
    found = ticks_in(folder)
    for tick in reversed(found):
        try:
            return read(folder / str(tick))
        except CheckpointError as error:
            say(f"{error.what}; using the one before.")
    if found:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {folder} can be read",
            "Restore one from a copy, or train again.",
        )
    return None


def read_best(folder: Path) -> Saved:
    """The checkpoint with the highest mean return."""
    best = best_tick(folder)
    if best is None:
        raise CheckpointError(
            f"no checkpoint in {folder} knows a mean return",
            "An episode must have ended before it; load the newest instead.",
        )
    return read(folder / str(best))


def ticks_in(folder: Path) -> list[int]:
    """The ticks of all checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir())
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def best_tick(folder: Path) -> int | None:
    """The tick of the checkpoint with the highest mean return; of equals, the newest."""
    means = {}
    for tick in ticks_in(folder):
        try:
            means[tick] = read_record(folder / str(tick)).get("return_mean")
        except CheckpointError:
            continue
    known = {tick: mean for tick, mean in means.items() if mean is not None}
    return max(known, key=lambda tick: (known[tick], tick), default=None)


def superfluous(folder: Path, keep: int) -> list[int]:
    """The ticks of checkpoints that are neither among the newest `keep` nor the best."""
    best = best_tick(folder)
    return [tick for tick in ticks_in(folder)[:-keep] if tick != best]


def forget(folder: Path, tick: int) -> None:
    """Remove a checkpoint; if killed in the middle, it isn't read again."""
    path = folder / str(tick)
    if path.exists():
        gone = folder / f"{tick}-old{WRITING}"
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def restored(saved: Saved, spec: Any, title: str) -> Snapshot:
    """A snapshot of arrays as `spec`, a loop's carried state, has them; checks that they fit."""
    flat = jax.tree_util.tree_flatten_with_path(spec)[0]
    leaves = {path_name(path) or "state": leaf for path, leaf in flat}
    values = saved.snapshot.values
    if leaves.keys() != values.keys():
        odd = sorted(leaves.keys() ^ values.keys())
        raise CheckpointError(
            f"{saved.folder} is a checkpoint of another loop than {title}: "
            f"one of them has no `{odd[0]}`",
            "Name the algorithm and settings that it was trained with.",
        )
    made = {}
    for name, leaf in leaves.items():
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        x = wrapped(jnp.asarray(values[name])) if is_key else values[name]
        if x.shape != leaf.shape or x.dtype != leaf.dtype:
            raise CheckpointError(
                f"{saved.folder} has `{name}` as {x.dtype}{list(x.shape)}, "
                f"and {title} carries {leaf.dtype}{list(leaf.shape)}",
                "Use the settings and the number of environments that it was trained with.",
            )
        made[name] = x if is_key else jnp.asarray(x)
    return Snapshot(saved.snapshot.tick, made, saved.snapshot.past, is_owned=True)


def set_aside(folder: Path, tick: int) -> None:
    """Rename a checkpoint that a resumed run can't use, so that nothing of it is lost."""
    path = folder / f"{tick}{DAMAGED}"
    shutil.rmtree(path, ignore_errors=True)
    (folder / str(tick)).rename(path)


def _sum_of(record: Mapping[str, Any]) -> int:
    """A checksum of the record of a checkpoint."""
    plain = json.loads(json.dumps({name: x for name, x in record.items() if name != "sum"}))
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


def _load_orbax() -> None:
    import orbax.checkpoint  # noqa: F401  takes a second, in a thread of its own


def _orbax() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _sum(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _damaged(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint in {folder} can't be read: {why}", "Use the one before it."
    )


def _first_line(error: BaseException) -> str:
    text = first_line(error)[:200]
    return text if isinstance(error, ShapeError) else f"{type(error).__name__}: {text}"
