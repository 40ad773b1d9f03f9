"""A2C's settings to learn with, by environment."""

from typing import Any

from shoal.algorithms.a2c import A2C
from shoal.algorithms.presets.preset import Preset


def _a2c(ticks: int, envs: int, target: float, **settings: Any) -> Preset:
    """Ticks of 16 steps, the learning rate falling all the while."""
    algorithm = A2C(**{"gae_lambda": 0.95, "anneal_lr": True} | settings)
    return Preset(algorithm, envs=envs, ticks=ticks, target=target)


_ACROBOT = {"num_steps": 32, "learning_rate": 2e-3, "norm_obs": True}
_ACROBOT |= {"max_grad_norm": 100.0}

A2C_PRESETS = {
    "CartPole-v1": _a2c(2000, 16, 450, learning_rate=3e-3),
    # Values are far from 0 here: their slopes would leave little of a short gradient to actions.
    "Acrobot-v1": _a2c(2000, 16, -100, **_ACROBOT),
    # Five million steps each.
    "Breakout-MinAtar": _a2c(4900, 64, 5, learning_rate=1e-3),
    "SpaceInvaders-MinAtar": _a2c(4900, 64, 20, learning_rate=1e-3),
}
