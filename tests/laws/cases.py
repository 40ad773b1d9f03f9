"""The loops that laws are tried on, traced once, and the clusters that they run on."""

import importlib.util
from functools import cache

import pytest

import shoal
from laws.outside_loop import Chase

ENVS = 8


def cluster(devices):
    """A host with that many CPU devices."""
    return shoal.Cluster((shoal.Host("host0", 2, tuple(map(cpu, range(devices)))),))


def cpu(index):
    return shoal.Device("cpu", index)


ONE, FOUR = cluster(1), cluster(4)


def chase():
    return Chase(), None


def ppo(env):
    from shoal.algorithms import PPO
    from shoal.envs import make

    normal = {"norm_obs": True, "norm_reward": True}
    small = {
        "num_steps": 8,
        "update_epochs": 2,
        "num_minibatches": 2,
        "hidden": (8,),
        "learning_rate": 0.01,
    }
    return PPO(**small, **normal, clip_eps_vf=0.2), make(env)


def dqn():
    from shoal.algorithms import DQN
    from shoal.envs import make

    # The ring is full after four ticks, and all that Rainbow has is in use.
    replay = {
        "num_steps": 4,
        "batch_size_per_env": 2,
        "samples_per_insert": 2.0,
        "learning_starts_per_env": 6,
        "buffer_size_per_env": 18,
    }
    rainbow = {"priority_exponent": 0.6, "values": "quantile", "num_atoms": 5, "epsilon_alpha": 3.0}
    small = {"hidden": (8,), "learning_rate": 0.01, "target_update_interval": 3, "epsilon_ticks": 4}
    return DQN(**replay, **rainbow, **small), make("CartPole-v1")


def r2d2():
    from shoal.algorithms import R2D2
    from shoal.envs import make

    replay = {
        "num_steps": 4,
        "batch_size_per_env": 2,
        "samples_per_insert": 8.0,
        "learning_starts_per_env": 16,
        "buffer_size_per_env": 20,
    }
    small = {"hidden": (8,), "memory_width": 8, "learning_rate": 0.01, "target_update_interval": 3}
    return R2D2(**replay, **small, burn_in=4, sequence_length=8, n_step=3, epsilon_ticks=4), make(
        "CartPole-v1"
    )


def continuous(kind):
    from shoal import algorithms
    from shoal.envs import make

    # The ring is full after four ticks, and every window may cross the end of an episode.
    replay = {
        "num_steps": 4,
        "batch_size_per_env": 2,
        "samples_per_insert": 2.0,
        "learning_starts_per_env": 6,
        "buffer_size_per_env": 18,
    }
    small = {"hidden": (8,), "learning_rate": 0.01, "n_step": 2}
    env = make("Pendulum-v1", max_steps_in_episode=9)
    return getattr(algorithms, kind)(**replay, **small), env


WRITTEN = {
    "chase": chase,
    "ppo": lambda: ppo("CartPole-v1"),
    "ppo, continuous": lambda: ppo("Pendulum-v1"),
    "dqn": dqn,
    "r2d2": r2d2,
    "sac": lambda: continuous("SAC"),
    "td3": lambda: continuous("TD3"),
}
no_gymnax = pytest.mark.skipif(not importlib.util.find_spec("gymnax"), reason="needs gymnax")
CHASE, PPO, CONTINUOUS, DQN, *_ = (
    pytest.param(name, marks=() if name == "chase" else no_gymnax) for name in WRITTEN
)


@cache
def graph_of(name):
    algorithm, env = WRITTEN[name]()
    return shoal.trace(algorithm, env, envs=ENVS)


@cache
def start_of(name):
    return graph_of(name).origin.start(0, ENVS)
