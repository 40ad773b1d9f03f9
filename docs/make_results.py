"""Train every preset with several seeds and write docs/results.md."""

import argparse
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from rich.console import Console

import shoal
from shoal.algorithms import PRESETS

HERE = Path(__file__).parent
HEAD = """# Learning results

Made by `make results` (docs/make_results.py): every preset, {seeds} seeds each, fused on one CPU
device of a machine with {cores} cores (Python {python}, JAX {jax}). *Return* is the mean of the
last 100 episodes at the end of the run, as `summary.json` has it; *seconds* are of the whole run,
tracing and compiling included. Thresholds are the usual ones of the literature: CartPole-v1 counts
as solved at 475, MountainCarContinuous-v0 at 90; good PPO agents reach -100 on Acrobot-v1 and -250
on Pendulum-v1.

| algorithm | environment | threshold | return, by seed | worst | mean | steps | seconds, mean |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Train, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    console, rows = Console(stderr=True), []
    for algorithm, presets in PRESETS.items():
        for env, preset in presets.items():
            if preset.family != "gymnax":  # stepped in Python, which takes hours
                continue
            found, seconds, steps = [], [], 0
            for seed in range(seeds):
                with tempfile.TemporaryDirectory() as folder:
                    began = time.perf_counter()
                    summary = shoal.train(algorithm, env, seed=seed, folder=folder).summary
                    seconds.append(time.perf_counter() - began)
                found.append(summary["return_mean"])
                steps = summary["env_steps"]
                console.print(f"{algorithm} {env} seed {seed}: {found[-1]:.1f}", style="dim")
            returns = ", ".join(f"{r:.1f}" for r in found)
            rows.append(
                f"| {algorithm} | {env} | {preset.target:g} | {returns} | {min(found):.1f} | "
                f"{mean(found):.1f} | {steps:,} | {mean(seconds):.1f} |"
            )
    head = HEAD.format(
        seeds=seeds, cores=os.cpu_count(), python=platform.python_version(), jax=version("jax")
    )
    (HERE / "results.md").write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
    console.print(f"Written to {HERE.name}/results.md")


if __name__ == "__main__":
    main()
