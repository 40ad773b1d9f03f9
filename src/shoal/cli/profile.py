"""The command `shoal profile`: where the time of a run's workers went."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from shoal.cli.files import check_file, run_folder, write_text
from shoal.errors import SettingError
from shoal.pages.load import Load, WorkerLoad, find_bottleneck
from shoal.pages.run_view import RunView, drawn
from shoal.profiling.breakdown import ORDER, Breakdown, breakdown, breakdown_json
from shoal.profiling.span_file import FILE, SpanFile, read_spans
from shoal.profiling.spans import Kind
from shoal.profiling.trace import trace_json
from shoal.runs.inputs.options import Doc
from shoal.shapes import ShapeError, read_json, why_unreadable

LEAST = 0.005  # of the time: a smaller share is left out
MOST_SITES = 12  # rows of the table of what took longest
Json = dict[str, Any]


@dataclass(frozen=True)
class ProfileOptions:
    """The options of `shoal profile`."""

    run: Annotated[str | None, Doc("a folder, or a run's name; by default the newest")] = None
    _: KW_ONLY
    trace: Annotated[
        Path | None, Doc("write the newest spans, for ui.perfetto.dev", metavar="FILE.json")
    ] = None
    json: Annotated[Path | None, Doc("write times and waits as JSON data", metavar="FILE.json")] = (
        None
    )


def profile(options: ProfileOptions) -> int:
    """Print the shares of the workers' time, and what limits the run."""
    folder = run_folder(options.run)
    for path in (options.trace, options.json):
        check_file(path, ".json")
    file = spans_in(folder)
    if file is None:
        return profile_counts(folder, options)
    plan, found = plan_in(folder), breakdown(file)
    console = Console(highlight=False, width=max(80, Console().width))
    seconds = max(found.seconds(worker) for worker in found.workers)
    when = "after all workers had begun" if found.is_after_start else "while it was starting"
    print(f"{folder}, {seconds:,.1f} s {when}")
    console.print(fragment_table(found))
    if (table := site_table(found)).row_count:
        console.print(table)
    print("\n".join(notes(found, plan)))
    if options.json is not None:
        write_text(options.json, json.dumps(breakdown_json(found, plan), indent=1))
    if options.trace is not None:
        write_text(options.trace, json.dumps(trace_json(file), separators=(",", ":")))
        print(f"Open {options.trace} at https://ui.perfetto.dev")
    return 0


def spans_in(folder: Path) -> SpanFile | None:
    """The spans of a run; None if it has none."""
    try:
        return read_spans(folder / FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ShapeError) as error:
        raise SettingError(
            f"{folder}/{FILE} can't be read: {why_unreadable(error)}",
            "Restore it from a copy, or remove it: the counts in load.jsonl are shown then.",
        ) from error


def plan_in(folder: Path) -> Json:
    """The plan of a run, as JSON data."""
    try:
        plan = read_json(folder / "plan.json", dict[str, Any])
    except (OSError, ShapeError) as error:
        raise SettingError(
            f"{folder}/plan.json can't be read: {why_unreadable(error)}",
            "Restore it from a copy of the run's folder.",
        ) from error
    if drawn(plan) is None:
        raise SettingError(
            f"{folder}/plan.json is no plan", "Restore it from a copy of the run's folder."
        )
    return plan


def fragment_table(found: Breakdown) -> Table:
    """The mean share of each category in the time of each fragment's workers."""
    fragments = found.fragments()
    shares = {fragment: found.shares(fragment) for fragment in fragments}
    titles = [f"{name} ({len(of)})" if len(of) > 1 else name for name, of in fragments.items()]
    table = Table("", *titles, box=box.SIMPLE)
    for name in ORDER:
        row = [one.get(name, 0.0) for one in shares.values()]
        if max(row) >= LEAST:
            table.add_row(name, *(f"{share:.0%}" if share >= LEAST else "-" for share in row))
    memory = {one["name"]: one["memory"] for one in found.file.about["workers"]}
    most = [max(memory[worker] for worker in of) for of in fragments.values()]
    table.add_row("memory", *(f"{size / 1e6:,.0f} MB" if size else "-" for size in most))
    return table


def site_table(found: Breakdown) -> Table:
    """What took longest: stages and segments, messages, and waits for them."""
    table = Table("fragment", "what", "share", "calls", "mean", "p50", "p99", box=box.SIMPLE)
    rows = sorted(site_rows(found), key=lambda row: -row[2])
    for fragment, what, share, times in rows[:MOST_SITES]:
        if share >= LEAST:
            cells = [duration(times[name]) for name in ("mean", "p50", "p99")]
            table.add_row(fragment, what, f"{share:.0%}", f"{times['count']:,}", *cells)
    return table


def site_rows(found: Breakdown) -> Iterator[tuple[str, str, float, Json]]:
    """What each fragment did: in words, its mean share, and its times."""
    totals = {
        fragment: sum(found.seconds(worker) for worker in workers)
        for fragment, workers in found.fragments().items()
    }
    for site in found.sites():
        share = site["seconds"] / max(totals[site["fragment"]], 1e-9)
        yield site["fragment"], site["what"], share, site


def duration(seconds: float) -> str:
    """A duration with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def notes(found: Breakdown, plan: Json) -> Iterator[str]:
    """What limits the run, and what the figures leave out."""
    if device := found.file.about.get("device"):
        for name, stage in device["stages"].items():
            what = f"stage {name} ({stage['category']})" if name else "between stages"
            yield f"{stage['share']:4.0%}  {duration(stage['tick_seconds']):>8} a tick  {what}"
        yield (
            f"of the time that the {device['kind']} is busy, in {device['ticks']} ticks of "
            f"{duration(device['tick_seconds'])} each."
        )
    elif any(item.kind is Kind.CHUNK for item in found.items):
        yield "One program runs all stages; train with --profile-ticks 10 to see what each takes."
    else:
        yield find_bottleneck(load_of(found), plan).text
    if found.lost:
        yield f"{found.lost:,} spans were lost, recorded faster than they were read."


def load_of(found: Breakdown) -> Load:
    """A breakdown as the load that a bottleneck is found from."""
    workers = []
    for name in found.workers:
        seconds = max(found.seconds(name), 1e-9)
        python: dict[str, float] = {}
        for item in found.items:
            if item.worker == name and item.kind is Kind.STAGE and item.site:
                stage = item.site["name"]
                python[stage] = python.get(stage, 0.0) + item.seconds / seconds
        workers.append(WorkerLoad(name, python, found.waits(name), found.ticks(name)))
    return Load(max(map(found.seconds, found.workers)), tuple(workers))


def profile_counts(folder: Path, options: ProfileOptions) -> int:
    """Print the shares of a run without spans, from the counts that every run keeps."""
    if options.json or options.trace:
        raise SettingError(
            f"{folder} has no spans, from which the file would be made",
            "Train with --spans to record them.",
        )
    load = counts_in(folder)
    print(f"{folder}, {load['seconds']:,.1f} s after all workers had begun")
    Console(highlight=False, width=max(80, Console().width)).print(count_table(load))
    print(load["bottleneck"]["text"])
    print("Train with --spans to see times by stage and channel.")
    return 0


def counts_in(folder: Path) -> Json:
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


def count_table(load: Json) -> Table:
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
