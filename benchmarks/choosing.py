"""Benchmarks the choice of a plan: is it the fastest of a sweep, and was the estimate right?

For each loop, `shoal.choose` measures its parts and chooses. Then every candidate is run, but for
those whose bound is less than half of the best: rounds alternate between the candidates, and
medians are compared. What is chosen should be within a few percent of the best of the sweep.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import shoal
from cartpole import CARTPOLE
from shoal.algorithms import A2C, DQN, PPO
from shoal.compile_cache import use_compile_cache
from shoal.envs import HostEnvironment
from shoal.envs.host import close_all
from shoal.runtime.cluster.machine import this_machine
from shoal.search.candidates import candidates
from shoal.search.choose import Ranked, calibrated, chosen, halved, rate_of
from shoal.simulation.estimate import estimate
from shoal.simulation.script import Scripts
from worlds import Busy

RECENT = {"num_steps": 128, "update_epochs": 4, "num_minibatches": 4}
BUSY = {"num_steps": 64, "update_epochs": 1, "num_minibatches": 1}
LOOPS: dict[str, tuple[Any, Any, int]] = {
    "ppo cartpole 8": (PPO(**RECENT), CARTPOLE, 8),
    "ppo cartpole 64": (PPO(**RECENT), CARTPOLE, 64),
    "ppo cartpole 512": (PPO(**RECENT), CARTPOLE, 512),
    "ppo cartpole 2048": (PPO(**RECENT), CARTPOLE, 2048),
    "ppo wide 256": (PPO(**RECENT, hidden=(512, 512)), CARTPOLE, 256),
    "a2c cartpole 256": (A2C(), CARTPOLE, 256),
    "dqn cartpole 64": (DQN(), CARTPOLE, 64),
    "ppo busy 20us 16": (PPO(**BUSY), HostEnvironment("busy", Busy(2e-5)), 16),
    "ppo busy 500us 16": (PPO(**BUSY), HostEnvironment("busy", Busy(5e-4)), 16),
    "ppo busy 500us 112": (PPO(**BUSY), HostEnvironment("busy", Busy(5e-4)), 112),
}
PROMISING = 0.5  # of the best: candidates with a lower bound aren't run


def cell(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The choice for a loop, and what each candidate made in each round."""
    algorithm, env, envs = LOOPS[name]
    graph, machine, goal = shoal.trace(algorithm, env, envs=envs), this_machine(), shoal.Goal()
    began = time.perf_counter()
    profile = calibrated(graph, machine, goal)
    choice = chosen(graph, machine, profile, goal)
    tried = halved(choice, goal)
    spent = time.perf_counter() - began
    close_all()
    found, rates = {}, {}
    best = choice.best.steps_per_second
    for one in candidates(graph, machine, goal):
        scripts = Scripts(one.plan, profile, one.backend, is_bound=True)
        bound = estimate(scripts)
        is_same = one.name in (choice.best.candidate.name, tried.best.candidate.name)
        if is_same or bound.steps_per_second >= PROMISING * best:
            found[one.name], rates[one.name] = Ranked(one, bound), []
    for _ in range(rounds):
        for title, ranked in found.items():
            rates[title].append(rate_of(ranked, seconds))
            print(f"{name}: {title} {rates[title][-1]:,.0f}", flush=True)
            close_all()
    known = {r.candidate.name: r.estimate.steps_per_second
             for r in (choice.best, *choice.runners_up)}  # fmt: skip
    return {
        "loop": name, "seconds": spent, "chosen": choice.best.candidate.name,
        "tried": tried.best.candidate.name,
        "rates": rates, "estimates": known,
    }  # fmt: skip


def regret(result: dict[str, Any], how: str = "chosen") -> tuple[str, float, float]:
    """The best of the sweep, its rate, and the rate over that of the plan that was chosen."""
    medians = {name: median(rates) for name, rates in result["rates"].items()}
    best = max(medians, key=medians.__getitem__)
    return best, medians[best], medians[result[how]] / medians[best]


def show(results: list[dict[str, Any]]) -> Table:
    """A row for each loop."""
    cores = len(os.sched_getaffinity(0))
    kinds = {d.device_kind for d in jax.devices()}
    table = Table(title=f"{cores} cores, {', '.join(sorted(kinds))}; medians of the rounds")
    for name in ("loop", "by estimate", "after trying", "best of the sweep", "steps/s",
                 "estimate/best", "tried/best", "predicted/measured", "s to choose"):  # fmt: skip
        table.add_column(name)
    for result in results:
        best, rate, share = regret(result)
        own = median(result["rates"][result["chosen"]])
        said = result["estimates"][result["chosen"]] / own
        table.add_row(
            result["loop"], result["chosen"], result["tried"], best, f"{rate:,.0f}",
            f"{share:.2f}", f"{regret(result, 'tried')[2]:.2f}", f"{said:.2f}",
            f"{result['seconds']:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    """Choose and sweep; results are written after every loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--out", type=Path, default=Path("choosing.json"))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    use_compile_cache()
    results: list[dict[str, Any]] = []
    for name in options.loops:
        results.append(cell(name, options.rounds, options.seconds))
        options.out.write_text(json.dumps(results, indent=1))
        Console(width=160).print(show(results[-1:]))
        for title, rates in results[-1]["rates"].items():
            said = results[-1]["estimates"].get(title, 0.0)
            print(f"  {title}: {median(rates):,.0f} measured, {said:,.0f} estimated", flush=True)
    Console(width=160).print(show(results))
    for how in ("chosen", "tried"):
        shares = sorted(regret(result, how)[2] for result in results)
        print(f"{how} over best: median {median(shares):.2f}, least {shares[0]:.2f}")


if __name__ == "__main__":
    main()
