"""Every option of a run, once: its name, type, help and default, for Python and the command."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import cache, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from shoal.errors import SettingError, ShoalError, UnknownNameError
from shoal.planning.cluster import Cluster
from shoal.planning.policy import DistributionPolicy
from shoal.rl import ranges
from shoal.runs.files.folder import check_name
from shoal.runs.files.pace import pace
from shoal.shapes import Between, Count, Index, Seed, Timeout, misfit

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741  options
R = TypeVar("R")
Settings = Mapping[str, Any]
# What other libraries call these options.
SYNONYMS = {
    "algo": "algorithm",
    "check_freq": "checkpoint_every",
    "checkpoint_freq": "checkpoint_every",
    "config_file": "config",
    "env_id": "env",
    "env_kwargs": "env_settings",
    "eval_every": "evaluate",
    "eval_freq": "evaluate",
    "exp_name": "name",
    "experiment_name": "name",
    "hyperparameters": "settings",
    "log_dir": "folder",
    "logger": "log",
    "max_steps": "steps",
    "n_envs": "envs",
    "n_timesteps": "steps",
    "num_env": "envs",
    "num_envs": "envs",
    "num_seeds": "seeds",
    "num_timesteps": "steps",
    "num_updates": "ticks",
    "num_workers": "actors",
    "output_dir": "folder",
    "random_seed": "seed",
    "run_name": "name",
    "save_freq": "checkpoint_every",
    "steps": "ticks",  # where steps can't be said
    "total_steps": "steps",
    "total_timesteps": "steps",
    "track": "log",
    "verbose": "progress",
    "wandb": "log",
}

CALLED = ("on_tick", "on_evaluation", "on_checkpoint", "announce")


@dataclass(frozen=True, slots=True)
class Doc:
    """What the help says of an option; one without a text is no option of the command."""

    text: str = ""
    group: str = ""
    metavar: str = ""
    default: str = ""  # how an option that isn't given is filled in


GROUPS = (LOOP, LENGTH, PLACE, TRACES) = (
    "The loop",
    "How long",
    "Where it runs",
    "What it leaves",
)


@dataclass(frozen=True)
class LoopOptions:
    """What is trained, and how it is distributed: abstract, the options of several commands."""

    algorithm: Annotated[Any, Doc("a name (`shoal algorithms`), or yours: file.py:Class", LOOP)]
    env: Annotated[Any, Doc("a name (`shoal envs`), or file.py:make_env", LOOP)] = None
    distribute: Annotated[
        DistributionPolicy | str | None,
        Doc("a name (`shoal policies`), or file.py:function", PLACE, "POLICY", "fused"),
    ] = None
    _: KW_ONLY
    settings: Annotated[
        Settings, Doc("a setting of the algorithm; also --NAME VALUE", LOOP, "NAME=VALUE")
    ] = field(default_factory=dict)
    env_settings: Annotated[Settings, Doc("a setting of the environment", LOOP, "NAME=VALUE")] = (
        field(default_factory=dict)
    )
    distribute_settings: Annotated[Settings, Doc()] = field(default_factory=dict)
    envs: Annotated[Count | None, Doc("environments", LOOP, "N", "preset, or 16")] = None

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class PlaceOptions:
    """Where a loop runs: abstract, the options of several commands."""

    _: KW_ONLY
    backend: Annotated[
        str | None, Doc("inline, threads, processes or ray", PLACE, "NAME", "threads")
    ] = None
    cluster: Annotated[Cluster | None, Doc()] = None
    address: Annotated[str | None, Doc("of a Ray cluster", PLACE, "HOST:PORT", "at hand")] = None


@dataclass(frozen=True)
class RunOptions(PlaceOptions):
    """How a run is carried out: abstract, the options of training and of resuming."""

    _: KW_ONLY
    steps: Annotated[
        float | None, Between(1, 2**62), Doc("environment steps, such as 1e6", LENGTH, "N")
    ] = None
    ticks: Annotated[
        Count | None, Doc("or turns of the training loop", LENGTH, "N", "preset, or 100")
    ] = None
    restarts: Annotated[
        Index | None, Doc("lost workers that a run survives in 5 minutes", PLACE, "N", "ray: 3")
    ] = None
    step_timeout: Annotated[
        Timeout | None, Doc("of an environment in Python", PLACE, "SECONDS", "none")
    ] = None
    checkpoint_every: Annotated[
        str | Count | None, Doc("100 (ticks), 30s (seconds) or end", TRACES, "TIME", "60s")
    ] = None
    keep: Annotated[Count | None, Doc("newest checkpoints that are kept", TRACES, "N", "3")] = None
    log: Annotated[
        Any, Doc("csv, tensorboard, wandb, mlflow, prometheus", TRACES, "SINK", "none")
    ] = None
    spans: Annotated[bool, Doc("record all that workers do, for `shoal profile`", TRACES)] = False
    profile_ticks: Annotated[
        Count | None, Doc("ticks that wait for devices, for `shoal profile`", TRACES, "N", "none")
    ] = None
    on_tick: Annotated[Callable[[dict[str, Any]], Any] | None, Doc()] = None
    on_evaluation: Annotated[Callable[[dict[str, Any]], Any] | None, Doc()] = None
    on_checkpoint: Annotated[Callable[[Path], Any] | None, Doc()] = None
    progress: Annotated[bool | None, Doc()] = None
    announce: Annotated[Callable[[str], None] | None, Doc()] = None

    @property
    def records(self) -> bool:
        """Whether workers record spans."""
        return self.spans or self.profile_ticks is not None


@dataclass(frozen=True)
class TrainOptions(LoopOptions, RunOptions):
    """The options of `shoal.train`."""

    _: KW_ONLY
    seed: Annotated[Seed, Doc("of all random numbers", LOOP, "N", "0")] = 0
    evaluate: Annotated[
        Index, Doc("play whole episodes every so many ticks", LENGTH, "TICKS", "never")
    ] = 0
    name: Annotated[str | None, Doc("of the run's folder", TRACES, "NAME", "numbered")] = None
    folder: Annotated[str | Path, Doc("where runs are kept", TRACES, "DIR", "runs")] = "runs"

    def __post_init__(self) -> None:
        check_values(self)
        if self.name is not None:
            check_name(self.name)


@dataclass(frozen=True)
class VerifyOptions(LoopOptions, PlaceOptions):
    """The options of `shoal.verify`."""

    _: KW_ONLY
    ticks: Annotated[Count, Doc("turns of the training loop", LENGTH, "N", "3")] = 3
    seed: Annotated[Seed, Doc("of all random numbers", LOOP, "N", "0")] = 0


@dataclass(frozen=True)
class ResumeOptions(RunOptions):
    """The options of `shoal.resume`; what isn't given is as it was."""

    folder: Annotated[str | Path, Doc("a folder, or the name of a run in runs/", LOOP, "RUN")]
    distribute: Annotated[
        DistributionPolicy | str | None, Doc("another one", PLACE, "POLICY", "as it was")
    ] = None
    _: KW_ONLY
    distribute_settings: Annotated[Settings, Doc()] = field(default_factory=dict)
    algorithm: Annotated[Any, Doc()] = None
    env: Annotated[Any, Doc()] = None
    trust: Annotated[
        bool, Doc("run code that the folder names and that isn't Shoal's own", LOOP)
    ] = False

    def __post_init__(self) -> None:
        check_values(self)


def check_values(options: O) -> O:
    """Return options if all their values can be meant, before anything is started or written."""
    for name, hint in hints_of(type(options)).items():
        value = getattr(options, name)
        if name == "distribute" or value is None:  # check_distribution says more
            continue
        if wrong := misfit(value, hint):
            wanted = wrong.partition(", not ")[2]
            raise SettingError(f"{name}={shown(value)} is not {wanted}", f"Set {name} to {wanted}.")
    for name in CALLED:
        if (value := getattr(options, name, None)) is not None and not callable(value):
            raise SettingError(
                f"{name}={shown(value)} can't be called", f"Set {name} to a function."
            )
    if (every := getattr(options, "checkpoint_every", None)) is not None:
        pace(every)
    if isinstance(options, RunOptions) and options.steps and options.ticks:
        raise SettingError(
            f"steps={options.steps:,.0f} and ticks={options.ticks} both say how long to train",
            "Give one of them.",
        )
    return options


def takes(kind: Callable[P, O]) -> Callable[[Callable[[O], R]], Callable[P, R]]:
    """Let a function of an options object be called with the options themselves, checked."""

    def decorated(function: Callable[[O], R]) -> Callable[P, R]:
        made: Any = kind
        title = f"shoal.{function.__name__}"

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if wrong := next((name for name in kwargs if name not in hints_of(made)), ""):
                raise unknown(wrong, hints_of(made), title)
            given = {name: value for name, value in kwargs.items() if value is not None}
            try:
                bound = signature(made).bind(*args, **given)
            except TypeError as error:
                raise TypeError(f"{title}() {error}") from None
            return function(made(*bound.args, **bound.kwargs))

        called.__signature__ = _plain_signature(made, function)  # type: ignore[attr-defined]
        called.__doc__ = f"{function.__doc__}\n    Options:\n{_described(made)}"
        return called

    return decorated


def _plain_signature(kind: Any, function: Callable[..., Any]) -> Signature:
    """The options as parameters, with types as a reader wants them."""
    hints, slots = get_type_hints(kind), []
    made: dict[str, Any] = {each.name: each.default_factory for each in fields(kind)}
    for name, slot in signature(kind).parameters.items():
        default = slot.default if made[name] is MISSING else made[name]()
        slots.append(slot.replace(annotation=hints[name], default=default))
    return Signature(slots, return_annotation=signature(function).return_annotation)


def _described(kind: Any) -> str:
    """The help of each option, a line each."""
    docs = {name: doc_of(hint) for name, hint in hints_of(kind).items()}
    lines = [
        f"        {name}: {doc.text}" + (f" (default: {doc.default})" if doc.default else "")
        for name, doc in docs.items()
        if doc.text
    ]
    return "\n".join(lines)


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The options of a kind with their types, and what these are annotated with."""
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def doc_of(hint: Any) -> Doc:
    """The help of an option with this type."""
    return next((x for x in get_args(hint)[1:] if isinstance(x, Doc)), Doc())


def unknown(name: str, known: Mapping[str, Any], title: str) -> ShoalError:
    """The error for an option that isn't there: another library's, an algorithm's, or none."""
    from shoal.algorithms import ALGORITHMS

    setting = ranges.SYNONYMS.get(name, name)
    if (right := meant(name, known)) in known:
        fix = f"Did you mean `{right}`?"
    elif any(setting in kind.__dataclass_fields__ for kind in ALGORITHMS.values()):
        fix = f"It is a setting of algorithms: {title}(shoal.algorithms.PPO({setting}=...), ...)."
    else:
        return UnknownNameError(f"parameter of {title}", name, known)
    return SettingError(f"{title} has no parameter `{name}`", fix)


def meant(name: str, known: Collection[str]) -> str:
    """What an option of another library is called here, among those that are known."""
    while (name := SYNONYMS.get(name, "")) and name not in known:
        pass
    return name


def shown(value: Any) -> str:
    """A value as it may stand in one line."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def option_of(parameter: str) -> str:
    """The option that sets a distribution policy's parameter; --envs counts environments."""
    return "--env-replicas" if parameter == "envs" else f"--{parameter.replace('_', '-')}"
