"""Go on with a run from its newest checkpoint, as it was or distributed in another way."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from shoal.algorithms.evaluated import Evaluated
from shoal.errors import SettingError
from shoal.planning.cluster import Cluster
from shoal.planning.plan import Plan
from shoal.planning.policy import DistributionPolicy
from shoal.runs.checkpoints import Saved, forget, read_newest, restored, ticks_in
from shoal.runs.job import FORM, RESTARTS, StartPoint, Trained, run_job, with_new_episodes
from shoal.runs.recipes import load_file, made_from
from shoal.runs.records import cut_rows, locked
from shoal.runs.training import (
    Job,
    beside_evaluation,
    cluster_of,
    ensure_devices,
    plan,
    with_total_ticks,
)
from shoal.runtime.run import check_backend, fresh_start
from shoal.tracing.frozen import check_not_frozen
from shoal.tracing.trace import trace


class Again(TypedDict, total=False):
    """How to go on; what isn't said is as it was."""

    ticks: int
    backend: str
    cluster: Cluster
    address: str
    restarts: int
    step_timeout: float
    algorithm: Any
    env: Any
    checkpoint_every: str | int
    keep: int
    progress: bool
    announce: Callable[[str], None]


def resume(
    folder: str | Path, distribute: DistributionPolicy | None = None, **how: Unpack[Again]
) -> Trained:
    """Go on with the run in `folder` until it has made `ticks` ticks in all.

    A run whose plan is in lockstep goes on to the bit. Under another distribution policy, replica
    count or backend it goes on with the same state. `algorithm` and `env` are needed only where
    they were objects that JSON can't describe.
    """
    folder = Path(folder)
    told = read_run(folder)
    with locked(folder):
        job = made_job(folder, told, how)
        backend = check_backend(how.get("backend") or told["backend"])
        distribution = distribute or made_from(told["distribution"])
        distribution = beside_evaluation(job, distribution)
        ensure_devices(distribution)
        graph = trace(job.algorithm, job.env, envs=job.envs)
        check_not_frozen(graph.origin, job.envs)
        drawn = plan(graph, distribution, cluster_of({**how, "backend": backend}))
        announce = how.get("announce", lambda text: None)
        since = _since(folder, job, drawn, told["seed"], announce)
        kept = ("checkpoint_every", "keep", "seed", "restarts")
        settings = {name: how.get(name, told.get(name, 0)) for name in kept}
        settings["step_timeout"] = how.get("step_timeout", told.get("step_timeout"))
        sources = {f"{name}_from": _source(told[name]) for name in ("algorithm", "env")}
        if "restarts" not in how:
            settings["replaces"] = told.get("replaces", RESTARTS)
        given = {**how, **settings, **sources, "backend": backend}
        given["extended"] = _extended(job, told, since.told.get("tick", 0), announce)
        return run_job(job, drawn, folder, given, since)


def _extended(
    job: Job, told: dict[str, Any], tick: int, announce: Callable[[str], None]
) -> list[dict[str, int]]:
    """Every change of the run's length that changed its learning rate; a new one is announced."""
    before, known = told["ticks"], told.get("extended", [])
    if not job.anneals or before == job.ticks:
        return known
    share = 1 - tick / job.ticks
    announce(
        f"The learning rate was to fall to 0 by tick {before}, and now does by tick {job.ticks}: "
        f"it continues at {share:.0%} of its initial value.\n"
    )
    return [*known, {"tick": tick, "from_ticks": before, "to_ticks": job.ticks}]


def read_run(folder: Path) -> dict[str, Any]:
    """What a run folder says of how the run was made."""
    try:
        told = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingError(
            f"there is no run in {folder} to go on with: it has no run.json",
            "Name the folder of a run, such as runs/ppo-CartPole-v1-1.",
        ) from error
    except ValueError as error:
        raise SettingError(f"{folder}/run.json can't be read: {error}", "Bring it back.") from error
    if told.get("form") != FORM:
        raise SettingError(
            f"{folder}/run.json has form {told.get('form')}, and this Shoal reads form {FORM}",
            "Go on with the Shoal that made it.",
        )
    return told


def made_job(folder: Path, told: dict[str, Any], how: Again) -> Job:
    """The job of a run, made again from what its folder says."""
    algorithm = how.get("algorithm") or _made(folder, told, "algorithm")
    if told["algorithm"].get("name") == Evaluated.__name__ and not isinstance(algorithm, Evaluated):
        # Whoever gives the algorithm again need not say how it was evaluated.
        algorithm = replace(_made(folder, told, "algorithm"), algorithm=algorithm)
    env = how.get("env") or _made(folder, told, "env")
    ticks = how.get("ticks") or told["ticks"]
    job = Job(with_total_ticks(algorithm, ticks), env, told["envs"], ticks)
    own = type(algorithm).__name__
    wanted = told["algorithm"].get("name", own)
    if own != wanted:
        raise SettingError(
            f"{folder} holds a run of {wanted}, not of {own}",
            "Go on with the same algorithm; its settings may change where no shape does.",
        )
    return job


def _made(folder: Path, told: dict[str, Any], what: str) -> Any:
    match told[what]:
        case {"unknown": kind}:
            raise SettingError(
                f"the {what} of {folder} was an object of {kind}, which JSON can't describe",
                f"Give it again: shoal.resume(folder, {what}=...).",
            )
        case {"from": file, "name": name}:
            found = getattr(load_file(Path(file)), name)
            return found() if inspect.isclass(found) or inspect.isfunction(found) else found
        case recipe:
            return made_from(recipe)


def _source(recipe: Any) -> str | None:
    match recipe:
        case {"from": file, "name": name}:
            return f"{file}:{name}"
    return None


def _since(
    folder: Path, job: Job, drawn: Plan, seed: int, announce: Callable[[str], None]
) -> StartPoint:
    """The newest whole checkpoint; later rows and checkpoints are of a course not taken."""
    saved = read_newest(folder / "checkpoints", announce)
    tick = saved.snapshot.tick if saved else 0
    if tick >= job.ticks:
        raise SettingError(
            f"the run in {folder} has done {tick} of {job.ticks} ticks",
            f"Give it more to do: --ticks {tick + job.ticks}.",
        )
    origin = drawn.graph.origin
    start: Callable[[], Any] = partial(fresh_start, drawn.graph, seed)
    told: dict[str, Any] = {}
    if saved:
        snapshot = restored(saved, origin.spec(job.envs), job.title)
        told = {**saved.told, "resumed": [*saved.told["resumed"], tick]}
        start = partial(with_new_episodes, drawn.graph, seed, snapshot)
    for later in ticks_in(folder / "checkpoints"):
        if later > tick:
            forget(folder / "checkpoints", later)
    for name in ("metrics", "evaluation"):
        cut_rows(folder / f"{name}.jsonl", tick)
    announce(_going_on(saved, job, drawn))
    return StartPoint(start, told)


def _going_on(saved: Saved | None, job: Job, drawn: Plan) -> str:
    if saved is None:
        return "There is no checkpoint yet: the run begins again.\n"
    text = f"Going on from tick {saved.snapshot.tick} of {job.ticks}."
    if any(stage.host for stage in drawn.graph.stages):
        text += (
            f" What {job.envs} environments were in the middle of is lost with the processes "
            "that stepped them: they begin new episodes."
        )
    return text + "\n"
