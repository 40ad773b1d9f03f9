"""Benchmarks PPO on Python and C++ environments on a CPU, against Stable-Baselines3.

HalfCheetah-v5 with two networks of two 64-wide tanh layers, and Atari's Pong with the network of
Mnih et al. (2015). Both sides count environment steps, learning included, after a warm-up; what is
compiled is shown apart. The ceiling is EnvPool with random actions and nothing else.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import shoal
from peers.made import python_of
from shoal.algorithms import PPO
from shoal.envs.registry import make
from shoal.envs.spaces import Discrete

HERE = Path(__file__).parent
ENVS = 8
WARM = 3  # warm-up ticks
POLICIES: dict[str, Callable[[], shoal.DistributionPolicy]] = {
    "coarse(1)": lambda: shoal.single_learner_coarse(1),
    "coarse(1, lag=1)": lambda: shoal.single_learner_coarse(1, lag=1),
    "coarse(2)": lambda: shoal.single_learner_coarse(2),
    "fine(1)": lambda: shoal.single_learner_fine(1),
    "fine(2, ring=2)": lambda: shoal.single_learner_fine(2, ring=2),
    "impala(2)": lambda: shoal.impala(2),
}
ALL = tuple((name, backend) for name in POLICIES for backend in ("threads", "processes"))
SOME = (("coarse(1)", "threads"), ("coarse(1, lag=1)", "threads"), ("impala(2)", "processes"))


@dataclass(frozen=True)
class Task:
    """A training task: its algorithm, environments, distribution policies and backends."""

    algorithm: PPO
    envs: dict[str, str]  # by family
    sides: tuple[tuple[str, str], ...]
    ticks: int


TASKS = {
    "halfcheetah": Task(
        PPO(num_steps=256, update_epochs=10, num_minibatches=32, learning_rate=3e-4, ent_coef=0.0),
        {"envpool": "HalfCheetah-v5", "gymnasium": "HalfCheetah-v5"},
        ALL,
        30,
    ),
    "pong": Task(
        PPO(num_steps=128, update_epochs=4, num_minibatches=4, clip_eps=0.1),
        {"envpool": "Pong-v5", "gymnasium": "ALE/Pong-v5"},
        SOME,
        5,
    ),
}
# SB3's vectorised environments and torch's number of threads; the best combination counts.
PEERS = {
    "halfcheetah": (("dummy", 1), ("subproc", 1), ("dummy", 2)),
    "pong": (("dummy", 2), ("subproc", 2)),
}


@dataclass(frozen=True)
class Round:
    """The result of one side after the warm-up."""

    side: str
    env_steps: float
    seconds: float
    compile_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return self.env_steps / self.seconds


def families(task: Task) -> dict[str, str]:
    """The environments of a task that are installed, by family."""
    return {family: name for family, name in task.envs.items() if find_spec(family)}


def train(task: Task, family: str, side: tuple[str, str], ticks: int) -> Round:
    """Shoal, through its public interface."""
    policy, backend = side
    graph = shoal.trace(task.algorithm, make(f"{family}:{task.envs[family]}"), envs=ENVS)
    plan = shoal.plan(graph, POLICIES[policy]())
    # A tick of impala takes fewer rollouts, so it runs more of them.
    count = WARM + ticks * ENVS // plan.seen
    times: list[float] = []
    result = shoal.run(plan, backend, ticks=count, watch=lambda *_: times.append(time.time()))
    steps = task.algorithm.num_steps * plan.seen * (len(times) - WARM)
    seconds = times[-1] - times[WARM - 1]
    return Round(f"{family}, {policy}, {backend}", steps, seconds, result.compile_seconds)


def ceiling(task: Task, seconds: float = 3.0) -> Round:
    """EnvPool, two threads, random actions."""
    import envpool

    space: Any = make(f"envpool:{task.envs['envpool']}").action_space
    pool: Any = envpool.make_gymnasium(task.envs["envpool"], num_envs=ENVS, num_threads=2)
    pool.reset()
    rng = np.random.default_rng(0)
    if isinstance(space, Discrete):
        actions = rng.integers(space.n, size=(64, ENVS), dtype=np.int32)
    else:
        actions = rng.uniform(-1, 1, (64, ENVS, *space.shape))
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for action in actions:
            pool.step(action)
        count += len(actions) * ENVS
    return Round("EnvPool alone, 2 threads", count, time.perf_counter() - began)


@contextmanager
def sb3(task: str, vector: str, threads: int) -> Iterator[Callable[[int], Round]]:
    """The peer in its own virtual environment; its process waits between rounds."""
    command = [python_of("sb3"), HERE / "peers" / "sb3_ppo.py", task, vector, str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        stdout.readline()  # it is warm

        def side(ticks: int) -> Round:
            stdin.write(f"{ticks}\n")
            stdin.flush()
            return Round(f"SB3, {vector}, {threads} threads", **json.loads(stdout.readline()))

        yield side
        stdin.close()


def compare(name: str, ticks: int) -> list[Round]:
    """Measure every side of a task; SB3 before and after Shoal, so that load affects both."""
    task = TASKS[name]
    rounds = []
    with ExitStack() as stack:
        peers = [stack.enter_context(sb3(name, *how)) for how in PEERS[name]]
        few = max(2, ticks // 6)  # it is slower
        rounds += [peer(few) for peer in peers]
        for family in families(task):
            rounds += [train(task, family, side, ticks) for side in task.sides]
        rounds += [peer(few) for peer in peers]
    if "envpool" in families(task):
        rounds.append(ceiling(task))
    return rounds


def show(title: str, rounds: list[Round]) -> Table:
    """A row for each side, in its best round."""
    best: dict[str, Round] = {}
    for one in sorted(rounds, key=lambda one: one.rate):
        best[one.side] = one
    theirs = max(one.rate for one in rounds if one.side.startswith("SB3"))
    most = max((one.rate for one in rounds if one.side.startswith("EnvPool")), default=0.0)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    table = Table(
        title=f"PPO on {title}, JAX {jax.__version__} on {os.cpu_count()} cores, load {load}"
    )
    for column in ("side", "steps/s", "of SB3's best", "of the ceiling", "compile s"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side in dict.fromkeys(one.side for one in rounds):
        one = best[side]
        compiled = f"{one.compile_seconds:.1f}" if one.compile_seconds else ""
        share = f"{one.rate / most:.0%}" if most else ""
        table.add_row(side, f"{one.rate:,.0f}", f"{one.rate / theirs:.2f}", share, compiled)
    return table


@dataclass(frozen=True)
class Clock:
    """Seconds spent, by label."""

    spent: dict[str, float]

    def on(self, call: Callable[..., Any], label: Callable[..., str]) -> Callable[..., Any]:
        """Wrap `call`: its time is added to the label that `label` makes of its arguments."""

        @wraps(call)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            found = call(*args)
            here = label(*args)
            self.spent[here] = self.spent.get(here, 0.0) + time.perf_counter() - began
            return found

        return timed


def watched() -> Clock:
    """Start to measure the time of everything that workers call."""
    from shoal.runtime.execution.compiled_executor import CompiledExecutor
    from shoal.runtime.execution.replica_runner import ReplicaRunner

    clock = Clock({})
    run = clock.on(
        CompiledExecutor.run, lambda executor, *_: f"{executor.spec.name}: calls of programs"
    )

    def to_the_end(executor: CompiledExecutor, *args: Any) -> Any:
        return jax.block_until_ready(run(executor, *args))

    CompiledExecutor.run = clock.on(
        to_the_end, lambda executor, *_: f"{executor.spec.name}: programs"
    )
    for method, label in {
        "_call": "actor: environments",
        "_in_numpy": "actor: slices and stacks",
        "_take": "channels: take",
        "_send": "channels: put",
    }.items():
        setattr(
            ReplicaRunner,
            method,
            clock.on(getattr(ReplicaRunner, method), lambda *_, label=label: label),
        )
    return clock


def split(name: str, ticks: int) -> Table:
    """The time of coarse(1) by function; its workers alternate."""
    task, clock = TASKS[name], watched()
    family = next(iter(families(task)))
    graph = shoal.trace(task.algorithm, make(f"{family}:{task.envs[family]}"), envs=ENVS)
    plan = shoal.plan(graph, POLICIES["coarse(1)"]())
    seen: list[tuple[float, dict[str, float]]] = []

    def watch(*_: Any) -> None:
        seen.append((time.perf_counter(), dict(clock.spent)))

    shoal.run(plan, "threads", ticks=WARM + ticks, watch=watch)
    (began, before), (ended, after) = seen[WARM - 1], seen[-1]
    whole = 1e3 * (ended - began) / ticks
    table = Table("part", "ms a tick", "share", title=f"{name}, {family}, coarse(1), threads")
    for label, seconds in sorted(after.items(), key=lambda item: -item[1]):
        mine = 1e3 * (seconds - before.get(label, 0.0)) / ticks
        table.add_row(label, f"{mine:.1f}", f"{mine / whole:.0%}")
    table.add_row("all", f"{whole:.1f}", "")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TASKS, help="one of the tasks")
    parser.add_argument("--ticks", type=int, help="that are counted, of eight environments each")
    parser.add_argument("--profile", action="store_true", help="where our time goes, instead")
    said = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for name, task in TASKS.items():
        if said.only in (None, name):
            ticks = said.ticks or task.ticks
            table = split(name, ticks) if said.profile else show(name, compare(name, ticks))
            Console(width=110).print(table)


if __name__ == "__main__":
    main()
