"""IMPALA's settings to learn with, by environment."""

from typing import Any

from shoal.algorithms.impala import IMPALA
from shoal.algorithms.presets.preset import Preset


def _impala(ticks: int, envs: int, target: float, **settings: Any) -> Preset:
    """Ticks of 16 steps, the learning rate falling all the while."""
    usual: dict[str, Any] = {"num_steps": 16, "learning_rate": 1e-3, "norm_reward": False}
    algorithm = IMPALA(anneal_lr=True, **{**usual, **settings})
    return Preset(algorithm, envs=envs, ticks=ticks, target=target)


_ACROBOT = {"num_steps": 32, "vtrace_lambda": 0.95, "ent_coef": 0.1, "norm_obs": True}

IMPALA_PRESETS = {
    "CartPole-v1": _impala(1500, 16, 475, num_steps=32, norm_reward=True),
    # Rewards are large beside the usual bonus for entropy, and without one it soon stands still.
    "Acrobot-v1": _impala(2000, 16, -110, **_ACROBOT),
    # Ten million steps, and five: after five, Breakout was at 7 to 17.
    "Breakout-MinAtar": _impala(9800, 64, 10, learning_rate=4e-3),
    "SpaceInvaders-MinAtar": _impala(4900, 64, 50),
}
