"""Resume a run from its newest checkpoint, as it was or distributed in another way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from shoal import __version__
from shoal.algorithms.evaluated import Evaluated
from shoal.errors import SettingError, printable
from shoal.planning.plan import Plan
from shoal.runs.files.checkpoints import Saved, read_newest, restored, set_aside, ticks_in
from shoal.runs.files.folder import (
    Extension,
    RunFile,
    check_plain,
    check_writable,
    cut_rows,
    locked,
    read_run,
)
from shoal.runs.inputs.making import Job, check_distribution, make_distribution, make_env
from shoal.runs.inputs.options import ResumeOptions, takes
from shoal.runs.inputs.trust import TYPES, is_remembered, make, recipes_of
from shoal.runs.job import Run, StartPoint, Trained, describe, run_job, with_new_episodes
from shoal.runs.training import beside_evaluation, cluster_of, draw, lasting_steps
from shoal.runtime.run import check_backend, check_step_timeout, fresh_start

Announce = Callable[[str], None]


@takes(ResumeOptions)
def resume(options: ResumeOptions) -> Trained:
    """Resume the run in `folder` until it has made `ticks` ticks, or `steps` steps, in all.

    A run whose plan is in lockstep continues to the bit. Under another distribution policy, replica
    count or backend it continues with the same state. `algorithm` and `env` are needed only where
    they were objects that JSON can't describe. A folder that names code of others is refused,
    unless you made the run yourself on this machine, or say `trust=True`.
    """
    return resumed(options)


def resumed(options: ResumeOptions) -> Trained:
    """As `resume`, of options that are an object."""
    folder = Path(options.folder)
    record, trusted = open_run(folder, trust=options.trust)
    with locked(folder):
        check_writable(folder)
        announce = options.announce or (lambda text: None)
        given = Given(options.algorithm, options.env, options.ticks)
        job = made_job(folder, record, given, trusted=trusted)
        named = record["backend"] if options.backend is None else options.backend
        backend = check_backend(named)
        distribution = make_distribution(options.distribute, options.distribute_settings)
        if distribution is None:
            distribution = check_distribution(
                _made(folder, record, "distribution", trusted=trusted)
            )
        assert distribution is not None
        cluster = cluster_of(options, backend)
        drawn = draw(job, beside_evaluation(job, distribution), cluster)
        if options.steps:
            job, drawn = lasting_steps(job, drawn, options.steps, cluster)
        _compare_versions(record, announce)
        since = _since(folder, job, drawn, record["seed"], announce)
        extended = _extended(job, record, since.progress.get("tick", 0), announce)
        before = {**record, "backend": backend, "extended": extended}
        described = describe(job, drawn, before, options)
        check_step_timeout(drawn, backend, described.get("step_timeout"))
        return run_job(Run(job, drawn, folder, described, since), options)


@dataclass(frozen=True)
class Given:
    """What is given again of a run that is opened; None where its record says it."""

    algorithm: Any = None
    env: Any = None
    ticks: int | None = None


def open_run(folder: Path, *, trust: bool) -> tuple[RunFile, bool]:
    """The record of a run, and whether the code that it names may run."""
    record = read_run(folder)
    if not trust:
        check_plain(folder)
    return record, trust or is_remembered(folder / "run.json", recipes_of(record))


def _compare_versions(record: RunFile, announce: Announce) -> None:
    """Report that a run was made with other versions: its numbers may then differ a little."""
    now = {"shoal": __version__, "jax": jax.__version__}
    titles = {"shoal": "Shoal", "jax": "JAX"}
    for name, version in now.items():
        if (before := record.get(name, version)) != version:
            announce(
                f"The run was made with {titles[name]} {printable(before)[:40]}, and resumes "
                f"with {version}: it may not continue to the bit.\n"
            )


def _extended(job: Job, record: RunFile, tick: int, announce: Announce) -> list[Extension]:
    """Every change of the run's length that changed its learning rate; a new one is announced."""
    before, known = record["ticks"], record.get("extended", [])
    if not job.anneals or before == job.ticks:
        return known
    share = 1 - tick / job.ticks
    announce(
        f"The learning rate was to fall to 0 by tick {before}, and now does by tick {job.ticks}: "
        f"it continues at {share:.0%} of its initial value.\n"
    )
    return [*known, {"tick": tick, "from_ticks": before, "to_ticks": job.ticks}]


def made_job(folder: Path, record: RunFile, given: Given, *, trusted: bool) -> Job:
    """The job of a run, made again from its record."""
    algorithm, wanted = given.algorithm, _name_of(record["algorithm"])
    if algorithm is None:
        algorithm = _made(folder, record, "algorithm", trusted=trusted)
    elif wanted == Evaluated.__name__ and not isinstance(algorithm, Evaluated):
        # An algorithm that is given again is evaluated as it was.
        algorithm = _evaluated(folder, record, algorithm)
    env = make_env(given.env, {})
    env = _made(folder, record, "env", trusted=trusted) if env is None else env
    sources = (_source(record[name]) for name in ("algorithm", "env"))
    job = Job(algorithm, env, record["envs"], record["ticks"], *sources)
    job = job.lasting(given.ticks or record["ticks"])
    own = type(algorithm).__name__
    if own != (wanted or own):
        raise SettingError(
            f"{folder} holds a run of {wanted}, not of {own}",
            "Resume with the same algorithm; its settings may change where no shape does.",
        )
    return _check_loop(folder, job)


def _name_of(recipe: Any) -> str:
    """The name of a recipe's type; empty where it has none."""
    name = recipe.get("name") if isinstance(recipe, dict) and "settings" in recipe else ""
    return name if isinstance(name, str) else ""


def _evaluated(folder: Path, record: RunFile, algorithm: Any) -> Evaluated:
    """`algorithm`, evaluated as the run's was, which isn't made again."""
    recipe = record["algorithm"] or {}
    settings = recipe["settings"] if isinstance(recipe["settings"], dict) else {}
    bare = {**recipe, "settings": {**settings, "algorithm": None}}
    return replace(make(bare, f"{folder}/run.json", trusted=False), algorithm=algorithm)


def _check_loop(folder: Path, job: Job) -> Job:
    """Return `job` if its folder describes a loop and an environment, else raise."""
    simulator = getattr(job.env, "simulator", None)
    acts = getattr(job.trained, "actions", None) is not None
    wrong = ""
    if not all(callable(getattr(job.trained, name, None)) for name in ("init", "tick")):
        wrong = f"its algorithm is a {type(job.trained).__name__}"
    elif (acts or type(job.env) in TYPES) and not callable(getattr(job.env, "step", None)):
        wrong = f"its environment is a {type(job.env).__name__}"
    elif type(simulator) in TYPES:
        wrong = f"its environment has a {type(simulator).__name__} for a simulator"
    if wrong:
        raise SettingError(
            f"{folder}/run.json describes nothing that can be trained: {wrong}",
            "Restore the file, or give the algorithm and env to shoal.resume.",
        )
    return job


def _made(folder: Path, record: RunFile, what: str, *, trusted: bool) -> Any:
    match record[what]:
        case {"unknown": kind}:
            raise SettingError(
                f"the {what} of {folder} was an object of {kind!a}, which JSON can't describe",
                f"Give it again: shoal.resume(folder, {what}=...).",
            )
        case recipe:
            return make(recipe, f"`{what}` of {folder}/run.json", trusted=trusted)


def _source(recipe: Any) -> str:
    match recipe:
        case {"from": file, "name": name}:
            return f"{file}:{name}"
    return ""


def _since(folder: Path, job: Job, drawn: Plan, seed: int, announce: Announce) -> StartPoint:
    """The newest complete checkpoint; removes rows and checkpoints after it."""
    _check_not_lost(folder)
    saved = read_newest(folder / "checkpoints", announce)
    tick = saved.snapshot.tick if saved else 0
    if tick >= job.ticks:
        raise SettingError(
            f"the run in {folder} has done {tick} of {job.ticks} ticks",
            f"Give it more to do: --ticks {tick + job.ticks}.",
        )
    origin = drawn.graph.origin
    start: Callable[[], Any] = partial(fresh_start, drawn.graph, seed)
    progress: dict[str, Any] = {}
    if saved:
        snapshot = restored(saved, origin.spec(job.envs), job.title)
        progress = {**saved.record, "resumed": [*saved.record.get("resumed", []), tick]}
        start = partial(with_new_episodes, drawn.graph, seed, snapshot)
    for later in ticks_in(folder / "checkpoints"):
        if later > tick:  # damaged: else it would be the newest
            set_aside(folder / "checkpoints", later)
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        if bad := cut_rows(folder / name, tick):
            announce(f"{bad} rows of {name} could not be read and were removed.\n")
    announce(_resumes(saved, job, drawn))
    return StartPoint(start, progress)


def _check_not_lost(folder: Path) -> None:
    """Refuse to start over where the folder of checkpoints is missing."""
    metrics, is_started = folder / "metrics.jsonl", False
    with suppress(OSError):
        is_started = metrics.stat().st_size > 0
    if is_started and not (folder / "checkpoints").is_dir():
        raise SettingError(
            f"{folder} has rows of metrics and no folder `checkpoints`",
            "Restore the folder; to start over, remove metrics.jsonl too.",
        )


def _resumes(saved: Saved | None, job: Job, drawn: Plan) -> str:
    if saved is None:
        return "There is no checkpoint yet: the run starts over.\n"
    text = f"Resuming from tick {saved.snapshot.tick} of {job.ticks}."
    if any(stage.host for stage in drawn.graph.stages):
        text += (
            f" What {job.envs} environments were in the middle of is lost with the processes "
            "that stepped them: they start new episodes."
        )
    return text + "\n"
