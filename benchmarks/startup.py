"""Benchmarks startup: wall-clock and CPU seconds of short runs, with a cold and a warm cache.

Each case is a process of its own, `shoal train` for three ticks. CPU seconds are those of the
command and of all its workers, and hardly depend on what else the machine does. A cold cache is
an empty folder; a warm one is what the cold run left. `--source` measures another checkout.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
COARSE = ("--distribute", "single-learner-coarse", "--backend", "processes")
ENVIRONMENTS = ("--distribute", "environments", "--backend", "processes")
CASES = {
    "fused": ("CartPole-v1",),
    "2 actors": ("CartPole-v1", *COARSE, "--actors", "2"),
    "8 actors": ("CartPole-v1", *COARSE, "--actors", "8"),
    "2 actors, Gymnasium": ("gymnasium:CartPole-v1", *COARSE, "--actors", "2"),
    "8 environment workers": ("gymnasium:CartPole-v1", *ENVIRONMENTS, "--workers", "8"),
}


@dataclass(frozen=True)
class Cost:
    """The time that one command took."""

    seconds: float
    cpu_seconds: float


def cost_of(words: tuple[str, ...], source: Path, cache: Path) -> Cost:
    """Run `shoal` with these words, and measure it with all processes that it started."""
    with tempfile.TemporaryDirectory() as folder:
        own = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        paths = [str(source / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        own |= {"PYTHONPATH": os.pathsep.join(paths), "JAX_COMPILATION_CACHE_DIR": str(cache)}
        own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        command = [sys.executable, "-m", "shoal", *words]
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=own, capture_output=True, text=True, check=False
        )
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, cpu)


def main() -> None:
    """Measure every case, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=Path, default=ROOT, help="a checkout of Shoal")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CASES), help="cases to measure")
    options = parser.parse_args()
    table = Table("case", "cache", "seconds", "CPU seconds", title="start-up, three ticks of PPO")
    help_cost = [cost_of(("--help",), options.source, Path()) for _ in range(options.rounds)]
    rows = [("shoal --help", "", help_cost)]
    cache = Path(tempfile.mkdtemp())
    for name in options.only:
        kinds: dict[str, list[Cost]] = {"cold": [], "warm": []}
        for _ in range(options.rounds):
            shutil.rmtree(cache)
            cache.mkdir()
            for costs in kinds.values():
                words = ("train", "ppo", *CASES[name], "--ticks", "3")
                costs.append(cost_of(words, options.source, cache))
        rows += [(name, kind, costs) for kind, costs in kinds.items()]
    shutil.rmtree(cache)
    for name, kind, costs in rows:
        seconds, cpu = (median(getattr(c, f) for c in costs) for f in ("seconds", "cpu_seconds"))
        table.add_row(name, kind, f"{seconds:.1f}", f"{cpu:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
