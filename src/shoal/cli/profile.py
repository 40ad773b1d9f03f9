"""The command `shoal profile`: where the time of a run's workers went."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.cli.files import run_folder
from shoal.errors import SettingError
from shoal.pages.run_view import RunView
from shoal.runs.options import Doc

LEAST = 0.005  # of the time: a smaller share is left out
Json = dict[str, Any]


@dataclass(frozen=True)
class ProfileOptions:
    """The options of `shoal profile`."""

    run: Annotated[str | None, Doc("a folder, or a run's name; by default the newest")] = None


def profile(options: ProfileOptions) -> int:
    """Print the shares of the workers' time, and what limits the run."""
    folder = run_folder(options.run)
    load = load_of(folder)
    print(f"{folder}, {load['seconds']:,.1f} s after all workers had begun")
    Console(highlight=False, width=max(80, Console().width)).print(table(load))
    print(load["bottleneck"]["text"])
    return 0


def load_of(folder: Path) -> Json:
    """Where the time of a run's workers went, over the whole run."""
    view = RunView(folder)
    view.read_all()
    load = (view.load or {}).get("whole")
    if load is None:
        raise SettingError(
            f"{folder} has no counts of what its workers did",
            "They are kept of runs of several workers that last some seconds: a fused run is one "
            "program, whose parts a profiler of XLA shows (jax.profiler).",
        )
    return load


def table(load: Json) -> Table:
    """The mean shares of each fragment's workers, and of what they wait for."""
    found = Table("fragment", "workers", "busy", "in Python", box=box.SIMPLE)
    found.add_column("waits for", no_wrap=True)
    for name, fragment in load["fragments"].items():
        workers = [worker for worker in load["workers"] if worker["fragment"] == name]
        found.add_row(
            name,
            str(len(workers)),
            spread(fragment["workers"]),
            "\n".join(f"{stage} {share:.0%}" for stage, share in fragment["python"].items()),
            "\n".join(waits(workers)),
        )
    return found


def spread(shares: list[float]) -> str:
    """A share, or the least and the largest of several that differ."""
    low, high = min(shares), max(shares)
    return f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"


def waits(workers: list[Json]) -> list[str]:
    """What the workers of a fragment wait for, the longest wait first."""
    total: dict[str, float] = {}
    for worker in workers:
        for how, channel, share in worker["waits"]:
            what = f"messages of {channel}" if how == "take" else f"room in {channel}"
            total[what] = total.get(what, 0.0) + share / len(workers)
    longest = sorted(total.items(), key=lambda item: -item[1])
    return [f"{what} {share:.0%}" for what, share in longest if share >= LEAST]
