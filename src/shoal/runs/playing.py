"""Trained agents for inference: `shoal.load(run).act(obs)`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.algorithms.evaluated import Evaluated
from shoal.envs.environment import clip
from shoal.envs.spaces import Box, Discrete, Groups, MultiDiscrete, leaves
from shoal.errors import CheckpointError, SettingError
from shoal.runs.checkpoints import Saved, read, read_best, read_newest, restored
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
    if isinstance(job.algorithm, Evaluated):
        return Agent(job.algorithm.algorithm, job.env, state.training, saved.snapshot.tick)
    return Agent(job.algorithm, job.env, state, saved.snapshot.tick)


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


@dataclass(frozen=True)
class Agent:
    """An algorithm with its trained state, as it was before `tick`."""

    algorithm: Any
    env: Any
    state: Any
    tick: int

    def act(self, obs: Any, key: Any = None) -> np.ndarray:
        """The action on one observation, or one for each of many; without memory.

        Without a key it is the greedy action; with one (or an integer), sampled as in training.
        """
        return self.play(obs, None, key)[0]

    def play(self, obs: Any, memory: Any = None, key: Any = None) -> tuple[np.ndarray, Any]:
        """As `act`, with memory: also returns the memory to pass with the next observation."""
        if not hasattr(self.algorithm, "play"):
            raise SettingError(
                f"{type(self.algorithm).__name__} has no method `play`, so it can't act by itself",
                "Give it play(env, state, obs, memory), which returns the best action in one "
                "environment, and what to remember.",
            )
        rows, is_many = self._rows(obs)
        if not is_many:
            memory = jax.tree.map(lambda x: x[None], memory)
        keys = None if key is None else jax.random.split(_as_key(key), _count(rows))
        if keys is not None and "key" not in inspect.signature(self.algorithm.play).parameters:
            raise SettingError(
                f"{type(self.algorithm).__name__}'s play takes no key: it only knows the best",
                "Act without a key.",
            )
        action, memory = self._play(self.state, rows, memory, keys)
        if not is_many:
            action, memory = jax.tree.map(lambda x: x[0], (action, memory))
        return jax.tree.map(np.asarray, action), memory

    @cached_property
    def _play(self) -> Any:
        def one(state: Any, obs: Any, memory: Any, key: Any) -> tuple[Any, Any]:
            more = {} if key is None else {"key": key}
            action, memory = self.algorithm.play(self.env, state, obs, memory, **more)
            space = getattr(self.env, "action_space", None)
            # As environments do in training: what is drawn from a normal may leave its box.
            known = isinstance(space, Groups | Discrete | MultiDiscrete | Box)
            return clip(space, action) if known else action, memory

        return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0)))

    def _rows(self, obs: Any) -> tuple[Any, bool]:
        """Observations with a batch axis, and whether they came with it.

        Without an environment, `obs` is taken for one observation.
        """
        if self.env is None:
            return jax.tree.map(lambda x: np.asarray(x)[None], obs), False
        space = self.env.observation_space
        each: list[Any] = [s for _, s in space.spaces] if isinstance(space, Groups) else [space]
        known = [box for of in each for box in leaves(of)]
        axes = len(known[0].shape) + bool(self.env.agents)
        given = [np.asarray(x) for x in jax.tree.leaves(obs)]
        spare = given[0].ndim - axes if len(given) == len(known) else -1
        pairs = zip(given, known, strict=len(given) == len(known))
        fits = all(x.shape[x.ndim - len(k.shape) :] == k.shape for x, k in pairs)
        if spare not in (0, 1) or not fits:
            shapes = " and ".join(str(list(x.shape)) for x in given)
            raise SettingError(
                f"an observation of {self.env.name} is {space}, not {shapes}",
                "Give one, or many along a first axis.",
            )
        rows = [np.asarray(x, k.dtype) for x, k in zip(given, known, strict=True)]
        rows = rows if spare else [x[None] for x in rows]
        return jax.tree.unflatten(jax.tree.structure(obs), rows), spare == 1


def _count(rows: Any) -> int:
    return len(jax.tree.leaves(rows)[0])


def _as_key(key: Any) -> jax.Array:
    return jax.random.key(key) if isinstance(key, int) else key
