"""The `shoal` command: train, resume, graph, plan, verify, record, replay, algorithms."""

import argparse
import difflib
import io
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from shoal import __version__
from shoal.cli.catalogue import catalogue, settings
from shoal.cli.options import (
    add_checkpoints,
    add_cluster,
    add_distribution,
    add_evaluation,
    add_loop,
    add_trust,
    chosen_checkpoints,
    chosen_cluster,
    chosen_distribution,
    chosen_loop,
    chosen_sources,
    code_in_options,
    replica_count,
)
from shoal.compile_cache import use_compile_cache
from shoal.errors import RunError, SettingError, ShoalError, printable, user_place
from shoal.pages import graph_page, plan_page
from shoal.planning.plan import Plan
from shoal.runs.job import Trained
from shoal.runs.records import scalars
from shoal.runs.resuming import resume
from shoal.runs.saved_plans import load_plan, save_plan
from shoal.runs.status import newest_run, shown, want
from shoal.runs.training import (
    Job,
    default_distribution,
    ensure_devices,
    make_job,
    plan,
    train,
    verify,
)
from shoal.runs.trust import is_remembered, remember, untrusted
from shoal.runtime.debug.record import Recording, read_tape, record, replay
from shoal.runtime.execution.executors import kernel_parts
from shoal.runtime.execution.metrics import lag_name
from shoal.runtime.run import BACKENDS, fresh_start, run
from shoal.tracing.frozen import check_not_frozen
from shoal.tracing.trace import trace

Json = dict[str, Any]
BAD_INPUT = 2  # the exit code for bad input; nothing was started
EXAMPLES = """examples:
  shoal algorithms
  shoal train ppo CartPole-v1
  shoal train ppo CartPole-v1 --distribute single-learner-coarse --actors 2 --lag 1
  shoal resume runs/ppo-CartPole-v1-1 --ticks 2000
  shoal train ppo gymnasium:LunarLander-v3 --distribute impala --actors 2 --backend processes
  shoal train my_file.py:MyAlgorithm CartPole-v1 --set learning_rate=1e-3
  shoal plan ppo CartPole-v1 --distribute central --workers 4 --out plan.html
  shoal verify ppo CartPole-v1 --distribute decoupled --env-replicas 2
"""


def main(words: list[str] | None = None) -> int:
    """Run one command; the user's mistakes are reported without a traceback."""
    words, parser = sys.argv[1:] if words is None else words, make_parser()
    if not words:
        parser.print_help()
        return 0
    options = parser.parse_args(words)
    options.words = words
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return options.command(options)
    except ShoalError as error:
        if options.debug:
            traceback.print_exc()
        console.print(f"[bold red]{type(error).__name__}:[/] ", end="")
        console.print(in_one_line(error), markup=False)
        return 1 if isinstance(error, RunError) else BAD_INPUT
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    except Exception as error:
        if options.debug:
            raise
        first, place = (str(error).splitlines() or [""])[0], user_place(error)
        line = printable(f"{type(error).__name__}: {first}".rstrip(": "))
        console.print(f"{line} ({place})" if place else line, markup=False)
        console.print("Run it again with --debug for the whole traceback.", markup=False)
        return 1


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, with the nearest option where one is unknown."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how | {"allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """End with the exit code for bad input."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if len(unknown) and message.startswith("unrecognized"):
            known = [option for action in self._all_actions() for option in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        line = printable(" ".join(f"{self.prog}: {message}.".split()))
        self.exit(BAD_INPUT, f"{line} `{self.prog} --help` lists what there is.\n")

    def _all_actions(self) -> Iterator[argparse.Action]:
        """The options of this command and its subcommands."""
        for action in self._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):
                for command in set(action.choices.values()):
                    yield from command._actions


def in_one_line(error: ShoalError) -> str:
    """An error and its fix in one line."""
    place = f" ({error.where})" if error.where else ""
    stop = "" if error.what.endswith((".", "!", "?")) else "."
    return printable(" ".join(f"{error.what}{place}{stop} {error.fix}".split()))


def make_parser() -> argparse.ArgumentParser:
    """Every command and option."""
    parser = Parser(
        prog="shoal",
        description="Write a training loop once; run it fused, on threads, processes or a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    named = {
        "train": (_train, "train an algorithm on an environment"),
        "graph": (_graph, "show the graph that a loop is traced to"),
        "plan": (_plan, "show how a loop would run, before it does"),
        "verify": (_verify, "check that a distribution policy gives the fused program's numbers"),
        "record": (_record, "write what one fragment takes from another to a file"),
    }
    for name, (command, text) in named.items():
        one = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        one.set_defaults(command=command)
        one.add_argument("--debug", action="store_true", help="show full tracebacks")
        add_loop(one)
        if name != "graph":
            add_distribution(one)
        if name in ("train", "verify", "record"):
            one.add_argument("--ticks", type=int, help="turns of the training loop")
            one.add_argument("--seed", type=int, default=0)
        if name in ("train", "verify"):
            one.add_argument("--backend", default="threads", help=f"one of: {', '.join(BACKENDS)}")
        if name in ("graph", "plan"):
            one.add_argument("--out", type=Path, help="write a .txt, .json or .html file instead")
        if name == "plan":
            one.add_argument("--save", type=Path, help="also write a file for shoal run")
        if name == "record":
            one.add_argument(
                "--edge", required=True, help='such as "actor>learner"; see shoal plan'
            )
            one.add_argument("--out", type=Path, default=Path("edge.tape"), help="the file")
        if name == "train":
            add_evaluation(one)
            one.add_argument("--name", help="name of the run's folder")
            one.add_argument("--folder", default="runs", help="where runs are kept")
            add_checkpoints(one)
            add_cluster(one)
    _add_others(commands)
    return parser


def _add_others(commands: Any) -> None:
    """The commands that take no algorithm."""
    again = commands.add_parser("replay", help="run the fragment that reads a recorded edge alone")
    again.set_defaults(command=_replay)
    again.add_argument("file", type=Path, help="made by shoal record")
    add_trust(again)
    again.add_argument("--debug", action="store_true", help="show full tracebacks")
    saved = commands.add_parser("run", help="run a plan that shoal plan --save has written")
    saved.set_defaults(command=_run)
    saved.add_argument("file", type=Path, help="made by shoal plan --save")
    saved.add_argument("--ticks", type=int, required=True, help="turns of the training loop")
    saved.add_argument("--seed", type=int, default=0)
    saved.add_argument("--backend", default="threads", help=f"one of: {', '.join(BACKENDS)}")
    saved.add_argument("--debug", action="store_true", help="show full tracebacks")
    there = commands.add_parser("algorithms", help="list the algorithms, or the settings of one")
    there.set_defaults(command=_algorithms)
    there.add_argument("name", nargs="?", help="one of them; without it, all are listed")
    there.add_argument("--debug", action="store_true", help="show full tracebacks")
    state = commands.add_parser("status", help="show how far a run is, and what workers wait for")
    state.set_defaults(command=_status)
    text = "the folder of the run, or its name in runs/; without it, the newest there"
    state.add_argument("run", type=Path, nargs="?", help=text)
    state.add_argument("--debug", action="store_true", help="show full tracebacks")
    size = commands.add_parser("scale", help="change the number of replicas of a run in progress")
    size.set_defaults(command=_scale)
    size.add_argument("run", type=Path, help="the folder of the run, or its name in runs/")
    size.add_argument("counts", nargs="+", metavar="FRAGMENT=N", help="such as actor=4")
    size.add_argument("--debug", action="store_true", help="show full tracebacks")
    more = commands.add_parser("resume", help="continue a run from its newest checkpoint")
    more.set_defaults(command=_resume)
    more.add_argument("run", type=Path, help="the folder of the run, or its name in runs/")
    more.add_argument(
        "--ticks", type=int, help="total ticks of the run, those already made included"
    )
    add_trust(more)
    more.add_argument("--backend", help=f"another: {', '.join(BACKENDS)}")
    more.add_argument("--debug", action="store_true", help="show full tracebacks")
    add_distribution(more)
    add_checkpoints(more)
    add_cluster(more)


def _train(options: argparse.Namespace) -> int:
    loop, console = chosen_loop(options), Console(highlight=False, soft_wrap=True)
    distribution = chosen_distribution(options)
    how = {"envs": options.envs, "ticks": options.ticks, "backend": options.backend}
    how |= {"seed": options.seed, "folder": options.folder, "name": options.name}
    how |= {"evaluate": options.evaluate}
    how |= chosen_checkpoints(options) | chosen_sources(options) | chosen_cluster(options)
    with _waiting("tracing and planning", console) as announce:
        trained = train(*loop, distribution, **how, progress=True, announce=announce)
    return _show_end(trained, console)


@contextmanager
def _waiting(what: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Show a spinner until the first announcement."""
    status = Console(stderr=True).status(what)

    def announce(text: str) -> None:
        status.stop()
        console.print(text + "\n")

    status.start()
    try:
        yield announce
    finally:
        status.stop()


def _folder(options: argparse.Namespace) -> Path:
    """The folder of the named run: a path, or a name in runs/; by default the newest there."""
    if options.run is None:
        return newest_run(Path("runs"))
    beside = Path("runs") / options.run
    try:
        return beside if beside.exists() and not options.run.exists() else options.run
    except (OSError, ValueError):  # too long, or with a NUL: no folder is called so
        raise SettingError(
            f"there is no run in {str(options.run)[:60]!r}", "Name the folder of a run."
        ) from None


def _status(options: argparse.Namespace) -> int:
    line, table = shown(_folder(options))
    print(line)
    if table is not None:
        Console(highlight=False).print(table)
    return 0


def _scale(options: argparse.Namespace) -> int:
    counts = dict(replica_count(text) for text in options.counts)
    line = want(_folder(options), counts)
    print("Asked for " + ", ".join(f"{count} of {name}" for name, count in line.items()))
    return 0


def _resume(options: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    how: Json = {"ticks": options.ticks, "backend": options.backend, "trust": options.trust}
    how |= chosen_checkpoints(options) | chosen_cluster(options)
    trained = resume(
        _folder(options),
        chosen_distribution(options),
        **how,
        progress=True,
        announce=lambda text: console.print(text + "\n", markup=False),
    )
    return _show_end(trained, console)


def _show_end(trained: Trained, console: Console) -> int:
    """Print how a run ended; the exit code."""
    summary = trained.summary
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
    console.print(f"Results are in {trained.folder}/", markup=False)
    if stopped := summary.get("signal"):
        console.print(f"Stopped by {stopped}; continue with `shoal resume {trained.folder}`")
    if lost := summary.get("lost"):
        Console(stderr=True, highlight=False, soft_wrap=True).print(lost, markup=False)
        return 1
    return 128 + signal.Signals[stopped] if stopped else 0


def _graph(options: argparse.Namespace) -> int:
    job = make_job(*chosen_loop(options), {"envs": options.envs})
    graph = trace(job.algorithm, job.env, envs=job.envs)
    return _show(options.out, str(graph), graph.to_json(), graph_page)


def _plan(options: argparse.Namespace) -> int:
    job = make_job(*chosen_loop(options), {"envs": options.envs})
    distribution = chosen_distribution(options) or default_distribution(job.env)
    ensure_devices(distribution)
    graph = trace(job.algorithm, job.env, envs=job.envs)
    check_not_frozen(graph.origin, job.envs)
    drawn = plan(graph, distribution)
    if options.save is not None:
        save_plan(drawn, options.save)
    text = "\n".join([str(drawn), *map(str, kernel_parts(drawn))])
    return _show(options.out, text, drawn.to_json(), plan_page)


def _run(options: argparse.Namespace) -> int:
    """Run a saved plan; the metrics of each tick are a line of JSON."""
    use_compile_cache()
    drawn = load_plan(options.file)

    def show(tick: int, metrics: Json) -> None:
        print(json.dumps({"tick": tick, **scalars(metrics)}), flush=True)

    start = fresh_start(drawn.graph, options.seed)
    run(drawn, options.backend, ticks=options.ticks, state=start, watch=show)
    return 0


def _verify(options: argparse.Namespace) -> int:
    how = {"envs": options.envs, "backend": options.backend, "seed": options.seed}
    how |= {"ticks": options.ticks or 3}
    found = verify(*chosen_loop(options), chosen_distribution(options), **how)
    print(found)
    return 0 if found.holds else 1


def _record(options: argparse.Namespace) -> int:
    drawn, job = _drawn(options)
    state = drawn.graph.origin.start(options.seed, job.envs)
    recording = Recording(options.edge, job.ticks, tuple(options.words))
    count = record(drawn, recording, options.out, state)
    if any(code_in_options(options)):
        remember(options.out, recording.words)
    print(f"{count} messages in {options.out}; run shoal replay {options.out}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    about = read_tape(options.file)
    again = _recorded_options(options.file, about["words"])
    found = tuple(code_in_options(again))
    if found and not options.trust and not is_remembered(options.file, about["words"]):
        raise untrusted(str(options.file), found)
    drawn, _ = _drawn(again)
    print(f"{printable(about['reader'])} alone, {about['ticks']} ticks")
    for tick, metrics in replay(drawn, options.file):
        shown = (
            f"{name} {value:g}"
            for name, value in scalars(metrics, lag_name(drawn.graph)).items()
            if value is not None  # no episode ended
        )
        print(f"tick {tick}: {', '.join(shown)}")
    return 0


def _recorded_options(file: Path, words: list[str]) -> argparse.Namespace:
    """The options of the command that made a recording."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            found = make_parser().parse_args(words)
    except SystemExit:
        found = None
    if found is None or found.command is not _record:
        raise SettingError(
            f"{file} doesn't say by which `shoal record` it was made", "Make one with shoal record."
        )
    return found


def _algorithms(options: argparse.Namespace) -> int:
    print(settings(options.name) if options.name else catalogue())
    return 0


def _drawn(options: argparse.Namespace) -> tuple[Plan, Job]:
    job = make_job(*chosen_loop(options), {"envs": options.envs, "ticks": options.ticks or 3})
    distribution = chosen_distribution(options) or default_distribution(job.env)
    ensure_devices(distribution)
    return plan(trace(job.algorithm, job.env, envs=job.envs), distribution), job


def _show(out: Path | None, text: str, data: Json, page: Callable[[Json], str]) -> int:
    """Print the text, or write a file of the format that its suffix names."""
    if out is None:
        print(text)
        return 0
    forms = {
        ".txt": lambda: text + "\n",
        ".json": lambda: json.dumps(data, indent=1) + "\n",
        ".html": lambda: page(data),
    }
    if out.suffix not in forms:
        raise SettingError(f"can't write {out}", f"Let its name end in {', '.join(forms)}.")
    write_text(out, forms[out.suffix]())
    print(f"Written to {out}")
    return 0


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingError(
            f"can't write {path}: {why}", "Name a file in a folder that is there."
        ) from error
