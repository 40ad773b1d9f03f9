"""SAC's settings, by environment; those for Brax's halfcheetah were not run to the end yet."""

from shoal.algorithms.presets.preset import Preset
from shoal.algorithms.presets.replaying import BRAX_HALF_CHEETAH, HALF_CHEETAH, PENDULUM
from shoal.algorithms.sac import SAC

SAC_PRESETS = {
    "Pendulum-v1": Preset(SAC(**PENDULUM), envs=16, ticks=1000, target=-200),
    "HalfCheetah-v5": Preset(
        SAC(**HALF_CHEETAH), envs=16, ticks=15625, target=6000, family="gymnasium"
    ),
    "halfcheetah": Preset(
        SAC(**BRAX_HALF_CHEETAH), envs=64, ticks=3906, target=5000, family="brax"
    ),
}
