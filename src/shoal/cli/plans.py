"""Commands about loops and plans: graph, plan, verify, record, replay, run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypedDict

from rich.console import Console

from shoal.cli.files import check_file, write_text
from shoal.cli.flags import replicas
from shoal.compile_cache import use_compile_cache
from shoal.envs.registry import FAMILIES
from shoal.errors import SettingError, printable
from shoal.pages import graph_page, plan_page
from shoal.planning.plan import Plan
from shoal.runs.choosing import ChoiceOptions
from shoal.runs.files.records import scalars
from shoal.runs.files.saved_plans import load_plan, save_plan
from shoal.runs.inputs.making import FILE, Job, default_distribution, make_job
from shoal.runs.inputs.options import LENGTH, LOOP, PLACE, Doc, LoopOptions, VerifyOptions
from shoal.runs.inputs.recipes import NOT_PLAIN, recipe_of
from shoal.runs.inputs.sources import with_sources
from shoal.runs.inputs.trust import code_of_env, is_remembered, make, quoted, remember, untrusted
from shoal.runs.training import (
    chosen_distribution,
    chosen_plan,
    draw,
    simulated_plan,
    verified,
)
from shoal.runtime.debug.record import Recording, read_tape
from shoal.runtime.debug.record import record as recorded
from shoal.runtime.debug.record import replay as replayed
from shoal.runtime.execution.executors import kernel_parts
from shoal.runtime.execution.metrics import lag_name
from shoal.runtime.run import fresh_start
from shoal.runtime.run import run as run_plan
from shoal.search.candidates import Goal
from shoal.shapes import Between, Count, Index, Seed, ShapeError, misfit
from shoal.tracing.trace import trace

Json = dict[str, Any]
CHOICE, SIMULATED = "Choosing and simulating", 100  # ticks
OUTPUT, FORMATS = "Output", (".txt", ".json", ".html")
OUT = Doc("write a .txt, .json or .html file instead", OUTPUT, "FILE")


@dataclass(frozen=True, kw_only=True)
class GraphOptions(LoopOptions):
    """The options of `shoal graph`, which has nothing to do with how the loop is distributed."""

    distribute: Annotated[None, Doc()] = None
    out: Annotated[Path | None, OUT] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LoopOptions):
    """The options of `shoal plan`."""

    auto: Annotated[bool, Doc("choose the fastest plan, and show what was considered", CHOICE)] = (
        False
    )
    cluster: Annotated[Path | None, Doc("of these hosts (TOML)", CHOICE, "FILE", "this one")] = None
    profile: Annotated[
        Path | None, Doc("what the loop's parts cost", CHOICE, "FILE", "measured")
    ] = None
    simulate: Annotated[
        Count | None, Doc("ticks of a simulation, with the same flow control", CHOICE, "N")
    ] = None
    trace: Annotated[
        Path | None, Doc("spans of the simulation, for ui.perfetto.dev", CHOICE, "FILE")
    ] = None
    measure: Annotated[bool, Doc("run the best few for seconds, too", CHOICE)] = False
    allow_lag: Annotated[Index, Doc("ticks of lag; changes learning", CHOICE, "N", "0")] = 0
    allow_envs: Annotated[
        str | None, Doc("environments, such as 64-4096; changes learning", CHOICE, "N-M")
    ] = None
    at_least: Annotated[
        float, Between(0, 1e15), Doc("steps/s that there must be", CHOICE, "STEPS", "0")
    ] = 0.0
    out: Annotated[Path | None, OUT] = None
    save: Annotated[Path | None, Doc("also write a file for shoal run", OUTPUT, "FILE")] = None


@dataclass(frozen=True, kw_only=True)
class RecordOptions(LoopOptions):
    """The options of `shoal record`."""

    edge: Annotated[str, Doc('such as "actor>learner"; see shoal plan', OUTPUT, "EDGE")]
    out: Annotated[Path, Doc("the recording", OUTPUT, "FILE", "edge.tape")] = Path("edge.tape")
    ticks: Annotated[Count, Doc("turns of the training loop", LENGTH, "N", "3")] = 3
    seed: Annotated[Seed, Doc("of all random numbers", LOOP, "N", "0")] = 0


class LoopFile(TypedDict):
    """The loop of a recording: the options of `shoal record`, with settings as recipes."""

    algorithm: str
    env: str | None
    distribute: str | None
    settings: Json
    env_settings: Json
    distribute_settings: Json
    envs: Count | None


@dataclass(frozen=True)
class ReplayOptions:
    """The options of `shoal replay`."""

    file: Annotated[Path, Doc("made by shoal record")]
    _: KW_ONLY
    trust: Annotated[bool, Doc("run code that the file names and that isn't Shoal's own")] = False


@dataclass(frozen=True)
class SavedOptions:
    """The options of `shoal run`."""

    file: Annotated[Path, Doc("made by shoal plan --save")]
    _: KW_ONLY
    ticks: Annotated[Count, Doc("turns of the training loop", LENGTH, "N")]
    seed: Annotated[Seed, Doc("of all random numbers", LOOP, "N", "0")] = 0
    backend: Annotated[str, Doc("inline, threads, processes or ray", PLACE, "NAME", "threads")] = (
        "threads"
    )


def graph(options: GraphOptions) -> int:
    """Print the graph that a loop is traced to."""
    check_file(options.out, *FORMATS)
    job = make_job(options)
    found = trace(job.algorithm, job.env, envs=job.envs)
    return _show(
        options.out, str(found), found.to_json(), lambda data: graph_page(with_sources(data))
    )


def plan(options: PlanOptions) -> int:
    """Print how a loop would run."""
    check_file(options.out, *FORMATS)
    check_file(options.save)
    if options.auto:
        drawn = _chosen(options)
    elif options.simulate or options.cluster:
        drawn = _simulated(options)
    else:
        drawn = _drawn(options)[0]
    if options.save is not None:
        save_plan(drawn, options.save)
    text = "\n".join([str(drawn), *map(str, kernel_parts(drawn))])
    return _show(options.out, text, drawn.to_json(), lambda data: plan_page(with_sources(data)))


def _chosen(options: PlanOptions) -> Plan:
    """The plan that `--auto` chooses, after printing the choice."""
    with Console(stderr=True).status("measuring") as status:
        choice = chosen_plan(options, choice_of(options), status.update)
    print(f"{choice}\n")
    return choice.plan


def _simulated(options: PlanOptions) -> Plan:
    """The plan that the options name, on the hosts of a file if they say so; it is simulated."""
    with Console(stderr=True).status("measuring") as status:
        ticks, how = options.simulate or SIMULATED, choice_of(options)
        drawn, text = simulated_plan(options, ticks, how, status.update)
    print(f"{text}\n")
    return drawn


def choice_of(options: PlanOptions) -> ChoiceOptions:
    """What the options say of a choice."""
    try:
        envs = replicas(options.allow_envs) if options.allow_envs else None
    except ValueError:
        text = printable(options.allow_envs or "")[:40]
        raise SettingError(f"--allow-envs {text} is no range", "Write 64-4096.") from None
    between = (envs, envs) if isinstance(envs, int) else envs
    goal = Goal(options.allow_lag, between, at_least=options.at_least)
    check_file(options.trace)
    return ChoiceOptions(options.cluster, options.profile, goal, options.measure, options.trace)


def verify(options: VerifyOptions) -> int:
    """Print whether a plan gives the fused program's numbers."""
    found = verified(options)
    print(found)
    return 0 if found.holds else 1


def record(options: RecordOptions) -> int:
    """Write what one fragment takes from another to a file."""
    check_file(options.out)
    drawn, job = _drawn(options, options.ticks)
    state = drawn.graph.origin.start(options.seed, job.envs)
    loop = loop_data(options)
    count = recorded(drawn, Recording(options.edge, job.ticks, loop), options.out, state)
    if any(code_in_options(options)):
        remember(options.out, loop)
    print(f"{count} messages in {options.out}; run shoal replay {options.out}")
    return 0


def replay(options: ReplayOptions) -> int:
    """Run the fragment that reads a recorded edge alone."""
    about = read_tape(options.file)
    again = _recorded_options(options.file, about["loop"])
    found = tuple(code_in_options(again))
    if found and not options.trust and not is_remembered(options.file, about["loop"]):
        raise untrusted(str(options.file), found)
    drawn, _ = _drawn(again, about["ticks"])
    print(f"{printable(about['reader'])} alone, {about['ticks']} ticks")
    for tick, metrics in replayed(drawn, options.file):
        shown = (
            f"{name} {value:g}"
            for name, value in scalars(metrics, lag_name(drawn.graph)).items()
            if value is not None  # no episode ended
        )
        print(f"tick {tick}: {', '.join(shown)}")
    return 0


def run(options: SavedOptions) -> int:
    """Run a saved plan; the metrics of each tick are a line of JSON."""
    use_compile_cache()
    drawn = load_plan(options.file)

    def show(tick: int, metrics: Json) -> None:
        print(json.dumps({"tick": tick, **scalars(metrics)}), flush=True)

    start = fresh_start(drawn.graph, options.seed)
    run_plan(drawn, options.backend, ticks=options.ticks, state=start, watch=show)
    return 0


def _drawn(options: LoopOptions, ticks: int | None = None) -> tuple[Plan, Job]:
    """The plan of a loop as the options say it."""
    chosen = chosen_distribution(options)
    job = make_job(options, ticks=ticks)
    return draw(job, chosen or default_distribution(job.env)), job


def loop_data(options: LoopOptions) -> Json:
    """What a loop's options say, as JSON: names and settings, with whole paths of files."""
    data = {each.name: recipe_of(getattr(options, each.name)) for each in fields(LoopOptions)}
    if odd := next((name for name, value in data.items() if value is NOT_PLAIN), ""):
        raise SettingError(f"{odd} can't be recorded", "Give numbers, text, or tuples of these.")
    for name in ("algorithm", "env", "distribute"):
        if FILE in str(data[name]):
            file, _, inside = data[name].rpartition(":")
            data[name] = f"{Path(file).resolve()}:{inside}"
    return data


def _recorded_options(file: Path, loop: Json) -> LoopOptions:
    """The options that a recording was made with; what they name is neither loaded nor run."""
    try:
        if wrong := misfit(loop, LoopFile):
            raise ShapeError(wrong)
        return LoopOptions(**{name: make(x, str(file), trusted=False) for name, x in loop.items()})
    except (TypeError, ShapeError) as error:
        raise SettingError(
            f"{file} doesn't say which loop was recorded: {error}", "Make one with shoal record."
        ) from error


def code_in_options(options: LoopOptions) -> Iterator[str]:
    """The parts of a loop's options that aren't Shoal's own code, each in a few words."""
    for text in (options.algorithm, options.env, options.distribute):
        if isinstance(text, str) and FILE in text:
            yield quoted(text)
    family, _, name = str(options.env or "").partition(":")
    if family in FAMILIES and FILE not in str(options.env):
        yield from code_of_env(family, name, dict(options.env_settings))


def _show(out: Path | None, text: str, data: Json, page: Callable[[Json], str]) -> int:
    """Print the text, or write a file of the format that its suffix names."""
    if out is None:
        print(text)
        return 0
    forms = (lambda: text + "\n", lambda: json.dumps(data, indent=1) + "\n", lambda: page(data))
    write_text(out, forms[FORMATS.index(out.suffix)]())
    print(f"Written to {out}")
    return 0
