"""Algorithms, one file each; this is their index."""

from shoal.algorithms.ppo import PPO
from shoal.algorithms.presets import PRESETS, Preset

ALGORITHMS = {"ppo": PPO}

__all__ = ["ALGORITHMS", "PPO", "PRESETS", "Preset"]
