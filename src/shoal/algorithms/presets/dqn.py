"""DQN's settings, by environment."""

from typing import Any

from shoal.algorithms.dqn import DQN
from shoal.algorithms.presets.preset import Preset

# Sixteen environments of eight steps a tick, and updates of 128.
_CLASSIC: dict[str, Any] = {
    "num_steps": 8,
    "batch_size_per_env": 8,
    "samples_per_insert": 32.0,
    "learning_starts_per_env": 64,
    "buffer_size_per_env": 4096,
}
_CLASSIC |= {
    "learning_rate": 5e-4,
    "n_step": 10,
    "target_update_interval": 200,
    "epsilon_ticks": 100,
}


def _minatar(target: float) -> Preset:
    """Young and Tian's (2019) five million steps and replay of 100,000, in updates of 256."""
    replay: dict[str, Any] = {
        "num_steps": 8,
        "batch_size_per_env": 4,
        "samples_per_insert": 8.0,
        "learning_starts_per_env": 80,
    }
    replay |= {"buffer_size_per_env": 1600, "buffer_dtype": "bool", "priority_exponent": 0.5}
    learning = {
        "learning_rate": 2.5e-4,
        "n_step": 3,
        "target_update_interval": 500,
        "epsilon_ticks": 200,
    }
    return Preset(DQN(**replay | learning), envs=64, ticks=9766, target=target)


DQN_PRESETS = {
    "CartPole-v1": Preset(DQN(**_CLASSIC), envs=16, ticks=1600, target=475),
    "Acrobot-v1": Preset(DQN(**{**_CLASSIC, "n_step": 5}), envs=16, ticks=800, target=-100),
    "Breakout-MinAtar": _minatar(20),
    "SpaceInvaders-MinAtar": _minatar(70),
}
