"""R2D2's settings, by environment."""

from shoal.algorithms.presets.preset import Preset
from shoal.algorithms.r2d2 import R2D2

# What is seen first decides what is right last: without memory it is worth 0. Chunks of eight
# steps hold an episode of six.
_CHAIN = R2D2(
    num_steps=8,
    burn_in=8,
    sequence_length=16,
    learning_starts_per_env=64,
    buffer_size_per_env=2048,
    learning_rate=1e-3,
    target_update_interval=50,
)

_CART_POLE = R2D2(samples_per_insert=16.0, n_step=10, target_update_interval=200)

R2D2_PRESETS = {
    "CartPole-v1": Preset(_CART_POLE, envs=16, ticks=1800, target=475),
    "MemoryChain-bsuite": Preset(_CHAIN, envs=16, ticks=600, target=0.9),
}
