"""Algorithms, one file each; this is their index."""

from shoal.algorithms.a2c import A2C
from shoal.algorithms.dqn import DQN
from shoal.algorithms.impala import IMPALA
from shoal.algorithms.ippo import IPPO
from shoal.algorithms.mappo import MAPPO
from shoal.algorithms.ppo import PPO
from shoal.algorithms.presets import PRESETS, Preset
from shoal.algorithms.qmix import QMIX
from shoal.algorithms.r2d2 import R2D2
from shoal.algorithms.sac import SAC
from shoal.algorithms.td3 import DDPG, TD3
from shoal.algorithms.vdn import VDN

ALGORITHMS = {
    "a2c": A2C,
    "ddpg": DDPG,
    "dqn": DQN,
    "impala": IMPALA,
    "ippo": IPPO,
    "mappo": MAPPO,
    "ppo": PPO,
    "qmix": QMIX,
    "r2d2": R2D2,
    "sac": SAC,
    "td3": TD3,
    "vdn": VDN,
}

__all__ = [
    "A2C",
    "ALGORITHMS",
    "DDPG",
    "DQN",
    "IMPALA",
    "IPPO",
    "MAPPO",
    "PPO",
    "PRESETS",
    "QMIX",
    "R2D2",
    "SAC",
    "TD3",
    "VDN",
    "Preset",
]
