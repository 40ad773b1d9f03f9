"""Benchmarks checkpoints: seconds to write and read one, and the slowdown of the loop.

Run: python benchmarks/runs/files/checkpoints.py
"""

import shutil
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import shoal
from shoal.algorithms import PPO
from shoal.runs.files.checkpoints import read, write
from shoal.runtime.execution.snapshot import Snapshot

SIZES = (0.2, 10, 100)  # MB
TICKS = 300


def main() -> None:
    """Print both tables."""
    folder = Path(tempfile.mkdtemp())
    try:
        for size in SIZES:
            print(written(folder / str(size), size))
        for distribute in (shoal.fused(), shoal.single_learner_coarse(2)):
            rates = {every: rate(folder, distribute, every) for every in ("end", "1s", 1)}
            rates_text = ", ".join(f"{every}: {steps:,.0f}" for every, steps in rates.items())
            print(f"{distribute.name}, steps/s by how often: {rates_text}")
    finally:
        shutil.rmtree(folder)


def written(folder: Path, megabytes: float) -> str:
    """Seconds to write and to read a state of 20 arrays; the best of three."""
    count = int(megabytes * 1e6 / 4 / 20)
    rng = np.random.default_rng(0)
    values = {f"x{i}": jnp.asarray(rng.normal(size=count), jnp.float32) for i in range(20)}
    best = []
    for number in range(3):
        began = time.perf_counter()
        write(folder / str(number), Snapshot(0, values), {})
        between = time.perf_counter()
        read(folder / str(number))
        best.append((between - began, time.perf_counter() - between))
    writes, reads = (min(column) for column in zip(*best, strict=True))
    return f"{megabytes} MB: written in {writes:.2f} s, read in {reads:.2f} s"


def rate(folder: Path, distribute: shoal.DistributionPolicy, every: str | int) -> float:
    """Steps/s of PPO on CartPole with checkpoints at this interval (1: back to back)."""
    how = {"envs": 16, "ticks": TICKS, "folder": folder, "name": f"{distribute.name}-{every}"}
    env = shoal.envs.make("CartPole-v1")
    trained = shoal.train(PPO(), env, distribute, checkpoint_every=every, **how)
    return trained.summary["env_steps_per_second"]


if __name__ == "__main__":
    main()
