"""Train presets with several seeds, several runs at a time, and write docs/results.md.

What each run came to is kept in docs/results.jsonl, so that runs can be made on several machines
and added to; the page is made from all of it. `--only ppo/CartPole-v1 sac` chooses presets.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from shoal.algorithms import PRESETS
from shoal.algorithms.presets import Preset

HERE = Path(__file__).parent
KEPT = HERE / "results.jsonl"
HEAD = """# Learning results

Made by `make results` (docs/make_results.py) from docs/results.jsonl: presets as
`shoal train ppo CartPole-v1 --seed 0` runs one, fused on one device; where Python steps the
environments (HalfCheetah-v5), they are on CPUs, and the learner on the device. *Return* is the mean
of the last 100 episodes at the end of the run, as `summary.json` has it; *IQM* is the interquartile
mean over seeds; *seconds* are of a whole run, tracing and compiling included, with as many others
beside it on the machine as the last column says (that of 2 cores was often busy with other work
as well). CartPole-v1 counts as solved at 475,
MountainCarContinuous-v0 at 90; good agents reach -100 on Acrobot-v1 and -200 on Pendulum-v1 (about
-150 is the best there is), a memory is worth 1 on MemoryChain. The other thresholds are what the
preset was seen to reach. Many settings were chosen after a few tries, with some of these seeds.

Published beside: gymnax reports a PPO with 28 on Breakout-MinAtar and 131 on
SpaceInvaders-MinAtar. Every seed of our PPO is beyond both, our DQN beyond the first and near the
second; IMPALA and A2C reach neither. CleanRL's documentation has SAC at 9,635 ± 1,424 and TD3 at
9,018 ± 1,078 on HalfCheetah-v2 after a million steps, in training as here. Ours are below that on
HalfCheetah-v5, if within its spread, with an update for every two steps where CleanRL makes one for
each: their means over seeds are 8,786 and 8,359, and one seed of SAC stayed below 7,000. On
MPE_simple_spread_v3, -28 is chance; returns are the mean of the agents' there, a third of what
JaxMARL's curves show, since it multiplies each agent's reward by their number. Presets without a
row have not been run to the end with five seeds: LunarLander-v3, Pong, and Brax's halfcheetah.

| algorithm | environment | threshold | return, by seed | IQM | worst | steps | seconds | where |
|---|---|---|---|---|---|---|---|---|
"""
ONE = """
import json, sys, time
began = time.perf_counter()
import jax, shoal
kind, env, seed, folder = sys.argv[1:]
summary = shoal.train(kind, env, seed=int(seed), folder=folder).summary
found = {name: summary[name] for name in ("return_mean", "env_steps", "jax")}
found |= {"seconds": time.perf_counter() - began, "device": jax.devices()[0].device_kind}
print("\\n" + json.dumps(found))
"""

Row = dict[str, Any]


def cases(only: list[str]) -> list[tuple[str, str]]:
    """The presets that are asked for: all that need no Python environments, or those named."""
    every = [(kind, env, p.family) for kind, found in PRESETS.items() for env, p in found.items()]
    named = [(k, e) for k, e, _ in every if k in only or f"{k}/{e}" in only]
    hosted = ("gymnasium", "envpool", "pettingzoo")
    return named if only else [(k, e) for k, e, family in every if family not in hosted]


def train(kind: str, env: str, seed: int, beside: int) -> Row | None:
    """One run, in a process of its own; None, with its last words shown, if it fails."""
    name = f"{PRESETS[kind][env].family}:{env}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", ONE, kind, name, str(seed), folder],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        Console(stderr=True).print(f"{kind} {env} seed {seed} failed:\n{done.stderr[-600:]}")
        return None
    found = json.loads(done.stdout.strip().splitlines()[-1])
    row = {"kind": kind, "env": env, "seed": seed, "beside": beside, "cores": os.cpu_count()}
    row["settings"] = settings_of(PRESETS[kind][env])
    return {**row, "python": platform.python_version(), **found}


def settings_of(preset: Preset) -> Row:
    """What a run depends on, as JSON has it."""
    both = asdict(preset.algorithm) | {"envs": preset.envs, "ticks": preset.ticks}
    if "total_ticks" in both:
        both["total_ticks"] = preset.ticks  # as a run fills it in
    return json.loads(json.dumps(both))


def holds(row: Row) -> bool:
    """Whether its preset is still what was run, as far as it has those settings."""
    preset = PRESETS.get(row["kind"], {}).get(row["env"])
    now = settings_of(preset) if preset else {}
    return bool(now) and all(
        now.get(name, value) == value for name, value in row["settings"].items()
    )


def page(rows: list[Row]) -> str:
    """The table of all runs of presets as they are now; of runs made twice, the later."""
    runs = {(r["kind"], r["env"], r["seed"]): r for r in rows if holds(r)}
    lines = []
    for kind, presets in PRESETS.items():
        for env, preset in presets.items():
            own = [runs[key] for key in sorted(runs) if key[:2] == (kind, env)]
            if own:
                lines.append(_line(own, preset.target))
    return HEAD + "\n".join(lines) + "\n"


def _line(own: list[Row], target: float) -> str:
    found = [r["return_mean"] for r in own]
    last = own[-1]
    where = f"{last['device']}, {last['cores']} cores, {last['beside']} at once, JAX {last['jax']}"
    cells = [
        last["kind"], last["env"], f"{target:g}", ", ".join(f"{r:,.1f}" for r in found),
        f"{iqm(found):,.1f}", f"{min(found):,.1f}", f"{last['env_steps']:,}",
        f"{mean(r['seconds'] for r in own):,.0f}", where,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def iqm(found: list[float]) -> float:
    """The mean of the middle half."""
    cut = len(found) // 4
    return mean(sorted(found)[cut : len(found) - cut])


def main() -> None:
    """Train what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beside", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="*", default=[], metavar="ALGORITHM[/ENVIRONMENT]")
    parser.add_argument("--keep", type=Path, default=KEPT, help="where runs are kept")
    options = parser.parse_args()
    console, began = Console(stderr=True), time.perf_counter()

    def one(case: tuple[int, str, str]) -> None:
        seed, kind, env = case
        row = train(kind, env, seed, options.beside)
        if row is not None:
            with options.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            line = f"{kind} {env} seed {seed}: {row['return_mean']:.1f}, {row['seconds']:.0f} s"
            console.print(f"{time.perf_counter() - began:5.0f} s  {line}", style="dim")

    wanted = [(seed, *case) for case in cases(options.only) for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.beside) as pool:
        list(pool.map(one, wanted))
    if options.keep == KEPT:
        rows = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]
        (HERE / "results.md").write_text(page(rows), encoding="utf-8")
        console.print(f"Written to {HERE.name}/results.md")


if __name__ == "__main__":
    main()
