"""Benchmarks simulation: fitted on few workers, what is predicted of more, and of other policies?

The parts of plans with few workers are measured one after the other, in this process. From that
profile, plans with more workers, and of policies that were left out, are simulated; the predictions
are written to a file. Only then are these plans run, on processes. `--large` instead says how long
a simulation of thousands of cores takes.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import shoal
from cartpole import CARTPOLE
from shoal.algorithms import PPO
from shoal.envs import HostEnvironment
from shoal.envs.host import close_all
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.roles import steps_a_tick
from shoal.runtime.cluster.machine import this_machine
from shoal.runtime.execution.metrics import lag_name
from shoal.search.calibrate import measured
from shoal.search.messages import message_cost
from shoal.simulation.events import simulate
from shoal.simulation.profile import Message, Point, Profile
from shoal.simulation.script import Scripts
from worlds import Busy

SMALL = {"num_steps": 64, "update_epochs": 1, "num_minibatches": 1, "hidden": (32,)}
LOOPS: dict[str, tuple[Any, Any, int]] = {  # with environments a worker
    "busy": (PPO(**SMALL), HostEnvironment("busy", Busy(5e-4)), 4),
    "cartpole": (PPO(num_steps=128, update_epochs=1, num_minibatches=1), CARTPOLE, 64),
}
Make = Callable[[int], shoal.DistributionPolicy]
FITTED: dict[str, Make] = {
    "single_learner_coarse": shoal.single_learner_coarse,
    "decoupled": lambda n: shoal.decoupled(n, 1, 1, lag=1, ring=2),
}
LEFT_OUT: dict[str, Make] = {
    "single_learner_coarse, lag 1": lambda n: shoal.single_learner_coarse(n, lag=1),
    "impala": shoal.impala,
}
TICKS = 60  # of a simulation
EACH_BY_ITSELF = 512  # of more actors, each stands for some


def plan_of(loop: str, policy: shoal.DistributionPolicy, workers: int) -> Plan:
    """The plan of a loop with so many workers."""
    algorithm, env, each = LOOPS[loop]
    return shoal.plan(shoal.trace(algorithm, env, envs=each * workers), policy)


def fitted(loop: str, counts: list[int], messages: Message) -> Profile:
    """The profile of a loop, from plans with few workers."""
    profile = Profile(loop, "here", {}, {"processes": messages})
    for make in FITTED.values():
        for workers in counts:
            print(f"measuring the parts of {loop} with {workers} workers", flush=True)
            profile = profile.joined(measured(plan_of(loop, make(workers), workers), 1.0))
            close_all()
    return profile


def predicted(plan: Plan, profile: Profile) -> dict[str, Any]:
    """What a simulation says of a plan."""
    done = simulate(Scripts(plan, profile, "processes"), TICKS, seed=0)
    return {"rate": done.steps_per_second, "lags": _shares(Counter(done.lags))}


def run(plan: Plan, seconds: float, rate: float) -> dict[str, Any]:
    """What a plan does, run for about so many seconds."""
    steps, name, lags = steps_a_tick(plan), lag_name(plan.graph), Counter[int]()

    def watch(tick: int, metrics: dict[str, Any]) -> None:
        if name in metrics:
            lags.update(np.asarray(metrics[name]).tolist())

    ticks = 2 + max(3, int(seconds * rate / steps))
    done = shoal.run(plan, "processes", ticks=ticks, watch=watch)
    close_all()
    return {"rate": steps * (done.ticks - 1) / done.seconds, "lags": _shares(lags)}


def _shares(lags: Counter[int]) -> dict[str, float]:
    return {str(lag): n / lags.total() for lag, n in sorted(lags.items())}


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """How much of one histogram must move to make the other."""
    return sum(abs(one.get(k, 0.0) - other.get(k, 0.0)) for k in {*one, *other}) / 2


def large(cores: int) -> None:
    """Say how long the simulation of an actor on every core but one takes, with made-up costs."""
    host = shoal.Host
    cpus = tuple(shoal.Device("cpu", i) for i in range(64))
    cluster = shoal.Cluster(tuple(host(f"host{i}", 64, cpus) for i in range(cores // 64 + 1)))
    graph, began = shoal.trace(PPO(), CARTPOLE, envs=cores), time.perf_counter()
    plan = make_plan(graph, shoal.single_learner_coarse(cores), cluster)
    scripts = Scripts(plan, Profile("", "", {}, {"network": Message(5e-5, 1.25e9)}))
    spread = (1.0, 1.02, 1.05, 1.1, 1.3, 2.0)
    known = scripts.profile
    for fragment in plan.distribution.fragments:
        for name, size in scripts.parts(fragment.name):
            known = known.joined({name: [Point(size, 0.05, 1.0, spread)]})
    scripts = Scripts(plan, known)
    print(f"planned in {time.perf_counter() - began:.1f} s", flush=True)
    for lumped in (32, cores) if cores <= EACH_BY_ITSELF else (32,):
        began = time.perf_counter()
        done = simulate(scripts, 100, seed=0, lumped=lumped)
        spent = time.perf_counter() - began
        print(f"{cores:,} actors, at most {lumped:,} simulated: {spent:.1f} s; {done}", flush=True)


def compare(
    wanted: dict[str, tuple[Plan, dict[str, Any]]], rounds: int, seconds: float
) -> dict[str, list[dict[str, Any]]]:
    """The rounds of every plan, run alternately."""
    ran: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for _ in range(rounds):
        for name, (plan, said) in wanted.items():
            ran[name].append(run(plan, seconds, said["rate"]))
            print(f"{name}: {ran[name][-1]['rate']:,.0f} steps/s", flush=True)
    return ran


def show(
    wanted: dict[str, tuple[Plan, dict[str, Any]]], ran: dict[str, list[dict[str, Any]]]
) -> None:
    """Print predictions beside what was measured."""
    table = Table(title=f"{len(os.sched_getaffinity(0))} cores; medians of the rounds")
    for column in ("plan", "predicted", "measured", "predicted/measured", "lags differ by"):
        table.add_column(column)
    errors = []
    for name, (_, said) in wanted.items():
        rate = median(one["rate"] for one in ran[name])
        errors.append(abs(said["rate"] / rate - 1))
        differ = median(distance(said["lags"], one["lags"]) for one in ran[name])
        row = f"{said['rate']:,.0f}", f"{rate:,.0f}", f"{said['rate'] / rate:.2f}", f"{differ:.0%}"
        table.add_row(name, *row)
    Console(width=120).print(table)
    print(f"error: median {median(errors):.1%}, worst {max(errors):.1%}")


def main() -> None:
    """Fit, predict, write the predictions, run, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS))
    parser.add_argument("--fit", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--predict", type=int, nargs="+", default=[8, 14])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=Path("predictions.json"))
    parser.add_argument("--large", type=int, default=0, metavar="CORES")
    options = parser.parse_args()
    if options.large:
        large(options.large)
        return
    messages = message_cost("processes", this_machine())
    print(f"a message between processes: {1e6 * messages.seconds:.0f} us")
    wanted: dict[str, tuple[Plan, dict[str, Any]]] = {}
    for loop in options.loops:
        profile = fitted(loop, options.fit, messages)
        for title, make in (FITTED | LEFT_OUT).items():
            for workers in options.predict:
                plan = plan_of(loop, make(workers), workers)
                wanted[f"{loop}: {title}, {workers}"] = plan, predicted(plan, profile)
    said = {name: prediction for name, (_, prediction) in wanted.items()}
    options.out.write_text(json.dumps(said, indent=1))
    print(f"{len(said)} predictions are in {options.out}; now the runs", flush=True)
    show(wanted, compare(wanted, options.rounds, options.seconds))


if __name__ == "__main__":
    main()
