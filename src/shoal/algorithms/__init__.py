"""Algorithms, one file each; this is their index."""

from shoal.algorithms.dqn import DQN
from shoal.algorithms.ppo import PPO
from shoal.algorithms.presets import PRESETS, Preset

ALGORITHMS = {"dqn": DQN, "ppo": PPO}

__all__ = ["ALGORITHMS", "DQN", "PPO", "PRESETS", "Preset"]
