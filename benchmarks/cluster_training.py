"""Benchmarks training on a Ray cluster, against the processes backend and RLlib.

PPO and IMPALA on CartPole, two workers that act and one that learns, all on this host. RLlib's PPO
has as many workers and environments, the same network, batch, epochs and minibatches. Environment
steps/s with learning, after a warm-up. Rounds alternate between the sides; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import jax
import ray
from rich.console import Console
from rich.table import Table

import shoal
from peers.made import python_of
from shoal.algorithms import IMPALA, PPO
from shoal.envs.registry import make
from shoal.runtime.cluster.ray import ray_cluster

HERE = Path(__file__).parent
ACTORS, WARM, PPO_STEPS, EPOCHS, MINIBATCHES = 2, 20, 128, 4, 4
LOOPS: dict[str, tuple[Any, shoal.DistributionPolicy]] = {
    "PPO": (
        PPO(num_steps=PPO_STEPS, update_epochs=EPOCHS, num_minibatches=MINIBATCHES),
        shoal.single_learner_coarse(ACTORS),
    ),
    "PPO, lag 1": (
        PPO(num_steps=PPO_STEPS, update_epochs=EPOCHS, num_minibatches=MINIBATCHES),
        shoal.single_learner_coarse(ACTORS, lag=1),
    ),
    "IMPALA": (IMPALA(num_steps=20), shoal.impala(ACTORS)),
}
FAMILIES = ("gymnax", "gymnasium")
Side = Callable[[float], float]


class Enough(Exception):
    """Raised when the time is up."""


def steps_of(name: str, envs: int) -> int:
    """Environment steps per tick: IMPALA's learner takes one actor's rollout."""
    loop, _ = LOOPS[name]
    return loop.num_steps * (envs // ACTORS if name == "IMPALA" else envs)


def ours(name: str, family: str, backend: str, envs: int) -> Side:
    """A Shoal side: steps/s when trained for about `seconds`."""
    loop, policy = LOOPS[name]
    graph = shoal.trace(loop, make(f"{family}:CartPole-v1"), envs=envs)
    cluster = ray_cluster() if backend == "ray" else None
    plan = shoal.plan(graph, policy, *([cluster] if cluster else []))

    def side(seconds: float) -> float:
        seen: list[float] = []

        def watch(*_: Any) -> None:
            seen.append(time.perf_counter())
            if len(seen) > WARM and seen[-1] - seen[WARM - 1] >= seconds:
                raise Enough

        with suppress(Enough):
            shoal.run(plan, backend, ticks=10**9, watch=watch)
        ticks = len(seen) - WARM
        return ticks * steps_of(name, envs) / (seen[-1] - seen[WARM - 1])

    return side


@contextmanager
def rllib(envs: int) -> Iterator[Side]:
    """RLlib's PPO, in its own virtual environment."""
    words = [ACTORS, envs, PPO_STEPS, EPOCHS, MINIBATCHES]
    command = [python_of("rllib"), HERE / "peers" / "rllib_ppo.py", *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    away = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, text=True, env=away, **pipes) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        tick = json.loads(stdout.readline())["tick"]
        rate = 1.0

        def side(seconds: float) -> float:
            nonlocal rate
            stdin.write(f"{max(2, int(seconds * rate / tick))}\n")
            stdin.flush()
            found = json.loads(stdout.readline())
            rate = found["env_steps"] / found["seconds"]
            return rate

        yield side
        stdin.close()


def compare(loops: list[str], envs: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Steps/s of every side, by round."""
    found: dict[str, list[float]] = {}
    with rllib(envs) as peer:
        sides: dict[str, Side] = {"RLlib, PPO": peer}
        for name in loops:
            for family in FAMILIES:
                for backend in ("processes", "ray"):
                    sides[f"{name}, {family}, {backend}"] = ours(name, family, backend, envs)
        for number in range(rounds):
            for name, side in sides.items():
                Console(stderr=True).print(f"round {number + 1} of {rounds}: {name}", style="dim")
                found.setdefault(name, []).append(side(seconds))
    return found


def show(found: dict[str, list[float]], envs: int) -> Table:
    """A row for each side."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    table = Table(title=f"CartPole, {envs} envs, {os.cpu_count()} cores, load {load}")
    for title in ("side", "steps/s", "of RLlib's", "ray of processes"):
        table.add_column(title, justify="left" if title == "side" else "right")
    theirs = found["RLlib, PPO"]
    for name, rates in found.items():
        beside = found[name.replace(", ray", ", processes")]
        against = [a / b for a, b in zip(rates, theirs, strict=True)]
        ratio = [a / b for a, b in zip(rates, beside, strict=True)]
        is_ray = name.endswith(", ray")
        table.add_row(name, f"{median(rates):,.0f}", f"{median(against):.1f}",
                      f"{median(ratio):.2f}" if is_ray else "")  # fmt: skip
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each side in each round")
    parser.add_argument("--loops", nargs="*", choices=LOOPS, default=list(LOOPS))
    said = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    ray.init("local", num_cpus=ACTORS + 2, include_dashboard=False, log_to_driver=False)
    found = compare(said.loops, said.envs, said.rounds, said.seconds)
    Console(width=110).print(show(found, said.envs))


if __name__ == "__main__":
    main()
