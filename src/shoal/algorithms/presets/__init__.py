"""Settings to learn with, by algorithm and environment; one file an algorithm."""

from shoal.algorithms.presets.a2c import A2C_PRESETS
from shoal.algorithms.presets.dqn import DQN_PRESETS
from shoal.algorithms.presets.impala import IMPALA_PRESETS
from shoal.algorithms.presets.ppo import PPO_PRESETS
from shoal.algorithms.presets.preset import Preset
from shoal.algorithms.presets.r2d2 import R2D2_PRESETS
from shoal.algorithms.presets.sac import SAC_PRESETS
from shoal.algorithms.presets.td3 import DDPG_PRESETS, TD3_PRESETS
from shoal.algorithms.presets.teams import (
    IPPO_PRESETS,
    MAPPO_PRESETS,
    QMIX_PRESETS,
    VDN_PRESETS,
)

PRESETS: dict[str, dict[str, Preset]] = {
    "a2c": A2C_PRESETS,
    "impala": IMPALA_PRESETS,
    "ddpg": DDPG_PRESETS,
    "ippo": IPPO_PRESETS,
    "mappo": MAPPO_PRESETS,
    "dqn": DQN_PRESETS,
    "ppo": PPO_PRESETS,
    "qmix": QMIX_PRESETS,
    "r2d2": R2D2_PRESETS,
    "sac": SAC_PRESETS,
    "td3": TD3_PRESETS,
    "vdn": VDN_PRESETS,
}

__all__ = ["PRESETS", "Preset"]
