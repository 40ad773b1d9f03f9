"""What a run leaves: its folder, with a summary that is true at every moment."""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import SettingError, ShoalError, TraceError
from shoal.runs.disk import FULL
from shoal.runtime.execution.metrics import LAG

LAST_EPISODES = 100
PER_EPISODE = {"episode_return", "episode_length"}  # summed by ticks, told as means
# Names that a row of metrics.jsonl has of its own.
RESERVED = ("tick", "env_steps", "seconds", "return_mean", "lag_mean", "lag_max")
# The metrics that tell of an evaluation, all or none of them.
EVALUATION = "evaluation_"
JUDGED = tuple(f"{EVALUATION}{name}" for name in ("episodes", "return", "length", "unfinished"))
RUNNING: dict[Path, dict[str, Any]] = {}  # folders of runs under way, and their summaries so far


@dataclass
class Episodes:
    """Returns of the newest episodes, a tick's worth at a time."""

    newest: deque[tuple[float, float]] = field(default_factory=deque)
    total: int = 0

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Add the episodes that ended in a tick, and forget those beyond the last hundred."""
        count = float(np.sum(metrics.get("episodes", 0)))
        if not count or not math.isfinite(count):
            return
        self.total += int(count)
        if "episode_return" not in metrics:
            return
        self.newest.append((count, float(np.sum(metrics["episode_return"]))))
        while sum(n for n, _ in self.newest) - self.newest[0][0] >= LAST_EPISODES:
            self.newest.popleft()

    @staticmethod
    def of(told: Mapping[str, Any]) -> Episodes:
        """From what `plain` made of them."""
        newest = deque((float(n), float(r)) for n, r in told.get("newest", []))
        return Episodes(newest, told.get("total", 0))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"newest": [list(pair) for pair in self.newest], "total": self.total}

    @property
    def mean(self) -> float | None:
        """The mean return of at least the last hundred episodes (fewer if there were fewer)."""
        count = sum(n for n, _ in self.newest)
        return sum(r for _, r in self.newest) / count if count else None


@dataclass
class Evaluations:
    """How the episodes went that were played with what had been learnt, a line of a file each."""

    path: Path
    steps: Callable[[int], int]  # of all environments before a tick
    say: Callable[[str], None]
    newest: dict[str, Any] = field(default_factory=dict)
    _lines: Lines | None = None

    def see(
        self, tick: int, metrics: Mapping[str, np.ndarray], tell: Callable[[int, float], None]
    ) -> dict[str, Any]:
        """Write down and tell the evaluation at `tick`, if there was one; the newest so far."""
        told = {n.removeprefix(EVALUATION): float(x) for n, x in metrics.items() if _judges(n)}
        if not (count := told.get("episodes")):
            return self.told()
        means = {f"{name}_mean": round(told[name] / count, 4) for name in ("return", "length")}
        counts = {name: int(told[name]) for name in ("episodes", "unfinished")}
        self.newest = {"tick": tick, "env_steps": self.steps(tick), **means, **counts}
        self._lines = self._lines or Lines(self.path, self.say)
        self._lines.add(as_json(self.newest))
        tell(tick, means["return_mean"])
        if cut := counts["unfinished"]:
            self.say(
                f"{cut} of {counts['episodes']} episodes of the evaluation at tick {tick} had not "
                "ended after the most steps that one may have: they count with their return so far"
            )
        return self.told()

    def told(self) -> dict[str, Any]:
        """The newest evaluation; nothing where there was none."""
        return {"evaluation": self.newest} if self.newest else {}

    def close(self) -> None:
        """There are no more."""
        if self._lines is not None:
            self._lines.close()


def without_evaluation(metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a tick shows of training."""
    return {name: x for name, x in metrics.items() if not _judges(name)}


def _judges(name: str) -> bool:
    return name in JUDGED


@dataclass
class Lags:
    """How many ticks late what was used was, over a whole run."""

    counts: Counter[int] = field(default_factory=Counter)
    name: str = LAG  # of the metric that tells them

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Add the lags of a tick."""
        self.counts.update(int(lag) for lag in metrics.get(self.name, ()))

    @staticmethod
    def of(told: Mapping[str, int], name: str = LAG) -> Lags:
        """From what `plain` made of them."""
        return Lags(Counter({int(lag): n for lag, n in told.items()}), name)

    def plain(self) -> dict[str, int]:
        """As JSON."""
        return {str(lag): n for lag, n in self.counts.items()}

    def told(self) -> dict[str, Any]:
        """Mean, largest, and how often each was; nothing where nothing can be late."""
        total = sum(self.counts.values())
        if not total:
            return {}
        mean = sum(lag * n for lag, n in self.counts.items()) / total
        histogram = {str(lag): n for lag, n in sorted(self.counts.items())}
        return {"lag": {"mean": round(mean, 4), "max": max(self.counts), "histogram": histogram}}


def new_folder(root: Path, name: str, title: str) -> Path:
    """A folder of its own for a run: named as said, or numbered after what is trained."""
    plain = title.replace(":", "-").replace("/", "-")
    if name:
        folder = root / name
        if (folder / "summary.json").exists():
            raise SettingError(
                f"{folder} already holds a run",
                f"Go on with it by `shoal resume {folder}`, choose another name, or remove it.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for number in range(1, 1_000_000):
        folder = root / f"{plain}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise SettingError(f"{root} is full", "Remove old runs.")


@contextmanager
def recorded(folder: Path, summary: dict[str, Any]) -> Iterator[None]:
    """Leave a valid summary whatever happens, and why the run failed if it did."""
    RUNNING[folder] = summary
    try:
        write_json(folder / "summary.json", summary)
        yield
    except KeyboardInterrupt:
        summary.update(status="interrupted")
        raise
    except BaseException as error:
        what = error.what if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        summary.update(status="failed", error=what)
        if isinstance(getattr(error, "state", None), dict):
            summary["ticks"] = getattr(error, "tick", summary["ticks"])
        raise
    finally:
        write_json(folder / "summary.json", summary)
        del RUNNING[folder]


def mark_interrupted() -> None:
    """Say in the folders of all runs under way that they end here, before leaving at once."""
    for folder, summary in list(RUNNING.items()):
        write_json(folder / "summary.json", summary | {"status": "interrupted"})


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let nobody else run in `folder`; the lock is gone with the process, however it ends."""
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise SettingError(
                f"the run in {folder} is still running, as process {file.read().strip() or '?'}",
                "Wait for it, or interrupt it first.",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


class Lines:
    """Rows of a file, each written whole; what finds the disk full is kept and tried again."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._file, self._say = open(path, "ab", buffering=0), say  # noqa: SIM115  it is one itself
        self._end, self._waiting = self._file.tell(), b""
        self._lock = threading.Lock()

    @property
    def is_behind(self) -> bool:
        """Whether there are rows that found no room yet."""
        return bool(self._waiting)

    def add(self, row: str) -> None:
        """Write a row, and those that found no room before."""
        with self._lock:
            first, data = not self._waiting, self._waiting + row.encode() + b"\n"
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
        """Write what found no room before, if there is some now; else say what is lost."""
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


def cut_rows(path: Path, tick: int) -> None:
    """Leave only the rows of ticks before `tick`."""
    if not path.exists():
        return
    end = 0
    with open(path, "rb+") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["tick"] >= tick:
                    break
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
        file.truncate(end)


def scalars(metrics: Mapping[str, np.ndarray], lag: str = LAG) -> dict[str, float | None]:
    """Metrics as numbers: rows are summed, of lags the mean and the largest are told.

    Of the episodes that ended the mean return and length are told; None where none ended.
    """
    found: dict[str, float | None] = {
        name: round(float(np.sum(x, dtype=np.float64)), 6)
        for name, x in metrics.items()
        if name != lag
    }
    if (count := found.get("episodes")) is not None:
        for name in PER_EPISODE & set(found):
            total = found[name]
            found[name] = round(total / count, 6) if count and total is not None else None
    if len(lags := metrics.get(lag, ())):
        found |= {"lag_mean": round(float(np.mean(lags)), 4), "lag_max": float(np.max(lags))}
    return found


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


def check_metrics(names: Iterable[str], where: str, *, judged: bool) -> None:
    """Refuse metrics of a loop that would be taken for what the run itself tells.

    `judged`: whether the loop is one that evaluates, which tells of that in metrics.
    """
    taken = (*RESERVED, *(() if judged else JUDGED))
    if found := sorted(set(names) & set(taken)):
        raise TraceError(
            f"tick shows a metric `{found[0]}`, which is what a row of metrics.jsonl says itself",
            f"Give it another name than {', '.join(taken)}.",
            where,
        )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file whole or not at all; on a full disk, over what it was."""
    draft, text = path.with_suffix(".tmp"), as_json(data, indent=2) + "\n"
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno not in FULL or not path.exists():
            raise
        with open(path, "rb+", buffering=0) as file:  # a file that is there has room of its own
            file.write(text.encode())
            file.truncate()
