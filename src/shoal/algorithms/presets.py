"""Settings known to learn, by algorithm and environment."""

from dataclasses import dataclass
from typing import Any

from shoal.algorithms.ppo import PPO


@dataclass(frozen=True, slots=True)
class Preset:
    """With so many environments, after so many ticks, an episode returns `target` or more.

    That is the mean of the last 100 episodes in the environment of this `family`; it held for each
    of a dozen seeds of gymnax's environments.
    """

    algorithm: Any
    envs: int
    ticks: int
    target: float
    family: str = "gymnax"


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


def _pong(family: str) -> Preset:
    """Schulman et al. (2017) as CleanRL has it, for four million steps of four frames."""
    ticks = 4000
    algorithm = PPO(clip=0.1, value_clip=0.1, total_ticks=ticks)
    return Preset(algorithm, envs=8, ticks=ticks, target=18, family=family)


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
        # A million steps each.
        "LunarLander-v3": Preset(
            PPO(
                steps=512,
                minibatches=64,
                learning_rate=5e-4,
                total_ticks=122,
                discount=0.999,
                gae_lambda=0.98,
                normalise_rewards=True,
            ),
            envs=16,
            ticks=122,
            target=200,
            family="gymnasium",
        ),
        "HalfCheetah-v5": Preset(
            PPO(steps=256, minibatches=32, learning_rate=3e-4, total_ticks=488, **_CONTINUOUS),
            envs=8,
            ticks=488,
            target=1500,
            family="gymnasium",
        ),
        "ALE/Pong-v5": _pong("gymnasium"),
        "Pong-v5": _pong("envpool"),
    },
}
