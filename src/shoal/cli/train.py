"""The commands that train: train, resume."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated

from rich.console import Console

from shoal.cli.files import run_folder
from shoal.errors import SettingError
from shoal.planning.policy import DistributionPolicy
from shoal.runs.choosing import AUTO, ChoiceOptions
from shoal.runs.files.folder import new_folder
from shoal.runs.inputs.options import LOOP, PLACE, Doc, ResumeOptions, TrainOptions
from shoal.runs.job import Trained
from shoal.runs.resuming import resumed
from shoal.runs.training import simulated_plan, trained

MOST_SEEDS = 1000
SIMULATED, TICKS = "simulated", 100  # a backend that runs nothing, and how long by default
NO_RETURNS = "no returns: tick's metrics lack those of shoal.envs.episode_totals(step)"


@dataclass(frozen=True)
class TrainSeedsOptions(TrainOptions):
    """The options of `shoal train`: those of `shoal.train`, and several seeds."""

    distribute: Annotated[
        DistributionPolicy | str | None,
        Doc("a name (`shoal policies`), or file.py:function", PLACE, "POLICY", "auto: the fastest"),
    ] = None
    _: KW_ONLY
    seeds: Annotated[str | None, Doc("a run for each, in a folder of their own", LOOP, "0-4")] = (
        None
    )


def train(options: TrainSeedsOptions) -> int:
    """Train once or with several seeds, and print how it ended."""
    if options.seeds is None:
        return train_once(options)
    seeds = seeds_of(options.seeds)
    if options.seed:
        raise SettingError("--seed and --seeds are both given", "Give one of them.")
    made = new_folder(Path(options.folder), options.name, _title(options))
    for number, seed in enumerate(seeds, 1):
        print(f"Seed {seed} ({number} of {len(seeds)}), in {made}/")
        one = replace(options, seed=seed, seeds=None, name=f"seed-{seed}", folder=made)
        if code := train_once(one, shows_plan=number == 1):
            return code
    print(f"Compare these runs with others: shoal runs compare {made} ...")
    return 0


def seeds_of(text: str) -> list[int]:
    """The seeds of `0-4` or `1,5,9`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise SettingError(f"--seeds {text} are no seeds", "Write 0-4, or 1,5,9.")
        found += range(int(first), int(last or first) + 1)
    if not found or len(found) > MOST_SEEDS or len(set(found)) < len(found):
        raise SettingError(
            f"--seeds {text} are {len(found)} seeds", f"Give 1 to {MOST_SEEDS} different ones."
        )
    return found


def _title(options: TrainOptions) -> str:
    """What runs are called whose name isn't given."""
    return f"{Path(str(options.algorithm)).name}-{options.env or ''}"


def train_once(options: TrainOptions, *, shows_plan: bool = True) -> int:
    """Train, and print how it ended."""
    console = Console(highlight=False, soft_wrap=True)
    if options.backend == SIMULATED:
        with console.status("measuring") as status:
            ticks, how = options.ticks or TICKS, ChoiceOptions()
            drawn, text = simulated_plan(options, ticks, how, status.update)
        console.print(f"{text}\n\n{drawn}", markup=False)
        return 0
    if options.distribute is None:
        options = replace(options, distribute=AUTO)
    with _waiting("tracing and planning", console if shows_plan else None) as announce:
        done = trained(replace(options, progress=True, announce=announce))
    return _show_end(done, console)


def resume(options: ResumeOptions) -> int:
    """Continue a run, and print how it ended."""
    console = Console(highlight=False, soft_wrap=True)

    def announce(text: str) -> None:
        console.print(text + "\n", markup=False)

    folder = run_folder(options.folder)
    return _show_end(
        resumed(replace(options, folder=folder, progress=True, announce=announce)), console
    )


@contextmanager
def _waiting(what: str, console: Console | None) -> Iterator[Callable[[str], None]]:
    """Show a spinner until the first announcement, which is printed if there is a console."""
    status = Console(stderr=True).status(what)

    def announce(text: str) -> None:
        status.stop()
        if console is not None:
            console.print(text + "\n" * ("\n\n" in text), markup=False)

    status.start()
    try:
        yield announce
    finally:
        status.stop()


def _show_end(done: Trained, console: Console) -> int:
    """Print how a run ended; the exit code."""
    summary = done.summary
    mean = summary["return_mean"]
    steps, ticks = summary["env_steps"], summary["ticks"]
    made = f"{steps:,} steps" if steps else f"{ticks:,} ticks"
    line = f"{made} in {summary['seconds']:.1f} s"
    line += f" ({summary['compile_seconds']:.1f} s of it compiling)"
    if rate := summary["env_steps_per_second"]:
        line += f", {rate:,.0f} steps/s"
    if mean is not None:
        line += f"; mean return of the last {min(100, summary['episodes'])} episodes {mean:.1f}"
    console.print(line, markup=False)
    if steps and not any(metric.outer == "episodes" for metric in done.plan.graph.metrics):
        console.print(NO_RETURNS, markup=False)
    if judged := summary.get("evaluation"):
        line = f"evaluated at tick {judged['tick']}: mean return {judged['return_mean']:.1f}"
        console.print(f"{line} of {judged['episodes']} episodes", markup=False)
    console.print(f"Results are in {done.folder}/", markup=False)
    if stopped := summary.get("signal"):
        console.print(f"Stopped by {stopped}; continue with `shoal resume {done.folder}`")
    if lost := summary.get("lost"):
        Console(stderr=True, highlight=False, soft_wrap=True).print(lost, markup=False)
        return 1
    return 128 + signal.Signals[stopped] if stopped else 0
