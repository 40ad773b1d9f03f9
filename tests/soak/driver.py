"""A training run to be disturbed, by the `shoal` command: `driver.py POLICY FOLDER`."""

import os
import signal
import sys
from pathlib import Path

import shoal

FOLDER = "SHOAL_SOAK_FOLDER"  # where the processes of workers are listed
DIE = "SHOAL_SOAK_DIE"  # set if the driver is to be killed when it has started its workers
POLICIES = ("fine", "coarse", "served", "impala", "multi_learner")
SETTINGS = ("num_steps=8", "update_epochs=1", "num_minibatches=2")


def fine():
    return shoal.single_learner_fine(2)


def coarse():
    return shoal.single_learner_coarse(2)


def served():
    return shoal.decoupled(2, 1, 1, ring=2)


def impala():
    return shoal.impala(2)


def multi_learner():
    return shoal.multi_learner(2)


def world():
    list_workers()
    return shoal.envs.make("gymnasium:conformance.worlds:World-v0", seconds=1e-3)


def cartpole():
    list_workers()
    return shoal.envs.make("CartPole-v1")


def list_workers():
    """Write every worker's process id and name as it starts."""
    from shoal.runtime.cluster import host_agent as site
    from shoal.runtime.cluster.driver import ProcessRun

    spawn, start = site.spawn, ProcessRun.start

    def spawned(*args):
        child = spawn(*args)
        with open(Path(os.environ[FOLDER]) / "workers.txt", "a", encoding="utf-8") as file:
            file.write(f"{child.process.pid} {child.name}\n")
        return child

    def started(*args):
        start(*args)
        if DIE in os.environ:
            signal.sigtimedwait([], 0.02)  # workers have their configuration by now, and still load
            os.kill(os.getpid(), signal.SIGKILL)

    site.spawn, ProcessRun.start = spawned, started


def main(policy, folder):
    """Train until disturbed, as from the command line."""
    from shoal.cli.entry import entry

    # Host stages can't be in a program that several workers run as one.
    env = "cartpole" if policy == "multi_learner" else "world"
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    sys.argv = ["shoal", "train", "ppo", f"{__file__}:{env}", *settings, "--envs", "4"]
    sys.argv += ["--distribute", f"{__file__}:{policy}", "--backend", "processes"]
    sys.argv += ["--ticks", "1000000", "--folder", folder, "--name", "run"]
    entry()


if __name__ == "__main__":
    main(*sys.argv[1:])
