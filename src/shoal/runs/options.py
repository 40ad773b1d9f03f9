"""What can be said of a run beyond what is trained and where: names, types and ranges, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, get_type_hints

from shoal.algorithms import ALGORITHMS
from shoal.errors import SettingError, ShoalError, UnknownNameError
from shoal.planning.cluster import Cluster
from shoal.rl import ranges
from shoal.runs.checkpoints import pace
from shoal.runs.folder import check_name
from shoal.shapes import Count, Index, Seed, Timeout, misfit

# What other libraries call these options.
SYNONYMS = {
    "eval_every": "evaluate",
    "eval_freq": "evaluate",
    "log_dir": "folder",
    "n_envs": "envs",
    "num_env": "envs",
    "num_envs": "envs",
    "num_updates": "ticks",
    "output_dir": "folder",
    "random_seed": "seed",
    "save_freq": "checkpoint_every",
    "steps": "ticks",
    "total_steps": "ticks",
    "total_timesteps": "ticks",
}
P = ParamSpec("P")
R = TypeVar("R")


class TrainOptions(TypedDict, total=False):
    """How to train: everything has a default."""

    ticks: Count
    envs: Count
    backend: str
    seed: Seed
    evaluate: Index  # every so many ticks; 0: never
    cluster: Cluster
    address: str  # of a Ray cluster; without it, the one at hand
    restarts: Index  # lost workers within five minutes that a run survives
    step_timeout: Timeout  # seconds that a step of environments in Python may take
    folder: str | Path
    name: str
    progress: bool
    announce: Callable[[str], None]
    checkpoint_every: str | Count  # ticks, "60s", or "end"
    keep: Count  # how many of the newest checkpoints
    algorithm_from: str  # "file.py:name", should it have no other recipe
    env_from: str


class ResumeOptions(TypedDict, total=False):
    """How to resume; what isn't given is as it was."""

    ticks: Count
    backend: str
    cluster: Cluster
    address: str
    restarts: Index
    step_timeout: Timeout
    algorithm: Any
    env: Any
    checkpoint_every: str | Count
    keep: Count
    progress: bool
    announce: Callable[[str], None]
    trust: bool  # whether the folder's own code may run: see docs/resume.md


def with_options(options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function whose keywords are `options` a signature that lists them, and check them."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        own = [
            p for p in signature(function).parameters.values() if p.kind != Parameter.VAR_KEYWORD
        ]
        hints = get_type_hints(options)
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in hints.items()
        ]
        known = {p.name for p in own}

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = {name: x for name, x in kwargs.items() if name not in known}
            kept = check_options(given, options, f"shoal.{function.__name__}")
            named: Any = {name: x for name, x in kwargs.items() if name in known}
            return function(*args, **named, **kept)  # pyright: ignore[reportCallIssue]

        checked.__signature__ = Signature([*own, *more])  # type: ignore[attr-defined]
        return checked

    return decorated


def check_options(given: Mapping[str, Any], options: Any, title: str) -> dict[str, Any]:
    """What is given, without None, if every name is known and every value can be meant."""
    hints = get_type_hints(options, include_extras=True)
    kept = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in hints:
            raise _unknown(name, hints, title)
        if value is not None and (wrong := misfit(value, hints[name])):
            wanted = wrong.partition(", not ")[2]
            raise SettingError(f"{name}={shown(value)} is not {wanted}", f"Set {name} to {wanted}.")
    if "checkpoint_every" in kept:
        pace(kept["checkpoint_every"])
    if "name" in kept:
        check_name(kept["name"])
    return kept


def _unknown(name: str, known: Mapping[str, Any], title: str) -> ShoalError:
    """The error for a keyword that isn't there: another library's, an algorithm's, or none."""
    setting = ranges.SYNONYMS.get(name, name)
    if (right := SYNONYMS.get(name)) in known:
        fix = f"Did you mean `{right}`?"
    elif any(setting in kind.__dataclass_fields__ for kind in ALGORITHMS.values()):
        fix = f"It is a setting of algorithms: {title}(shoal.algorithms.PPO({setting}=...), ...)."
    else:
        return UnknownNameError(f"parameter of {title}", name, known)
    return SettingError(f"{title} has no parameter `{name}`", fix)


def shown(value: Any) -> str:
    """A value as it may stand in one line."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
