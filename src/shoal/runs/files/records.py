"""Statistics of a run's ticks: episodes, evaluations, lags, and rows of metrics."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import TraceError
from shoal.runs.files.folder import Lines, as_json
from shoal.runtime.execution.metrics import LAG

LAST_EPISODES = 100
PER_EPISODE = {"episode_return", "episode_length"}  # summed by ticks, reported as means
# Names that a row of metrics.jsonl has of its own.
RESERVED = ("tick", "env_steps", "seconds", "return_mean", "lag_mean", "lag_max")
# The metrics of an evaluation, all or none of them.
EVALUATION = "evaluation_"
JUDGED = tuple(f"{EVALUATION}{name}" for name in ("episodes", "return", "length", "unfinished"))


@dataclass
class Episodes:
    """Returns of the newest episodes, aggregated per tick."""

    newest: deque[tuple[float, float]] = field(default_factory=deque)
    total: int = 0

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Add the episodes that ended in a tick, and drop those beyond the last hundred."""
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
    def of(data: Mapping[str, Any]) -> Episodes:
        """Restore from the result of `plain`."""
        newest = deque((float(n), float(r)) for n, r in data.get("newest", []))
        return Episodes(newest, data.get("total", 0))

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
    """Evaluations of a run, each written as a row of a file."""

    path: Path
    steps: Callable[[int], int]  # of all environments before a tick
    say: Callable[[str], None]
    newest: dict[str, Any] = field(default_factory=dict)
    _lines: Lines | None = None

    def see(
        self, tick: int, metrics: Mapping[str, np.ndarray], show: Callable[[int, float], None]
    ) -> dict[str, Any]:
        """Log and show the evaluation at `tick`, if there was one; the newest so far."""
        sums = {n.removeprefix(EVALUATION): float(x) for n, x in metrics.items() if _judges(n)}
        if not (count := sums.get("episodes")):
            return self.summary()
        means = {f"{name}_mean": round(sums[name] / count, 4) for name in ("return", "length")}
        counts = {name: int(sums[name]) for name in ("episodes", "unfinished")}
        self.newest = {"tick": tick, "env_steps": self.steps(tick), **means, **counts}
        self._lines = self._lines or Lines(self.path, self.say)
        self._lines.add(as_json(self.newest))
        show(tick, means["return_mean"])
        if cut := counts["unfinished"]:
            self.say(
                f"{cut} of {counts['episodes']} episodes of the evaluation at tick {tick} had not "
                "ended after the most steps that one may have: they count with their return so far"
            )
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """The newest evaluation; empty where there was none."""
        return {"evaluation": self.newest} if self.newest else {}

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()


def without_evaluation(metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The metrics of training alone."""
    return {name: x for name, x in metrics.items() if not _judges(name)}


def _judges(name: str) -> bool:
    return name in JUDGED


@dataclass
class Lags:
    """Histogram of the lags, in ticks, of the values used in a run."""

    counts: Counter[int] = field(default_factory=Counter)
    name: str = LAG  # of their metric

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Add the lags of a tick."""
        self.counts.update(int(lag) for lag in metrics.get(self.name, ()))

    @staticmethod
    def of(data: Mapping[str, int], name: str = LAG) -> Lags:
        """Restore from the result of `plain`."""
        return Lags(Counter({int(lag): n for lag, n in data.items()}), name)

    def plain(self) -> dict[str, int]:
        """As JSON."""
        return {str(lag): n for lag, n in self.counts.items()}

    def summary(self) -> dict[str, Any]:
        """The mean, the largest and a histogram; empty where no value can lag."""
        total = sum(self.counts.values())
        if not total:
            return {}
        mean = sum(lag * n for lag, n in self.counts.items()) / total
        histogram = {str(lag): n for lag, n in sorted(self.counts.items())}
        return {"lag": {"mean": round(mean, 4), "max": max(self.counts), "histogram": histogram}}


def scalars(metrics: Mapping[str, np.ndarray], lag: str = LAG) -> dict[str, float | None]:
    """Metrics as numbers: rows are summed; of lags, the mean and the largest.

    Of the episodes that ended, the mean return and length; None where none ended.
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


def check_metrics(names: Iterable[str], where: str, *, judged: bool) -> None:
    """Refuse metrics of a loop that have the names of columns that the run itself writes.

    `judged`: whether the loop is one that evaluates, which reports that in metrics.
    """
    taken = (*RESERVED, *(() if judged else JUDGED))
    if found := sorted(set(names) & set(taken)):
        raise TraceError(
            f"tick shows a metric `{found[0]}`, which is what a row of metrics.jsonl says itself",
            f"Give it another name than {', '.join(taken)}.",
            where,
        )
