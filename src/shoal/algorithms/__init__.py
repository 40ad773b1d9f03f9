"""Algorithms, one file each; this is their index."""

from shoal.algorithms.a2c import A2C
from shoal.algorithms.dqn import DQN
from shoal.algorithms.impala import IMPALA
from shoal.algorithms.ippo import IPPO
from shoal.algorithms.mappo import MAPPO
from shoal.algorithms.ppo import PPO
from shoal.algorithms.presets import PRESETS, Preset
from shoal.algorithms.sac import SAC

ALGORITHMS = {
    "a2c": A2C,
    "dqn": DQN,
    "impala": IMPALA,
    "ippo": IPPO,
    "mappo": MAPPO,
    "ppo": PPO,
    "sac": SAC,
}

__all__ = [
    "A2C",
    "ALGORITHMS",
    "DQN",
    "IMPALA",
    "IPPO",
    "MAPPO",
    "PPO",
    "PRESETS",
    "SAC",
    "Preset",
]
