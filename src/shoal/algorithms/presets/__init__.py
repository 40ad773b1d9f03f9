"""Settings known to learn, by algorithm and environment; one file an algorithm."""

from shoal.algorithms.presets.ppo import PPO_PRESETS
from shoal.algorithms.presets.preset import Preset

PRESETS: dict[str, dict[str, Preset]] = {"ppo": PPO_PRESETS}

__all__ = ["PRESETS", "Preset"]
