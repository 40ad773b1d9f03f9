"""Algorithms, one file each; this is their index."""

from shoal.algorithms.ppo import PPO

ALGORITHMS = {"ppo": PPO}

__all__ = ["ALGORITHMS", "PPO"]
