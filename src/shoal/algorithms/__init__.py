"""Algorithms, one file each; this is their index."""

from shoal.algorithms.dqn import DQN
from shoal.algorithms.ippo import IPPO
from shoal.algorithms.mappo import MAPPO
from shoal.algorithms.ppo import PPO
from shoal.algorithms.presets import PRESETS, Preset

ALGORITHMS = {
    "dqn": DQN,
    "ippo": IPPO,
    "mappo": MAPPO,
    "ppo": PPO,
}

__all__ = [
    "ALGORITHMS",
    "DQN",
    "IPPO",
    "MAPPO",
    "PPO",
    "PRESETS",
    "Preset",
]
