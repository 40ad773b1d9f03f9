"""A training run to be disturbed: `driver.py POLICY FOLDER`; its workers are told of in a file."""

import os
import signal
import sys
from pathlib import Path

import shoal
from shoal.algorithms import PPO
from shoal.runtime import processes

WORLD = "gymnasium:conformance.worlds:World-v0"
POLICIES = {
    "fine": lambda: shoal.single_learner_fine(2),
    "coarse": lambda: shoal.single_learner_coarse(2),
    "served": lambda: shoal.decoupled(2, 1, 1, ring=2),
    "impala": lambda: shoal.impala(2),
    "multi_learner": lambda: shoal.multi_learner(2),
}


def tell(folder):
    """Let every worker's process id and name be written as it starts."""
    spawn = processes.spawn

    def told(*args):
        child = spawn(*args)
        with open(folder / "workers.txt", "a", encoding="utf-8") as file:
            file.write(f"{child.process.pid} {child.name}\n")
        return child

    processes.spawn = told


def die_when_started():
    """Let the driver be killed as soon as all workers have their orders and none has read them."""
    start = processes.Processes.start

    def started(*args):
        start(*args)
        signal.sigtimedwait([], 0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    processes.Processes.start = started


def main(policy, folder):
    tell(folder)
    if "--die" in sys.argv:
        die_when_started()
    # Host stages can't be in a program that several workers run as one.
    whole = policy == "multi_learner"
    env = shoal.envs.make("CartPole-v1") if whole else shoal.envs.make(WORLD, seconds=1e-3)
    algorithm = PPO(steps=8, epochs=1, minibatches=2, hidden=(8,))
    how = {"envs": 4, "ticks": 1_000_000, "backend": "processes", "folder": folder, "name": "run"}
    shoal.train(algorithm, env, POLICIES[policy](), **how)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
