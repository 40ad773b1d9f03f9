"""Settings known to learn, by algorithm and environment."""

from dataclasses import dataclass
from typing import Any

from shoal.algorithms.ppo import PPO


@dataclass(frozen=True, slots=True)
class Preset:
    """With so many environments, after so many ticks, an episode returns `target` or more.

    That is the mean of the last 100 episodes, and held for each of a dozen seeds.
    """

    algorithm: Any
    envs: int
    ticks: int
    target: float


def _ppo(target: float, **settings: Any) -> Preset:
    """Sixteen environments for 150 ticks of 128 steps, the learning rate falling all the while."""
    ticks = 150
    fast = {"minibatches": 8, "learning_rate": 1e-3, "total_ticks": ticks}
    return Preset(PPO(**fast | settings), envs=16, ticks=ticks, target=target)


_CONTINUOUS = {
    "epochs": 10,
    "entropy_weight": 0.0,
    "normalise_observations": True,
    "normalise_rewards": True,
}

PRESETS: dict[str, dict[str, Preset]] = {
    "ppo": {
        "CartPole-v1": _ppo(475, normalise_rewards=True),
        "Acrobot-v1": _ppo(-100, normalise_observations=True),
        "Pendulum-v1": _ppo(-250, discount=0.95, **_CONTINUOUS),
        # Slower and with a bonus for entropy, or some seeds learn to stand still: it costs nothing.
        "MountainCarContinuous-v0": _ppo(
            90,
            **_CONTINUOUS | {"learning_rate": 3e-4, "discount": 0.999, "entropy_weight": 0.01},
        ),
    },
}
