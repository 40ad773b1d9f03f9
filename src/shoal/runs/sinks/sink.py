"""What a sink is, and the names and points of the scalars that it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shoal.runtime.logs import Log

Row = Mapping[str, Any]
AXES = ("tick", "env_steps", "seconds")
EVALUATION = {"return_mean": "eval/episodic_return", "length_mean": "eval/episodic_length"}
CHARTS = {"episode_return": "episodic_return", "episode_length": "episodic_length"}
LOSSES = {
    "clip_fraction": "clipfrac",
    **{name: name for name in ("approx_kl", "old_approx_kl", "entropy", "explained_variance")},
    **{name: name for name in ("alpha", "q_values")},
}


class Point(NamedTuple):
    """Scalars at a moment of a run: the number of environment steps, and the time."""

    tick: int
    env_steps: int
    seconds: float  # of running, as in metrics.jsonl
    at: float  # seconds since 1970
    scalars: dict[str, float]  # by their names in a sink, such as charts/episodic_return


class Sink(Protocol):
    """Takes the points of a run on a thread of its own, so that it may be slow."""

    def see(self, point: Point) -> None:
        """Take a point; an exception ends this sink, and not the run."""
        ...

    def close(self) -> None:
        """Write what is left, once the run has ended."""
        ...


class About(NamedTuple):
    """What a sink knows of the run that it belongs to."""

    folder: Path
    config: Mapping[str, Any]  # the content of run.json
    say: Log = lambda line: None  # reports a line to the user


def name_of(metric: str) -> str:
    """A metric's name in sinks, which is CleanRL's where it has one."""
    if metric in LOSSES or metric.endswith("loss"):
        return f"losses/{LOSSES.get(metric, metric)}"
    return f"charts/{CHARTS.get(metric, metric)}"


def point_of(rows: Sequence[Row], since: Point | None, at: float) -> Point:
    """The point of some rows of metrics.jsonl: the mean of each scalar, weighted by episodes."""
    last = rows[-1]
    scalars = {name_of(name): _mean(rows, name) for name in last if name not in AXES}
    found = {name: value for name, value in scalars.items() if value is not None}
    if since is not None and last["seconds"] > since.seconds and last["env_steps"]:
        rate = (last["env_steps"] - since.env_steps) / (last["seconds"] - since.seconds)
        found["charts/SPS"] = rate
    return Point(last["tick"], last["env_steps"], last["seconds"], at, found)


def evaluation_point(row: Row, seconds: float, at: float) -> Point:
    """The point of a row of evaluation.jsonl."""
    scalars = {name: float(row[key]) for key, name in EVALUATION.items()}
    return Point(row["tick"], row["env_steps"], seconds, at, scalars)


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """The mean of a scalar; of returns and lengths over episodes, None where none ended."""
    weights = [row.get("episodes") or 0.0 for row in rows] if name in CHARTS else None
    pairs = zip(rows, weights or [1.0] * len(rows), strict=True)
    known = [(row[name], weight) for row, weight in pairs if row.get(name) is not None]
    total = sum(weight for _, weight in known)
    if not total:
        return None
    return float(sum(value * weight for value, weight in known) / total)
