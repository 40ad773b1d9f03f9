"""Trained agents for inference: `shoal.load(run).act(obs)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from shoal.errors import CheckpointError, SettingError
from shoal.runs.files.checkpoints import Saved, read, read_best, read_newest, restored
from shoal.runs.results.agent import Agent
from shoal.runs.resuming import Given, made_job, open_run
from shoal.tracing.trace import Origin

WHICH = ("newest", "best")


def load(
    run: str | Path,
    which: str = "newest",
    *,
    algorithm: Any = None,
    env: Any = None,
    trust: bool = False,
) -> Agent:
    """Load the agent of a run folder (its newest or best checkpoint) or of a checkpoint folder.

    `algorithm` and `env` are needed only where they were objects that JSON can't describe. `trust`
    lets code run that the folder names and that isn't Shoal's own: see docs/resume.md.
    """
    if which not in WHICH:
        raise SettingError(f"which={which!r}", f"Say one of: {', '.join(WHICH)}.")
    run = Path(run)
    is_one = (run / "metadata.json").exists()
    folder = run.resolve().parent.parent if is_one else run
    record, trusted = open_run(folder, trust=trust)
    job = made_job(folder, record, Given(algorithm, env), trusted=trusted)
    saved = read(run) if is_one else _saved(folder, which)
    spec = Origin(job.algorithm, job.env).spec(job.envs)
    values = restored(saved, spec, job.title).values
    state = jax.tree.unflatten(jax.tree.structure(spec), list(values.values()))
    return Agent.of(job.algorithm, job.env, state, saved.snapshot.tick)


def _saved(folder: Path, which: str) -> Saved:
    if which == "best":
        return read_best(folder / "checkpoints")
    damaged: list[str] = []
    found = read_newest(folder / "checkpoints", damaged.append)
    if found is None:
        raise CheckpointError(
            f"the run in {folder} has no checkpoint yet", "Let it train a while, then load it."
        )
    return found
