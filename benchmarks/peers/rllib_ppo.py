"""RLlib's PPO on CartPole: a number of ticks in, a JSON line out.

`rllib_ppo.py RUNNERS ENVS STEPS EPOCHS MINIBATCHES`: so many environments in all, divided among so
many processes; a tick is that many steps of each, and its learning.
"""

import json
import logging
import sys
import time

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main(runners: int, envs: int, steps: int, epochs: int, minibatches: int) -> None:
    """Warm up; then, for every line with a number, train for that many ticks."""
    ray.init("local", include_dashboard=False, log_to_driver=False, num_cpus=runners + 1,
             logging_level=logging.ERROR)  # fmt: skip
    tick = envs * steps
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=envs // runners,
            rollout_fragment_length=steps,
        )
        .training(
            lr=2.5e-4,
            train_batch_size_per_learner=tick,
            minibatch_size=tick // minibatches,
            num_epochs=epochs,
            grad_clip=0.5,
            entropy_coeff=0.01,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
            )
        )
    )
    algorithm = config.build_algo()
    for _ in range(3):
        algorithm.train()
    print(json.dumps({"tick": tick}), flush=True)
    for line in sys.stdin:
        began, count = time.perf_counter(), 0
        for _ in range(int(line)):
            count += int(algorithm.train()["env_runners"]["num_env_steps_sampled"])
        seconds = time.perf_counter() - began
        print(json.dumps({"env_steps": count, "seconds": seconds}), flush=True)
    algorithm.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
