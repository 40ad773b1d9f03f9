"""Benchmarks fused PPO on a CPU against rejax: CartPole, 128 steps, 4 epochs x 4 minibatches.

Both count environment steps, learning included, compilation and evaluation not. Rounds alternate
between the sides, so that a busy machine troubles all alike; the table shows medians.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax
from rich.console import Console
from rich.table import Table

import shoal
from peers.made import python_of
from shoal import envs as environments
from shoal.algorithms import PPO

HERE = Path(__file__).parent
STEPS = 128
# rejax clips values too, so Shoal does here.
ALGORITHM = PPO(
    num_steps=STEPS, update_epochs=4, num_minibatches=4, learning_rate=3e-4, clip_eps_vf=0.2
)


@dataclass(frozen=True)
class Round:
    """The result of one side in one round."""

    env_steps: int
    seconds: float
    cpu_seconds: float  # of all its threads: hardly depends on the load of the machine
    compile_seconds: float

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return self.env_steps / self.seconds

    @property
    def cost(self) -> float:
        """CPU microseconds per environment step."""
        return 1e6 * self.cpu_seconds / self.env_steps


Side = Callable[[float], Round]  # trains for about this many seconds


def shoal_side(envs: int, devices: int) -> Side:
    """Shoal, through its public interface; it compiles again for every round."""
    graph = shoal.trace(ALGORITHM, environments.make("CartPole-v1"), envs=envs)
    plan = shoal.plan(graph, shoal.fused(devices))
    per_tick = envs * STEPS

    def train(ticks: int) -> Round:
        cpu = 0.0

        def watch(tick: int, _: object) -> None:
            nonlocal cpu
            cpu = time.process_time() if tick == 0 else cpu

        result = shoal.run(plan, ticks=ticks, watch=watch)
        spent = time.process_time() - cpu
        # The first tick is counted as compilation.
        return Round(per_tick * (ticks - 1), result.seconds, spent, result.compile_seconds)

    trial = train(1 + max(2, 100_000 // per_tick))

    def side(seconds: float) -> Round:
        return train(1 + max(2, int(seconds * trial.rate / per_tick)))

    return side


@contextmanager
def rejax_side(envs: int) -> Iterator[Side]:
    """The peer in its own virtual environment; its process waits between rounds."""
    command = [python_of("rejax"), HERE / "peers" / "rejax_ppo.py", str(envs)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def side(seconds: float) -> Round:
            stdin.write(f"{seconds}\n")
            stdin.flush()
            return Round(**json.loads(stdout.readline()))

        yield side
        stdin.close()


def compare(envs: int, rounds: int, seconds: float) -> dict[str, list[Round]]:
    """The rounds of every side, run alternately."""
    with rejax_side(envs) as rejax:
        sides = {"rejax": rejax}
        sides |= {f"fused({n})": shoal_side(envs, n) for n in (1, 2) if n <= jax.device_count()}
        done: dict[str, list[Round]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                done[name].append(side(seconds))
    return done


def show(results: dict[int, dict[str, list[Round]]]) -> Table:
    """A row for each number of environments and side; ratios above 1 are better than rejax."""
    table = Table(title=f"PPO on CartPole-v1, JAX {jax.__version__} on the CPU, medians")
    for name in ("envs", "side", "steps/s", "ratio", "CPU µs/step", "ratio", "compile s"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for envs, sides in results.items():
        rate, cost = _median(sides["rejax"], "rate"), _median(sides["rejax"], "cost")
        for name, rounds in sides.items():
            mine, spent = _median(rounds, "rate"), _median(rounds, "cost")
            table.add_row(
                str(envs) if name == "rejax" else "",
                name,
                f"{mine:,.0f}",
                f"{mine / rate:.2f}",
                f"{spent:.2f}",
                f"{cost / spent:.2f}",
                f"{_median(rounds, 'compile_seconds'):.1f}",
            )
        table.add_section()
    return table


def _median(rounds: list[Round], field: str) -> float:
    return median(getattr(each, field) for each in rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes, one short round")
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 64, 512, 2048])
    said = parser.parse_args()
    sizes, rounds, seconds = ([8, 512], 1, 1.0) if said.quick else (said.envs, 3, 4.0)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    Console().print(show({envs: compare(envs, rounds, seconds) for envs in sizes}))


if __name__ == "__main__":
    main()
