"""What a preset is: settings to learn with."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """With so many environments, after so many ticks, an episode returns `target` or more.

    That is the mean of the last 100 episodes in the environment of this `family`, for most seeds;
    docs/results.md has which were tried, and what came of each.
    """

    algorithm: Any
    envs: int
    ticks: int
    target: float
    family: str = "gymnax"
