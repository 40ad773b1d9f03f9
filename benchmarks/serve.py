"""Benchmarks inference serving: how long environments with a known step time have to wait.

Each step of an environment takes a fixed time on its worker (it sleeps where a simulator would keep
a core busy, so that few cores do), and a worker that never waits makes 1 / time steps a second. The
first table says how busy simulation is by workers and groups in flight; the second what one slow
worker costs the others when the learner takes the groups that come first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import shoal
from shoal import PER_BATCH, PER_ENV, DistributionPolicy, Fragment, Latest, Queue, Serve, Wire

SIZE = 16  # numbers in an observation
ENVS = 8  # environments per worker
SECONDS = 2e-3  # per step
WARM = 3  # warm-up ticks


def _step_spec(seconds: Any, obs: Any, action: Any) -> tuple[Any, Any]:
    return obs, seconds


@shoal.host(_step_spec, per="env", name="env")
def simulate(
    seconds: np.ndarray, obs: np.ndarray, action: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Step one environment after another, each for its time; observations, and seconds spent."""
    start = time.perf_counter()
    end = start + float(seconds.sum())
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
    after = 0.9 * obs + 0.1 * action[:, None]
    spent = (time.perf_counter() - start) / len(obs)
    return after.astype(np.float32), np.full(len(obs), spent, np.float32)


@dataclass(frozen=True)
class Simulated:
    """A loop that does almost nothing but wait for its environments."""

    times: tuple[float, ...]  # seconds per step, by environment
    steps: int = 16

    def init(self, key: Any, env: Any, envs: int) -> dict[str, Any]:
        """Zeros."""
        # A number of environments other than the true one is only traced.
        times = jnp.asarray(np.resize(self.times, envs), jnp.float32)
        return {
            "weights": jnp.zeros(SIZE), "times": times, "obs": jnp.zeros((envs, SIZE)),
        }  # fmt: skip

    def tick(self, env: Any, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Some steps of every environment, and one of learning."""

        def turn(obs: Any, _: Any) -> tuple[Any, Any]:
            action = self.act(obs, weights=state["weights"])
            obs, spent = simulate(state["times"], obs, action)
            return obs, (action, spent)

        obs, (actions, spent) = jax.lax.scan(turn, state["obs"], length=self.steps)
        weights, metrics = self.learn(state["weights"], actions, spent)
        return {**state, "weights": weights, "obs": obs}, metrics

    @shoal.stage(per="env")
    def act(self, obs: Any, *, weights: Any) -> Any:
        """A number for an observation."""
        return jnp.tanh(obs @ weights)

    @shoal.stage
    def learn(self, weights: Any, actions: Any, spent: Any) -> tuple[Any, dict[str, Any]]:
        """Do almost nothing; returns how long simulation took."""
        return weights + 1e-3 * actions.mean(), {"seconds": spent.sum(), "steps": spent.size}


@dataclass(frozen=True)
class Round:
    """The result of one round."""

    rate: float  # environment steps per second
    busy: float  # share of the time that a worker spends inside steps


def first_come(workers: int, ring: int) -> DistributionPolicy:
    """As decoupled, but the learner takes the first half of the groups to arrive."""
    some = Queue(2, max(1, workers * ring // 2))
    return DistributionPolicy(
        "first_come",
        (
            Fragment("env", ("env",), workers, "cpu", ring),
            Fragment("inference", (PER_ENV,), 1, "gpu else cpu"),
            Fragment("learner", (PER_BATCH,), 1, "gpu else cpu"),
        ),
        (
            Wire("env", "inference", Serve()),
            Wire("env", "learner", some),
            Wire("inference", "learner", some),
            Wire("learner", "inference", Latest(None)),
            Wire("learner", "env", Latest(None)),
        ),
    )


def one_round(loop: Simulated, policy: DistributionPolicy, ticks: int) -> Round:
    """Run a loop, and time the ticks after the first few."""
    workers = policy.fragment("env").most
    plan = shoal.plan(shoal.trace(loop, envs=len(loop.times)), policy)
    at: list[float] = []
    seen: list[Mapping[str, Any]] = []

    def watch(_: int, metrics: Mapping[str, Any]) -> None:
        at.append(time.perf_counter())
        seen.append(metrics)

    shoal.run(plan, "processes", ticks=WARM + ticks, watch=watch)
    wall = at[-1] - at[WARM - 1]
    seconds, steps = (sum(float(m[name]) for m in seen[WARM:]) for name in ("seconds", "steps"))
    return Round(steps / wall, seconds / (workers * wall))


def by_ring(workers: list[int], rings: list[int], rounds: int, ticks: int) -> Table:
    """The utilization of simulation, by workers and groups in flight."""
    table = Table(title=f"decoupled, {ENVS} environments a worker, {1e3 * SECONDS:g} ms a step")
    for name in ("workers", "ring", "steps/s", "most possible", "busy"):
        table.add_column(name, justify="right")
    for count in workers:
        loop = Simulated((SECONDS,) * (ENVS * count))
        for ring in rings:
            policy = shoal.decoupled(count, 1, 1, lag=1, ring=ring)
            found = [one_round(loop, policy, ticks) for _ in range(rounds)]
            rate, busy = median(r.rate for r in found), median(r.busy for r in found)
            table.add_row(
                str(count), str(ring), f"{rate:,.0f}", f"{count / SECONDS:,.0f}", f"{busy:.1%}"
            )
    return table


def with_one_slow(workers: int, ring: int, rounds: int, ticks: int) -> Table:
    """Measure the effect of a worker that is ten times slower."""
    table = Table(title=f"{workers} workers, ring of {ring}, one ten times slower")
    for name in ("learner takes", "workers", "steps/s", "most possible", "share of it"):
        table.add_column(name, justify="right" if name[0] in "sm" else "left")
    even = (SECONDS,) * (ENVS * workers)
    slow = (10 * SECONDS,) * ENVS + even[ENVS:]
    policies = {
        "all": shoal.decoupled(workers, 1, 1, lag=1, ring=ring),
        "the first half": first_come(workers, ring),
    }
    # Groups in lockstep arrive in bursts, before or after the end of a tick: count many ticks.
    lasts = {"all": ticks, "the first half": 4 * ticks}
    for name, policy in policies.items():
        for which, times in (("alike", even), ("one slow", slow)):
            loop = Simulated(times)
            rate = median(one_round(loop, policy, lasts[name]).rate for _ in range(rounds))
            most = sum(1 / x for x in times) / ENVS
            table.add_row(name, which, f"{rate:,.0f}", f"{most:,.0f}", f"{rate / most:.1%}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round of a few")
    said = parser.parse_args()
    rounds, ticks = (1, 6) if said.quick else (said.rounds, 12)
    workers, rings = ([1, 2], [1, 2]) if said.quick else ([1, 2, 4], [1, 2, 4, 8])
    console = Console(width=100)
    console.print(by_ring(workers, rings, rounds, ticks))
    console.print(with_one_slow(workers[-1], 2, rounds, ticks))


if __name__ == "__main__":
    main()
