"""Measures what sinks and spans cost: PPO on CartPole, fused and with an environment in Python.

`sinks` compares metrics.jsonl alone with all sinks, `fused` and `host` runs without and with spans.

Rounds alternate between the sides, so that a busy machine troubles both alike. CPU seconds count
all threads of the process and of its workers, those of XLA and of the sinks too, and hardly depend
on the machine's load; both figures leave compilation out.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import shoal
from shoal.algorithms import PPO

ALGORITHM = PPO(num_steps=128, update_epochs=4, num_minibatches=4)
SINKS = ("tensorboard", "csv")
SIDES = {
    "sinks": ("metrics.jsonl alone", "tensorboard and csv too"),
    "fused": ("without spans", "with spans"),
    "host": ("without spans", "with spans"),
}
LATER = 3  # rows after which the clocks start


@dataclass(frozen=True)
class Round:
    """What a million steps took."""

    seconds: float
    cpu_seconds: float


def main() -> None:
    """Print the medians of both sides, and the difference in CPU time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=SIDES, default="host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=2000)
    parser.add_argument("--envs", type=int, default=16)
    options = parser.parse_args()
    sides = SIDES[options.what]
    found: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in sides[:: 1 if number % 2 else -1]:
            found[name].append(one_round(options, name))
    means = {
        name: {
            "seconds": median(r.seconds for r in rounds),
            "cpu": median(r.cpu_seconds for r in rounds),
        }
        for name, rounds in found.items()
    }
    for name, one in means.items():
        print(f"{name:24} {one['seconds']:7.2f} s {one['cpu']:7.2f} s of CPU a million steps")
    plain, full = (means[name]["cpu"] for name in sides)
    print(f"{sides[1]}: {100 * (full / plain - 1):+.1f} % of CPU")
    print(json.dumps(means))


def one_round(options: argparse.Namespace, side: str) -> Round:
    """Train, and measure from an early tick to the end of the run."""
    os.environ["SHOAL_SPANS"] = "on" if side == "with spans" else "off"
    clocks: list[tuple[float, float, int]] = []

    def on_tick(row: dict) -> None:
        if row["tick"] in (LATER, options.ticks - 1):
            clocks.append((time.perf_counter(), cpu_seconds(), row["env_steps"]))

    is_host = options.what == "host"
    cut = (shoal.single_learner_coarse(actors=1),) if is_host else ()
    with tempfile.TemporaryDirectory() as folder:
        shoal.train(
            ALGORITHM, "gymnasium:CartPole-v1" if is_host else "CartPole-v1", *cut,
            envs=options.envs, ticks=options.ticks, folder=Path(folder), checkpoint_every="end",
            log=SINKS if side == SIDES["sinks"][1] else (), on_tick=on_tick,
            backend="processes" if is_host else "threads",
        )  # fmt: skip
    (began, first_cpu, first), (ended, last_cpu, last) = clocks
    millions = (last - first) / 1e6
    return Round((ended - began) / millions, (last_cpu - first_cpu) / millions)


def cpu_seconds() -> float:
    """CPU time of this process and its children that run."""
    tasks = Path("/proc/self/task").glob("*/children")
    pids = [os.getpid(), *(int(pid) for task in tasks for pid in task.read_text().split())]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
