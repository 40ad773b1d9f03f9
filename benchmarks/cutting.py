"""Benchmarks cuts: PPO on CartPole under every distribution policy on threads, against fused.

All do the same arithmetic on the same two cores, so what a plan takes longer than the fused program
is the price of its cut: leaving XLA between segments, and taking and putting messages. Rounds
alternate between the plans; the table shows medians.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

import shoal
from shoal.algorithms import PPO
from shoal.envs import make
from shoal.planning.plan import Plan

POLICIES = {
    "fused(1)": shoal.fused(1),
    "single_learner_coarse(1)": shoal.single_learner_coarse(1),
    "single_learner_coarse(2)": shoal.single_learner_coarse(2),
    "single_learner_coarse(2, lag=1)": shoal.single_learner_coarse(2, lag=1),
    "single_learner_fine(1)": shoal.single_learner_fine(1),
    "single_learner_fine(2)": shoal.single_learner_fine(2),
    "central(2)": shoal.central(2),
    "decoupled(2, 1, 1)": shoal.decoupled(2, 1, 1),
}


@dataclass(frozen=True)
class Round:
    """The result of one run of one plan."""

    tick_seconds: float
    compile_seconds: float


def one_round(plan: Plan, ticks: int) -> Round:
    """Run a plan, and time the ticks after the first."""
    times: list[float] = []
    result = shoal.run(plan, ticks=ticks, watch=lambda *_: times.append(time.perf_counter()))
    return Round(result.seconds / (ticks - 1), result.compile_seconds)


def messages(plan: Plan) -> int:
    """The number of puts and takes of all replicas per tick."""
    ends = [plan.ends(c.writer) + plan.ends(c.reader) for c in plan.channels]
    return sum(n * c.times for n, c in zip(ends, plan.channels, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--ticks", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    rounds, ticks = (1, 10) if options.quick else (options.rounds, options.ticks)
    graph = shoal.trace(PPO(), make("CartPole-v1"), envs=options.envs)
    plans = {name: shoal.plan(graph, policy) for name, policy in POLICIES.items()}
    found: dict[str, list[Round]] = {name: [] for name in plans}
    for number in range(rounds):
        for name, plan in plans.items():
            Console(stderr=True).print(f"round {number + 1} of {rounds}: {name}", style="dim")
            found[name].append(one_round(plan, ticks))
    fused = median(r.tick_seconds for r in found["fused(1)"])
    table = Table(title=f"PPO, CartPole, {options.envs} environments x 128 steps, threads")
    for column in (
        "plan",
        "ms a tick",
        "over fused",
        "moves a tick",
        "us a move",
        "kB a tick",
        "compile s",
    ):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for name, plan in plans.items():
        tick, moves = median(r.tick_seconds for r in found[name]), messages(plan)
        over = tick - fused
        price = f"{1e6 * over / moves:.0f}" if moves else ""
        size = sum(plan.bytes_of(c) for c in plan.channels) / 1000
        compiling = median(r.compile_seconds for r in found[name])
        row = (
            f"{1e3 * tick:.1f}",
            f"{1e3 * over:+.1f} ms",
            str(moves),
            price,
            f"{size:.0f}",
            f"{compiling:.1f}",
        )
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
