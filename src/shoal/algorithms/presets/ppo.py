"""PPO's settings to learn with, by environment."""

from typing import Any

from shoal.algorithms.ppo import PPO
from shoal.algorithms.presets.preset import Preset


def _ppo(target: float, **settings: Any) -> Preset:
    """Sixteen environments for 150 ticks of 128 steps, the learning rate falling all the while."""
    ticks = 150
    fast = {"num_minibatches": 8, "learning_rate": 1e-3, "anneal_lr": True}
    return Preset(PPO(**fast | settings), envs=16, ticks=ticks, target=target)


_CONTINUOUS = {
    "update_epochs": 10,
    "ent_coef": 0.0,
    "norm_obs": True,
    "norm_reward": True,
}


def _pong(family: str) -> Preset:
    """Schulman et al. (2017) as CleanRL has it, for four million steps of four frames."""
    ticks = 4000
    algorithm = PPO(clip_eps=0.1, clip_eps_vf=0.1, anneal_lr=True)
    return Preset(algorithm, envs=8, ticks=ticks, target=18, family=family)


def _minatar(ticks: int, learning_rate: float, target: float) -> Preset:
    """Sixty-four environments, 8,192 steps a tick."""
    algorithm = PPO(num_minibatches=8, learning_rate=learning_rate, anneal_lr=True)
    return Preset(algorithm, envs=64, ticks=ticks, target=target)


PPO_PRESETS = {
    "CartPole-v1": _ppo(475, norm_reward=True),
    "Acrobot-v1": _ppo(-100, norm_obs=True),
    "Pendulum-v1": _ppo(-250, gamma=0.95, **_CONTINUOUS),
    # Slower and with a bonus for entropy, or some seeds learn to stand still: it costs nothing.
    "MountainCarContinuous-v0": _ppo(
        90,
        **_CONTINUOUS | {"learning_rate": 3e-4, "gamma": 0.999, "ent_coef": 0.01},
    ),
    # What is seen first decides what is right last: without memory it is worth 0.
    "MemoryChain-bsuite": Preset(
        PPO(memory="gru", num_steps=32, num_minibatches=2, learning_rate=2e-3, anneal_lr=True),
        envs=16,
        ticks=100,
        target=0.95,
    ),
    # Ten million steps, and five: after five at a rate of 1e-3, Breakout was at 7 to 28.
    "Breakout-MinAtar": _minatar(1220, 3e-3, 30),
    "SpaceInvaders-MinAtar": _minatar(610, 1e-3, 70),
    # A million steps each.
    "LunarLander-v3": Preset(
        PPO(
            num_steps=512,
            num_minibatches=64,
            learning_rate=5e-4,
            anneal_lr=True,
            gamma=0.999,
            gae_lambda=0.98,
            norm_reward=True,
        ),
        envs=16,
        ticks=122,
        target=200,
        family="gymnasium",
    ),
    "HalfCheetah-v5": Preset(
        PPO(num_steps=256, num_minibatches=32, learning_rate=3e-4, anneal_lr=True, **_CONTINUOUS),
        envs=8,
        ticks=488,
        target=1500,
        family="gymnasium",
    ),
    # As Brax's own PPO was set, with its large batches; 20 million steps. One seed was at
    # 14,741 after 16 million.
    "halfcheetah": Preset(
        PPO(
            num_steps=20,
            update_epochs=8,
            num_minibatches=10,
            learning_rate=3e-4,
            anneal_lr=True,
            gamma=0.95,
            ent_coef=0.001,
            norm_obs=True,
            hidden=(256, 256),
        ),
        envs=1024,
        ticks=1000,
        target=3000,
        family="brax",
    ),
    "ALE/Pong-v5": _pong("gymnasium"),
    "Pong-v5": _pong("envpool"),
}
