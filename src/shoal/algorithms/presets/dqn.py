"""DQN's settings, by environment."""

from typing import Any

from shoal.algorithms.dqn import DQN
from shoal.algorithms.presets.preset import Preset

# Sixteen environments of eight steps a tick, and updates of 128.
_CLASSIC: dict[str, Any] = {
    "steps": 8,
    "windows": 8,
    "samples_per_insert": 32.0,
    "min_size": 64,
    "capacity": 4096,
}
_CLASSIC |= {"learning_rate": 5e-4, "n_step": 10, "target_every": 200, "epsilon_ticks": 100}


def _minatar(target: float, **settings: Any) -> Preset:
    """Young and Tian's (2019) steps and replay, in larger updates of fewer samples; prioritised."""
    replay: dict[str, Any] = {"steps": 8, "windows": 4, "samples_per_insert": 8.0, "min_size": 320}
    replay |= {"capacity": 6250, "keep_as": "bool", "priority_exponent": 0.5}
    learning: dict[str, Any] = {
        "learning_rate": 2.5e-4,
        "n_step": 3,
        "target_every": 500,
        "epsilon_ticks": 800,
    }
    return Preset(DQN(**replay | learning | settings), envs=16, ticks=39000, target=target)


DQN_PRESETS = {
    "CartPole-v1": Preset(DQN(**_CLASSIC), envs=16, ticks=800, target=475),
    "Acrobot-v1": Preset(DQN(**{**_CLASSIC, "n_step": 5}), envs=16, ticks=800, target=-100),
    # Five million steps each; not run to the end yet, so the targets are hopes.
    "Breakout-MinAtar": _minatar(8),
    "SpaceInvaders-MinAtar": _minatar(35),
}
