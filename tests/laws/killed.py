"""Runs a cell of the matrix until the process is killed: `killed.py FOLDER CELL`."""

import sys

import shoal
from laws.cases import ENVS, ONE
from matrix.cells import TRIED, policy_of
from shoal.algorithms import ALGORITHMS


def loop_of(algorithm):
    """An algorithm as the matrix tries it, and its world."""
    settings, world = TRIED[algorithm]
    return ALGORITHMS[algorithm](**settings), world()


def train(folder, name, cell, ticks, **how):
    """Train the loop of a cell."""
    algorithm, form, backend = cell
    how = {"envs": ENVS, "cluster": ONE, "seed": 5, "backend": backend, **how}
    how |= {"ticks": ticks, "folder": folder, "name": name}
    return shoal.train(*loop_of(algorithm), policy_of(form), **how)


def resume(folder, cell, ticks):
    """Resume the run in a folder under a cell, which may differ from the one it started with."""
    algorithm, form, backend = cell
    loop, env = loop_of(algorithm)
    how = {"cluster": ONE, "algorithm": loop, "env": env, "backend": backend, "ticks": ticks}
    return shoal.resume(folder, policy_of(form), **how)


if __name__ == "__main__":
    train(sys.argv[1], "run", sys.argv[2:], 10**9, checkpoint_every=1)
