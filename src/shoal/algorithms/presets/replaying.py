"""How much SAC, TD3 and DDPG step, keep and draw, by environment; the same for each of them."""

# An update of 128 for every two steps; 64 thousand steps in all.
PENDULUM = {"steps": 4, "windows": 8, "samples_per_insert": 64.0, "min_size": 64, "capacity": 4096}
PENDULUM |= {"hidden": (64, 64), "learning_rate": 1e-3}

# A million steps, all kept, and an update of 256 for every two.
HALF_CHEETAH = {"steps": 4, "windows": 16, "samples_per_insert": 128.0}
HALF_CHEETAH |= {"min_size": 640, "capacity": 62500}

# A million steps from more environments at once, for XLA steps them together, all kept, and an
# update of 256 for every four. One seed of each was at 6,264 (SAC) and 9,317 (TD3) after 0.9
# million.
BRAX_HALF_CHEETAH = {"steps": 4, "windows": 4, "samples_per_insert": 64.0}
BRAX_HALF_CHEETAH |= {"min_size": 128, "capacity": 15625}
