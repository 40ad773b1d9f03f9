"""Benchmarks scaling: steps/s by the number of workers, with expensive environments.

Every worker is a process with its own environments, each step of which keeps a core busy for a set
time. Work grows with the workers (as many environments each), so twice the workers should make
twice the steps: the efficiency is what is left of that. Needs more cores than workers; with 16,
14 workers leave one for the learner and one for inference.
"""

import argparse
import os
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

import shoal
from shoal.algorithms import PPO
from shoal.envs import HostEnvironment
from worlds import Busy

EACH = 4  # environments per worker
POLICIES: dict[str, Callable[[int], shoal.DistributionPolicy]] = {
    "single_learner_coarse": shoal.single_learner_coarse,
    "impala": shoal.impala,
    "decoupled, one server": lambda n: shoal.decoupled(n, 1, 1, lag=1, ring=2),
    "decoupled, two servers": lambda n: shoal.decoupled(n, 2, 1, lag=1, ring=2),
}


def rate(policy: shoal.DistributionPolicy, workers: int, seconds: float, ticks: int) -> float:
    """Environment steps per second, without compilation."""
    algorithm = PPO(num_steps=64, update_epochs=1, num_minibatches=1, hidden=(32,))
    env = HostEnvironment("busy", Busy(seconds))
    plan = shoal.plan(shoal.trace(algorithm, env, envs=EACH * workers), policy)
    result = shoal.run(plan, "processes", ticks=ticks * workers * EACH // plan.seen)
    return algorithm.num_steps * plan.seen * (result.ticks - 1) / result.seconds


def main() -> None:
    """Measure every policy with increasing numbers of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    cores = len(os.sched_getaffinity(0))
    counts = [n for n in (1, 2, 4, 8, 14) if n <= max(1, cores - 2)]
    parser.add_argument("--workers", type=int, nargs="+", default=counts)
    parser.add_argument("--seconds", type=float, default=5e-4, help="of a core, for each step")
    parser.add_argument("--ticks", type=int, default=12)
    options = parser.parse_args()
    table = Table(
        title=f"steps/s (efficiency) on {cores} cores, {options.seconds * 1e6:g} us a step"
    )
    table.add_column("policy")
    for workers in options.workers:
        table.add_column(f"{workers} workers", justify="right")
    for name, make in POLICIES.items():
        rates = [rate(make(n), n, options.seconds, options.ticks) for n in options.workers]
        one = rates[0] / options.workers[0]
        shown = [
            f"{r:,.0f} ({r / n / one:.0%})" for r, n in zip(rates, options.workers, strict=True)
        ]
        table.add_row(name, *shown)
    ideal = [f"{n / options.seconds:,.0f}" for n in options.workers]
    table.add_row("the environments alone", *ideal)
    Console().print(table)


if __name__ == "__main__":
    main()
