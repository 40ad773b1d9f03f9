"""Commands about runs in progress: status, scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rich.console import Console

from shoal.cli.files import run_folder
from shoal.errors import SettingError
from shoal.runs.files.status import shown, want
from shoal.runs.inputs.options import Doc

RUN = Doc("a folder, or the name of a run in runs/; by default the newest there")


@dataclass(frozen=True)
class StatusOptions:
    """The options of `shoal status`."""

    run: Annotated[str | None, RUN] = None


@dataclass(frozen=True)
class ScaleOptions:
    """The options of `shoal scale`."""

    run: Annotated[str, Doc("a folder, or the name of a run in runs/")]
    counts: Annotated[tuple[str, ...], Doc("such as actor=4", "", "FRAGMENT=N")]


def status(options: StatusOptions) -> int:
    """Print how far a run is, and what its workers wait for."""
    line, table = shown(run_folder(options.run))
    print(line)
    if table is not None:
        Console(highlight=False).print(table)
    return 0


def scale(options: ScaleOptions) -> int:
    """Request other numbers of replicas."""
    pairs = [replica_count(text) for text in options.counts]
    if len(counts := dict(pairs)) < len(pairs):
        raise SettingError("a fragment is given two counts", "Give each fragment one.")
    line = want(run_folder(options.run), counts)
    print("Asked for " + ", ".join(f"{count} of {name}" for name, count in line.items()))
    return 0


def replica_count(text: str) -> tuple[str, int]:
    """A fragment and a count, from `actor=4`."""
    name, equals, count = text.partition("=")
    if not (equals and count.isdecimal() and len(count) < 10):
        raise SettingError(f"`{text}` is no count of a fragment", "Write it as actor=4.")
    return name, int(count)
