"""The commands that train: train, resume."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from shoal.cli.files import run_folder
from shoal.runs.job import Trained
from shoal.runs.options import ResumeOptions, TrainOptions
from shoal.runs.resuming import resumed
from shoal.runs.training import trained


def train(options: TrainOptions) -> int:
    """Train, and print how it ended."""
    console = Console(highlight=False, soft_wrap=True)
    with _waiting("tracing and planning", console) as announce:
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
def _waiting(what: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Show a spinner until the first announcement."""
    status = Console(stderr=True).status(what)

    def announce(text: str) -> None:
        status.stop()
        console.print(text + "\n", markup=False)

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
