"""How much SAC, TD3 and DDPG step, keep and draw, by environment; the same for each of them."""

# An update of 128 for every two steps; 64 thousand steps in all.
PENDULUM = {
    "num_steps": 4,
    "batch_size_per_env": 8,
    "samples_per_insert": 64.0,
    "learning_starts_per_env": 64,
    "buffer_size_per_env": 4096,
}
PENDULUM |= {"hidden": (64, 64), "learning_rate": 1e-3}

# A million steps, all kept, and an update of 256 for every two.
HALF_CHEETAH = {"num_steps": 4, "batch_size_per_env": 16, "samples_per_insert": 128.0}
HALF_CHEETAH |= {"learning_starts_per_env": 640, "buffer_size_per_env": 62500}

# A million steps from more environments at once, for XLA steps them together, all kept, and an
# update of 256 for every four. One seed of each was at 6,264 (SAC) and 9,317 (TD3) after 0.9
# million.
BRAX_HALF_CHEETAH = {"num_steps": 4, "batch_size_per_env": 4, "samples_per_insert": 64.0}
BRAX_HALF_CHEETAH |= {"learning_starts_per_env": 128, "buffer_size_per_env": 15625}
