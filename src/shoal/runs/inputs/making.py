"""What a user names, as objects: algorithms, environments and distribution policies."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal import envs as environments
from shoal.algorithms import ALGORITHMS, PRESETS, Preset
from shoal.algorithms.evaluated import Evaluated
from shoal.envs.given import called
from shoal.errors import SettingError, ShoalError, UnknownNameError
from shoal.planning.policies import POLICIES, fused, single_learner_coarse
from shoal.planning.policy import DistributionPolicy
from shoal.rl import futile
from shoal.rl.ranges import SYNONYMS
from shoal.runs.inputs.options import LoopOptions, option_of, shown
from shoal.runs.inputs.recipes import load_file, with_source
from shoal.shapes import NAMES

NONE = "none"  # the environment of a loop that has none
USUAL_ENVS, USUAL_TICKS = 16, 100
FILE = ".py:"  # what the name of an object in a file has
KINDS: dict[type, str] = {  # of settings, as messages say them
    **NAMES, tuple: "a tuple such as 64,64 (of one: 64,)", type(None): "a number or None",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What to train, with names turned into objects and presets filled in."""

    algorithm: Any
    env: Any
    envs: int
    ticks: int
    algorithm_from: str = ""  # "file.py:name", where it comes from a file
    env_from: str = ""

    @property
    def trained(self) -> Any:
        """The algorithm itself, without the wrapper that evaluates it."""
        is_wrapped = isinstance(self.algorithm, Evaluated)
        return self.algorithm.algorithm if is_wrapped else self.algorithm

    @property
    def title(self) -> str:
        """The algorithm's name in lower case."""
        return type(self.trained).__name__.lower()

    @property
    def anneals(self) -> bool:
        """Whether the learning rate falls to 0 with the run's last tick."""
        return bool(getattr(self.trained, "anneal_lr", False))

    @property
    def learning_rate(self) -> dict[str, Any]:
        """The learning rate at the first tick, and after the last; empty where it isn't known."""
        rate = getattr(self.trained, "learning_rate", None)
        if not isinstance(rate, float | int):
            return {}
        if self.anneals:
            return {"initial": rate, "final": 0.0, "total_ticks": self.ticks}
        return {"initial": rate, "final": rate}

    @property
    def remarks(self) -> list[str]:
        """What the run is too short to learn, unless a preset is known to learn it."""
        for preset in PRESETS.get(self.title, {}).values():
            known = with_total_ticks(preset.algorithm, self.ticks)
            if known == self.trained and self.ticks >= preset.ticks:
                return []
        return futile.remarks(self.loop) if self.is_ours else []

    @property
    def is_ours(self) -> bool:
        """Whether the algorithm is one of Shoal's."""
        return type(self.trained) in ALGORITHMS.values()

    @property
    def loop(self) -> futile.Loop:
        """What is trained, without names."""
        return futile.Loop(self.trained, self.env, self.envs, self.ticks)

    @property
    def name(self) -> str:
        """The title of its runs."""
        return self.title if self.env is None else f"{self.title}-{self.env_name}"

    @property
    def env_name(self) -> str:
        """The environment's name."""
        own = "none" if self.env is None else type(self.env).__name__
        return str(getattr(self.env, "name", "") or own)

    def lasting(self, ticks: int) -> Job:
        """The same job with another number of ticks."""
        algorithm = with_total_ticks(self.algorithm, ticks)
        return check_learns(replace(self, algorithm=algorithm, ticks=ticks))


def make_job(loop: LoopOptions, *, ticks: int | None = None, evaluate: int = 0) -> Job:
    """Turn names into objects; a preset gives the settings, environments and ticks not given."""
    env = make_env(loop.env, loop.env_settings)
    preset = find_preset(loop.algorithm, loop.env if isinstance(loop.env, str) else env)
    algorithm = make_algorithm(loop.algorithm, loop.settings, preset)
    check_needed(algorithm, env, evaluate=evaluate)
    if env is not None:
        check_env(algorithm, env)
    check_actions(algorithm, env)
    ticks = ticks or (preset.ticks if preset else USUAL_TICKS)
    algorithm = with_total_ticks(check_total_ticks(algorithm, ticks), ticks)
    own = getattr(algorithm, "envs", None) if env is None else None
    usual = preset.envs if preset else own if isinstance(own, int) else USUAL_ENVS
    if evaluate:
        algorithm = Evaluated(algorithm, every=evaluate)
    sources = (_source(loop.algorithm), _source(loop.env))
    job = Job(algorithm, env, loop.envs or usual, ticks, *sources)
    return job if getattr(loop, "steps", None) else check_learns(job)  # steps: see `lasting`


def check_learns(job: Job) -> Job:
    """`job`, unless its algorithm is one of Shoal's and can't learn with its settings."""
    if job.is_ours:
        futile.check_can_learn(job.loop)
    return job


def _source(named: Any) -> str:
    return named if isinstance(named, str) and FILE in named else ""


def find_preset(algorithm: Any, env: Any) -> Preset | None:
    """Settings known to learn, if there are any for this pair of names."""
    if not isinstance(algorithm, str):
        return None
    full = env if isinstance(env, str) else str(getattr(env, "name", ""))
    return PRESETS.get(algorithm, {}).get(full.rpartition(":")[2])


# Algorithms


def make_algorithm(named: Any, settings: Mapping[str, Any], preset: Preset | None = None) -> Any:
    """The algorithm that is named, or given, with these settings."""
    if not isinstance(named, str):
        return with_settings(named, settings)
    if FILE in named:
        return with_settings(_made(load(named), {}), settings)
    if named not in ALGORITHMS:
        raise UnknownNameError("algorithm", named, ALGORITHMS)
    return with_settings(preset.algorithm if preset else ALGORITHMS[named](), settings)


def with_settings(algorithm: Any, settings: Mapping[str, Any]) -> Any:
    """The algorithm with some settings changed; each must exist and keep its kind."""
    if not settings:
        return algorithm
    title = type(algorithm).__name__
    if not dataclasses.is_dataclass(algorithm) or isinstance(algorithm, type):
        raise SettingError(f"{title} is no dataclass, so it has no settings", "Leave out --set.")
    known = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
    settings = {  # TOML and JSON have lists alone
        name: tuple(x) if isinstance(x, list) and isinstance(known.get(name), tuple) else x
        for name, x in settings.items()
    }
    objects = {f.name for f in dataclasses.fields(algorithm) if f.type in (Any, "Any")}
    for name, value in settings.items():
        if name not in known:
            raise _unknown_setting(algorithm, name, known)
        if name not in objects and not _fits(value, known[name]):
            kind = KINDS.get(type(known[name]), f"a {type(known[name]).__name__}")
            raise SettingError(f"{title}.{name} is {kind}, not {shown(value)}", f"Give {kind}.")
    return replace(algorithm, **{n: _loaded(x) if n in objects else x for n, x in settings.items()})


def _loaded(value: Any) -> Any:
    """A setting that is an object of the user's, such as a network; it may be `file.py:name`."""
    if not (isinstance(value, str) and FILE in value):
        return value
    file, _, name = value.rpartition(":")
    return with_source(_made(load(value), {}), Path(file), name)


def _unknown_setting(algorithm: Any, name: str, known: Mapping[str, Any]) -> ShoalError:
    """The error for a setting under another name, of another algorithm, or of none."""
    title = type(algorithm).__name__
    if (right := SYNONYMS.get(name)) in known:
        return SettingError(
            f"{title} has no setting `{name}`", f"Did you mean `{right}`? Use --set {right}=VALUE."
        )
    others = [n for n, kind in ALGORITHMS.items() if name in _field_names(kind)]
    if not others:
        return UnknownNameError(f"setting of {title}", name, known)
    why = ": it keeps no state between steps" if name == "memory" else ""
    return SettingError(
        f"{title} has no setting `{name}`{why}",
        f"Use an algorithm that has it: {', '.join(others)}; or one of its own settings: "
        f"{', '.join(sorted(known))}.",
    )


def _field_names(kind: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(kind)}


def _fits(value: Any, present: Any) -> bool:
    if present is None or value is None:
        return value is None or isinstance(value, int | float)
    if isinstance(present, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(present, bool)
    wanted = (int, float) if isinstance(present, float) else type(present)
    return isinstance(value, wanted)


def check_total_ticks(algorithm: Any, ticks: int) -> Any:
    """`algorithm`, unless it anneals over another length than that of the run."""
    said = getattr(algorithm, "total_ticks", None)
    if said and said != ticks and getattr(algorithm, "anneal_lr", True):
        raise SettingError(
            f"total_ticks={said} of {type(algorithm).__name__}, and the run has {ticks} ticks",
            "Leave total_ticks out: it is the length of the run, which fills it in.",
        )
    return algorithm


def with_total_ticks(algorithm: Any, ticks: int) -> Any:
    """`algorithm` with the length of the run, if its schedules need it."""
    if isinstance(algorithm, Evaluated):
        return replace(algorithm, algorithm=with_total_ticks(algorithm.algorithm, ticks))
    is_plain = dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type)
    if not is_plain or "total_ticks" not in _field_names(algorithm):
        return algorithm
    known: Any = algorithm
    return replace(known, total_ticks=ticks)


# Environments


def make_env(named: Any, settings: Mapping[str, Any]) -> Any:
    """The environment that is named, or given; None for a loop that has none."""
    if named is None or (isinstance(named, str) and named == NONE):
        if settings:
            raise SettingError(
                f"--env-set {next(iter(settings))} is about an environment, and none is named",
                "Name one after the algorithm, or leave it out.",
            )
        return None
    if isinstance(named, str) and FILE not in named:
        return environments.make(named, **settings)
    found = load(named) if isinstance(named, str) else named
    if (made := environments.adapted(found, settings)) is not None:
        return made
    if isinstance(named, str):
        return _made_env(named, found, settings)
    if settings:
        raise SettingError(
            f"the environment is an object, which takes no setting {next(iter(settings))}",
            "Make it with its settings, or give its name.",
        )
    return named


def _made_env(text: str, found: Any, settings: Mapping[str, Any]) -> Any:
    """The environment that `file.py:name` names or makes, with these settings."""
    if settings and not callable(found):
        raise SettingError(
            f"{text} is an object, which takes no --env-set {next(iter(settings))}=...",
            "Name a function or class that makes it.",
        )
    return _made(found, settings)


def check_env(algorithm: Any, env: Any) -> Any:
    """`env`, unless it is what an algorithm of Shoal's can't step."""
    title = type(env).__name__
    acts = getattr(algorithm, "actions", None) is not None
    if acts and not all(hasattr(env, name) for name in ("reset", "step", "action_space")):
        raise SettingError(
            f"the environment is a {title}, which has no reset, step and action_space",
            'Name one, such as "CartPole-v1", or give a shoal.envs.Environment; or an object, a '
            "class or a function of Gymnasium, PettingZoo, gymnax or Brax.",
        )
    return env


def check_needed(algorithm: Any, env: Any, *, evaluate: int) -> None:
    """Refuse a missing environment where one is needed, to act in or for an evaluation."""
    if env is not None:
        return
    title = type(algorithm).__name__
    if getattr(algorithm, "actions", None) is not None:
        raise SettingError(f"{title} acts in an environment, and none is named", "Name one.")
    if evaluate:
        raise SettingError(
            f"{title} has no environment, so there is nothing to play for an evaluation",
            "Leave the evaluation out, and show what matters as a metric.",
        )


def check_actions(algorithm: Any, env: Any) -> None:
    """Refuse an algorithm that can't act in this environment, and name those that can.

    An algorithm that doesn't say where it can act is checked only when it is traced.
    """
    space = getattr(env, "action_space", None)
    inner = [each for _, each in space.spaces] if isinstance(space, environments.Groups) else []
    spaces, team = [space, *inner], bool(getattr(env, "agents", ()) or inner)
    known: tuple[type, ...] | None = getattr(algorithm, "actions", None)
    title, name = type(algorithm).__name__, getattr(env, "name", type(env).__name__)
    if known is None or space is None:
        return
    able = {n: all(isinstance(s, kind.actions) for s in spaces) for n, kind in ALGORITHMS.items()}
    others = [n for n, kind in ALGORITHMS.items() if able[n] and _trains(kind, team=team)]
    fix = f"Algorithms that can: {', '.join(others)}." if others else "No algorithm here can."
    if not all(isinstance(s, known) for s in spaces):
        acts = " or ".join(s.__name__ for s in known)
        what = f"its actions are {space}, and {title} acts in {acts} only"
        raise SettingError(f"{title} can't act in {name}: {what}", fix)
    if not _trains(algorithm, team=team):
        has, trains = ("several agents", "one") if team else ("one agent", "several")
        what = f"it has {has}, and {title} trains {trains}"
        raise SettingError(f"{title} can't act in {name}: {what}", fix)


def _trains(algorithm: Any, *, team: bool) -> bool:
    """Whether an algorithm trains several agents, or one alone."""
    return getattr(algorithm, "agents", "any") in ("any", "several" if team else "one")


# Distribution policies


def make_distribution(named: Any, settings: Mapping[str, Any]) -> DistributionPolicy | None:
    """The distribution policy that is given, as an object or by name, with these parameters."""
    if not isinstance(named, str):
        if settings:
            raise SettingError(
                f"{option_of(next(iter(settings)))} has no effect without --distribute",
                "Name a distribution policy, too.",
            )
        return check_distribution(named)
    made = load(named) if FILE in named else _named_distribution(named)
    taken = inspect.signature(made).parameters if inspect.isfunction(made) else {}
    for parameter in settings:
        if parameter not in taken:
            raise SettingError(
                f"{named} takes no {option_of(parameter)}",
                f"It takes: {', '.join(map(option_of, taken)) or 'nothing'}.",
            )
    return check_distribution(_made(made, settings) if inspect.isfunction(made) else made)


def _named_distribution(name: str) -> Any:
    if (known := name.replace("-", "_")) in POLICIES:
        return POLICIES[known]
    names = [known.replace("_", "-") for known in POLICIES]
    raise UnknownNameError("distribution policy", name, names)


def check_distribution(given: Any) -> DistributionPolicy | None:
    """`given`, if it is a distribution policy or None."""
    if given is None or isinstance(given, DistributionPolicy):
        return given
    called = f", called: shoal.{given.__name__}()" if given in POLICIES.values() else ""
    raise SettingError(
        f"{shown(given)} is no distribution policy",
        f"Give one{called or ' such as shoal.impala(actors=2)'}, or its name.",
    )


def default_distribution(env: Any) -> DistributionPolicy:
    """Everything in one program, unless the environments are Python's: then they are apart."""
    is_python = isinstance(env, environments.HostEnvironment)
    return single_learner_coarse(actors=1) if is_python else fused()


# Files


def load(text: str) -> Any:
    """The object that `file.py:name` names."""
    file, _, name = text.rpartition(":")
    module = load_file(Path(file))
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UnknownNameError(f"name in {file}", name, public)
    return getattr(module, name)


def _made(found: Any, settings: Mapping[str, Any]) -> Any:
    """What a class or function makes with these settings; other objects as they are."""
    is_called = settings or inspect.isclass(found) or inspect.isfunction(found)
    return called(found, tuple(settings.items())) if is_called else found
