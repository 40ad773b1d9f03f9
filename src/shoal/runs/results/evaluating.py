"""Evaluations of agents: by which protocol episodes were played, what came of them, on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import SettingError
from shoal.runs.files.folder import write_json
from shoal.runs.inputs.options import check_values
from shoal.runs.results.comparing import iqm
from shoal.runs.results.listing import EVALUATIONS
from shoal.shapes import Count, Seed

EPISODE = 27_000  # steps after which an episode counts with its return so far


@dataclass(frozen=True)
class Protocol:
    """How an agent is evaluated: how many whole episodes, with which actions and seed."""

    episodes: Count = 100
    _: KW_ONLY
    sampled: bool = False
    seed: Seed = 0
    steps: Count = EPISODE

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def actions(self) -> str:
        """How actions are chosen."""
        return "sampled" if self.sampled else "greedy"

    def __str__(self) -> str:
        """In a few words."""
        episodes = "1 whole episode" if self.episodes == 1 else f"{self.episodes} whole episodes"
        return f"{episodes}, {self.actions} actions, seed {self.seed}"


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The episodes that an agent played: the return and length of each, in order of seeds."""

    protocol: Protocol
    tick: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    ended: tuple[bool, ...]

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """The standard deviation of returns."""
        return float(np.std(self.returns))

    @property
    def iqm(self) -> float:
        """The interquartile mean of returns."""
        return iqm(self.returns)

    @property
    def min(self) -> float:
        """The smallest return."""
        return min(self.returns)

    @property
    def max(self) -> float:
        """The largest return."""
        return max(self.returns)

    @property
    def unfinished(self) -> int:
        """How many episodes were cut off, and count with their return so far."""
        return self.ended.count(False)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        numbers = ("mean", "std", "iqm", "min", "max")
        return {
            "tick": self.tick, **asdict(self.protocol), "actions": self.protocol.actions,
            **{f"return_{name}": round(getattr(self, name), 6) for name in numbers},
            "length_mean": float(np.mean(self.lengths)), "unfinished": self.unfinished,
            "returns": self.returns, "lengths": self.lengths,
        }  # fmt: skip

    def __repr__(self) -> str:
        """The same in two lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"tick {self.tick:,}: {self.protocol}"
        yield (
            f"return  mean {self.mean:.1f}, std {self.std:.1f}, IQM {self.iqm:.1f}, "
            f"min {self.min:.1f}, max {self.max:.1f}; length  mean {np.mean(self.lengths):.1f}"
        )
        if self.unfinished:
            yield f"{self.unfinished} of them were cut off after {self.protocol.steps:,} steps"

    def write(self, folder: Path) -> Path:
        """Write it into a run's folder; returns the file."""
        how = f"{self.protocol.actions}-{self.protocol.episodes}-seed-{self.protocol.seed}"
        path = folder / EVALUATIONS / f"tick-{self.tick}-{how}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            write_json(path, self.to_json())
        except OSError as error:
            raise SettingError(
                f"can't write the evaluation to {path}: {error.strerror}",
                "Remove what is in its place, or make room.",
            ) from error
        return path
