"""Measures what sinks cost: fused PPO on CartPole, with metrics.jsonl alone and with all sinks.

Rounds alternate between the sides, so that a busy machine troubles both alike. CPU seconds count
all threads of the process, those of XLA and of the sinks too, and hardly depend on the machine's
load; both figures leave compilation out.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import shoal
from shoal.algorithms import PPO

ALGORITHM = PPO(num_steps=128, update_epochs=4, num_minibatches=4)
SIDES = {"metrics.jsonl alone": (), "tensorboard and csv too": ("tensorboard", "csv")}


@dataclass(frozen=True)
class Round:
    """What a million steps took."""

    seconds: float
    cpu_seconds: float


def main() -> None:
    """Print the medians of both sides, and the difference in CPU time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=2000)
    parser.add_argument("--envs", type=int, default=16)
    options = parser.parse_args()
    found: dict[str, list[Round]] = {name: [] for name in SIDES}
    for _ in range(options.rounds):
        for name, log in SIDES.items():
            found[name].append(one_round(log, options.ticks, options.envs))
    means = {
        name: {
            "seconds": median(r.seconds for r in rounds),
            "cpu": median(r.cpu_seconds for r in rounds),
        }
        for name, rounds in found.items()
    }
    for name, one in means.items():
        print(f"{name:24} {one['seconds']:7.2f} s {one['cpu']:7.2f} s of CPU a million steps")
    plain, full = (means[name]["cpu"] for name in SIDES)
    print(f"all sinks cost {100 * (full / plain - 1):.1f} % of CPU")
    print(json.dumps(means))


def one_round(log: tuple[str, ...], ticks: int, envs: int) -> Round:
    """Train, and measure from the first tick that is logged to the end of the run."""
    began: list[float] = []

    def on_tick(row: dict) -> None:
        if not began:
            began.extend((time.perf_counter(), time.process_time(), row["env_steps"]))

    with tempfile.TemporaryDirectory() as folder:
        done = shoal.train(
            ALGORITHM, "CartPole-v1", envs=envs, ticks=ticks, folder=Path(folder), log=log,
            on_tick=on_tick, checkpoint_every="end",
        )  # fmt: skip
    millions = (done.summary["env_steps"] - began[2]) / 1e6
    seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    return Round(seconds / millions, cpu / millions)


if __name__ == "__main__":
    main()
