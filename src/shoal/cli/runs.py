"""Commands about several runs: runs, runs compare, runs plot, runs rm."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.cli.files import check_file, write_text
from shoal.errors import SettingError
from shoal.pages.plot import AXES, plot
from shoal.runs.files.disk import megabytes, size_of
from shoal.runs.files.progress import short
from shoal.runs.inputs.options import Doc
from shoal.runs.results.comparing import Comparison, Scores, compare
from shoal.runs.results.listing import ListedRun, group, removable, remove, runs_in

GROUPS = Doc("runs, folders of runs (--seeds makes one) or patterns such as 'ppo-*'", "", "RUN")


@dataclass(frozen=True)
class RunsOptions:
    """The options of `shoal runs`."""

    folder: Annotated[str, Doc("where runs are kept [runs]")] = "runs"


@dataclass(frozen=True)
class CompareOptions:
    """The options of `shoal runs compare`."""

    runs: Annotated[tuple[str, ...], GROUPS]


@dataclass(frozen=True)
class PlotOptions:
    """The options of `shoal runs plot`."""

    runs: Annotated[tuple[str, ...], GROUPS]
    _: KW_ONLY
    metric: Annotated[str, Doc("of metrics.jsonl", "", "NAME", "return_mean")] = "return_mean"
    over: Annotated[str, Doc("env_steps, seconds or tick", "", "AXIS", "env_steps")] = "env_steps"
    out: Annotated[Path, Doc("the picture", "", "FILE", "curves.svg")] = Path("curves.svg")


@dataclass(frozen=True)
class RemoveOptions:
    """The options of `shoal runs rm`."""

    runs: Annotated[tuple[str, ...], GROUPS]
    _: KW_ONLY
    yes: Annotated[bool, Doc("remove; without it, what would be is only listed")] = False


def list_runs(options: RunsOptions) -> int:
    """Print a line a run, the newest first."""
    found = runs_in(Path(options.folder))
    if not found:
        print(f"There are no runs in {options.folder}/. Begin one: shoal train ppo CartPole-v1")
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("status")
    for name in ("seed", "ticks", "steps", "return", "time", "ago"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found:
        table.add_row(*map(escape, _cells(run, Path(options.folder))))
    Console(highlight=False).print(table)
    return 0


def _cells(run: ListedRun, root: Path) -> list[str]:
    one = run.facts
    mean = one.get("return_mean")
    return [
        str(run.folder.relative_to(root)), run.status, str(one.get("seed", "")),
        f"{one.get('ticks', 0):,}", short(one.get("env_steps", 0)),
        "" if mean is None else f"{mean:.1f}", duration(one.get("seconds", 0.0)), duration(run.age),
    ]  # fmt: skip


def compare_runs(options: CompareOptions) -> int:
    """Print how groups of runs scored, with intervals."""
    found = compare([group(name) for name in options.runs])
    print(f"Score: {found.measure}. IQM of runs, and 95 % intervals (bootstrap, by environment).\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("environment", overflow="fold")
    table.add_column("runs of", overflow="fold")
    table.add_column("n", justify="right")
    table.add_column("IQM", no_wrap=True)
    for env in found.envs:
        for each in found.scores:
            table.add_row(*map(escape, _row(env, each)))
    Console(highlight=False).print(table)
    for index, line in enumerate(_improvements(found), 1):
        print(("\n" if index == 1 else "") + line)
    return 0


def _row(env: str, scores: Scores) -> list[str]:
    return [env, scores.group, str(len(scores.by_env[env])), str(scores.iqm(env))]


def _improvements(found: Comparison) -> list[str]:
    first = found.scores[0].group
    return [
        f"P({each.group} > {first}) = {found.improvement(index)}"
        for index, each in enumerate(found.scores[1:], 1)
    ]


def plot_runs(options: PlotOptions) -> int:
    """Write the learning curves of groups of runs."""
    if options.over not in AXES:
        raise SettingError(f"--over {options.over}", f"Say one of: {', '.join(AXES)}.")
    check_file(options.out, ".svg")
    write_text(options.out, plot([group(n) for n in options.runs], options.metric, options.over))
    print(f"Written to {options.out}")
    return 0


def remove_runs(options: RemoveOptions) -> int:
    """Remove runs, or list those that would be removed."""
    folders = removable(options.runs)
    verb = "Removing" if options.yes else "Would remove"
    for folder in folders:
        print(f"{verb} {folder}, {megabytes(size_of(folder))}")
    if options.yes:
        remove(folders)
    else:
        print("Add --yes to remove them.")
    return 0


def duration(seconds: float) -> str:
    """A time in its largest unit."""
    for size, mark in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {mark}"
    return f"{seconds:.0f} s"
