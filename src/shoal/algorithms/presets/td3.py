"""TD3's and DDPG's settings, by environment; those for Brax were not run to the end."""

from shoal.algorithms.presets.preset import Preset
from shoal.algorithms.presets.replaying import BRAX_HALF_CHEETAH, HALF_CHEETAH, PENDULUM
from shoal.algorithms.td3 import DDPG, TD3

TD3_PRESETS = {
    "Pendulum-v1": Preset(TD3(**PENDULUM), envs=16, ticks=1000, target=-200),
    "HalfCheetah-v5": Preset(
        TD3(**HALF_CHEETAH), envs=16, ticks=15625, target=7000, family="gymnasium"
    ),
    "halfcheetah": Preset(
        TD3(**BRAX_HALF_CHEETAH), envs=64, ticks=3906, target=5000, family="brax"
    ),
}

DDPG_PRESETS = {"Pendulum-v1": Preset(DDPG(**PENDULUM), envs=16, ticks=1000, target=-200)}
