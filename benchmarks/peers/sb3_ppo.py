"""Stable-Baselines3's PPO on host environments: a number of ticks in, a JSON line out.

`sb3_ppo.py halfcheetah|pong dummy|subproc THREADS`: environments one after another in this process
or each in its own, and so many threads for torch.
"""

import json
import sys
import time

import ale_py
import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack

ENVS = 8
VECTORS = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}


def halfcheetah(vector: type[VecEnv]) -> PPO:
    """Two networks of two 64-wide tanh layers; minibatches of 64."""
    env = make_vec_env("HalfCheetah-v5", ENVS, vec_env_cls=vector)  # pyright: ignore[reportArgumentType]
    nets = {"activation_fn": torch.nn.Tanh, "net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    work = {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "policy_kwargs": nets}
    return PPO("MlpPolicy", env, learning_rate=3e-4, device="cpu", **work)


def pong(vector: type[VecEnv]) -> PPO:
    """The network of Mnih et al. (2015), on four grey frames; minibatches of 256."""
    gymnasium.register_envs(ale_py)
    env = make_atari_env("PongNoFrameskip-v4", ENVS, vec_env_cls=vector)  # pyright: ignore[reportArgumentType]
    work = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "clip_range": 0.1, "ent_coef": 0.01}
    return PPO("CnnPolicy", VecFrameStack(env, 4), learning_rate=2.5e-4, device="cpu", **work)


def main(task: str, vector: str, threads: int) -> None:
    """Warm up; then, for every line with a number, train for that many ticks."""
    torch.set_num_threads(threads)
    model = {"halfcheetah": halfcheetah, "pong": pong}[task](VECTORS[vector])
    tick = ENVS * model.n_steps
    model.learn(tick)
    print(json.dumps({"tick": tick}), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        model.learn(int(line) * tick, reset_num_timesteps=False)
        seconds = time.perf_counter() - began
        print(json.dumps({"env_steps": int(line) * tick, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
