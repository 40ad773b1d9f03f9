"""What a run leaves: its folder, with a summary that is true at every moment."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.errors import SettingError, ShoalError

LAST_EPISODES = 100
LAG = "lag"  # the metric that says how many ticks late each thing was that a tick used
EVALUATION = "evaluation_"  # how metrics begin that tell of an evaluation
RUNNING: dict[Path, dict[str, Any]] = {}  # folders of runs under way, and their summaries so far


@dataclass
class Episodes:
    """Returns of the newest episodes, a tick's worth at a time."""

    newest: deque[tuple[float, float]] = field(default_factory=deque)
    total: int = 0

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Add the episodes that ended in a tick, and forget those beyond the last hundred."""
        count = float(np.sum(metrics.get("episodes", 0)))
        if not count:
            return
        self.total += int(count)
        self.newest.append((count, float(np.sum(metrics["episode_return"]))))
        while sum(n for n, _ in self.newest) - self.newest[0][0] >= LAST_EPISODES:
            self.newest.popleft()

    @property
    def mean(self) -> float | None:
        """The mean return of at least the last hundred episodes (fewer if there were fewer)."""
        count = sum(n for n, _ in self.newest)
        return sum(r for _, r in self.newest) / count if count else None


@dataclass
class Evaluations:
    """How the episodes went that were played with what had been learnt, a line of a file each."""

    path: Path
    steps: int  # of all environments in a tick
    newest: dict[str, Any] = field(default_factory=dict)

    def see(
        self, tick: int, metrics: Mapping[str, np.ndarray], tell: Callable[[int, float], None]
    ) -> dict[str, Any]:
        """Write down and tell the evaluation at `tick`, if there was one; the newest so far."""
        told = {n.removeprefix(EVALUATION): float(x) for n, x in metrics.items() if _judges(n)}
        if not (count := told.get("episodes")):
            return self.told()
        means = {f"{name}_mean": round(told[name] / count, 4) for name in ("return", "length")}
        counts = {name: int(told[name]) for name in ("episodes", "unfinished")}
        self.newest = {"tick": tick, "env_steps": tick * self.steps, **means, **counts}
        with open(self.path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(self.newest) + "\n")
        tell(tick, means["return_mean"])
        return self.told()

    def told(self) -> dict[str, Any]:
        """The newest evaluation; nothing where there was none."""
        return {"evaluation": self.newest} if self.newest else {}


def without_evaluation(metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a tick shows of training."""
    return {name: x for name, x in metrics.items() if not _judges(name)}


def _judges(name: str) -> bool:
    return name.startswith(EVALUATION)


@dataclass
class Lags:
    """How many ticks late what was used was, over a whole run."""

    counts: Counter[int] = field(default_factory=Counter)

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Add the lags of a tick."""
        self.counts.update(int(lag) for lag in metrics.get(LAG, ()))

    def told(self) -> dict[str, Any]:
        """Mean, largest, and how often each was; nothing where nothing can be late."""
        total = sum(self.counts.values())
        if not total:
            return {}
        mean = sum(lag * n for lag, n in self.counts.items()) / total
        histogram = {str(lag): n for lag, n in sorted(self.counts.items())}
        return {LAG: {"mean": round(mean, 4), "max": max(self.counts), "histogram": histogram}}


def new_folder(root: Path, name: str, title: str) -> Path:
    """A folder of its own for a run: named as said, or numbered after what is trained."""
    plain = title.replace(":", "-").replace("/", "-")
    if name:
        folder = root / name
        if (folder / "summary.json").exists():
            raise SettingError(
                f"{folder} already holds a run", "Choose another name, or remove it."
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
    """Leave a valid folder whatever happens: why the run failed, and the last good state."""
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
        if isinstance(state := getattr(error, "state", None), dict):
            summary["ticks"] = getattr(error, "tick", summary["ticks"])
            save_values(folder / "state.npz", state)
        raise
    finally:
        write_json(folder / "summary.json", summary)
        del RUNNING[folder]


def mark_interrupted() -> None:
    """Say in the folders of all runs under way that they end here, before leaving at once."""
    for folder, summary in list(RUNNING.items()):
        write_json(folder / "summary.json", summary | {"status": "interrupted"})


def scalars(metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics as numbers: rows are summed, of lags the mean and the largest are told."""
    found = {name: round(float(np.sum(x)), 6) for name, x in metrics.items() if name != LAG}
    if len(lags := metrics.get(LAG, ())):
        found |= {"lag_mean": round(float(np.mean(lags)), 4), "lag_max": float(np.max(lags))}
    return found


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def save_values(path: Path, values: Mapping[str, Any]) -> None:
    """Carried values by name, as plain arrays; keys as their data."""
    plain = {}
    for name, x in values.items():
        is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        plain[name] = np.asarray(jax.random.key_data(x) if is_key else x)
    draft = path.with_name(f"{path.stem}.tmp.npz")
    np.savez(draft, **plain)
    draft.replace(path)
