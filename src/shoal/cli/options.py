"""The command line's options of a loop and its distribution, as objects."""

import argparse
import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal import envs as environments
from shoal.algorithms import ALGORITHMS
from shoal.envs.registry import FAMILIES
from shoal.errors import SettingError, ShoalError, UnknownNameError
from shoal.planning.policies import POLICIES
from shoal.planning.policy import DistributionPolicy
from shoal.rl.ranges import SYNONYMS
from shoal.runs.job import EVERY, KEEP
from shoal.runs.recipes import load_file
from shoal.runs.training import find_preset
from shoal.runs.trust import code_of_env, quoted
from shoal.runtime.run import BACKENDS

NONE = "none"  # the environment of a loop that has none
MEANS = {
    "devices": "devices to spread the program over",
    "actors": "replicas that step environments and act; with impala also 2-16, from how many to "
    "how many: they come and go",
    "lag": "ticks that parameters are behind; served, at most",
    "envs": "replicas that step environments",
    "ring": "groups of environments each replica keeps in flight; inference is then served",
    "workers": "replicas that step environments, or compute gradients",
    "take": "rollouts that the learner takes a tick, the first to arrive",
    "max_lag": "ticks that parameters of a rollout may be behind when it is used; ape-x: then "
    "actors go ahead",
    "learners": "replicas that learn, and agree on gradients",
    "inference": "replicas that act",
    "actor_devices": "devices that act",
    "learner_devices": "devices that learn",
}


COUNTED = ("actors", "workers", "envs")  # parameters that may say from how many to how many


def count_of_replicas(text: str) -> int | tuple[int, int]:
    """A count, or `2-16`: from how many to how many replicas."""
    counts = text.split("-")
    if len(counts) > 2 or not all(count.isdecimal() for count in counts):
        text = f"`{text}` is no number of replicas; write 4, or 2-16 for from 2 to 16"
        raise argparse.ArgumentTypeError(text)
    least, most = int(counts[0]), int(counts[-1])
    return (least, most) if len(counts) == 2 else least


def replica_count(text: str) -> tuple[str, int]:
    """A fragment and a count, from `actor=4`."""
    name, equals, count = text.partition("=")
    if not (equals and count.isdecimal()):
        raise SettingError(f"`{text}` is no count of a fragment", "Write it as actor=4.")
    return name, int(count)


def option_of(parameter: str) -> str:
    """The option that sets a distribution policy's parameter; --envs counts environments."""
    return "--env-replicas" if parameter == "envs" else f"--{parameter.replace('_', '-')}"


def policy_parameters() -> dict[str, list[str]]:
    """Every parameter of the named distribution policies, and which of them take it."""
    found: dict[str, list[str]] = {}
    for name, make in POLICIES.items():
        for parameter in inspect.signature(make).parameters:
            found.setdefault(parameter, []).append(name)
    return found


def add_loop(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the algorithm and the environment."""
    known = ", ".join(ALGORITHMS)
    parser.add_argument("algorithm", help=f"a name ({known}) or your own: file.py:Class")
    parser.add_argument(
        "env",
        nargs="?",
        default=NONE,
        help="an environment, such as CartPole-v1, or file.py:make_env; "
        "nothing or `none` for a loop that has none",
    )
    parser.add_argument("--envs", type=int, help="how many environments")
    parser.add_argument(
        "--env-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the environment",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the algorithm",
    )


def add_distribution(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the distribution."""
    names = ", ".join(name.replace("_", "-") for name in POLICIES)
    parser.add_argument(
        "--distribute", metavar="POLICY", help=f"one of: {names}; or your own: file.py:function"
    )
    for parameter, makers in policy_parameters().items():
        parser.add_argument(
            option_of(parameter),
            dest=f"policy_{parameter}",
            type=count_of_replicas if parameter in COUNTED else int,
            metavar="N",
            help=f"{MEANS[parameter]} ({', '.join(name.replace('_', '-') for name in makers)})",
        )


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the evaluation interval."""
    parser.add_argument(
        "--evaluate",
        type=int,
        nargs="?",
        const=10,
        metavar="TICKS",
        help="every so many ticks (10) play whole episodes with the best actions; "
        "where training is distributed, on the side, without holding it up",
    )


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for checkpoints."""
    parser.add_argument(
        "--checkpoint-every",
        metavar="TICKS|SECONDS",
        help=f"such as 100 (ticks) or 30s (seconds); end: only then (default: {EVERY})",
    )
    parser.add_argument(
        "--keep", type=int, metavar="K", help=f"newest checkpoints to keep (default: {KEEP})"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the argument that trusts the code named by a file."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run code that the file names and that isn't Shoal's own (yours needs no flag)",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a Ray cluster and for fault tolerance."""
    parser.add_argument("--address", help="of a Ray cluster (with --backend ray), HOST:PORT")
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="lost workers within five minutes that the run outlives (default: 3 on Ray, else 0); "
        "asynchronous ones are replaced so often each (default: 3)",
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        help="that a step of environments in Python may take; a worker that takes longer is lost "
        "(default: no limit, and a report after a minute)",
    )


def chosen_cluster(options: argparse.Namespace) -> dict[str, Any]:
    """The options about a cluster that were given."""
    said = {
        "address": options.address,
        "restarts": options.restarts,
        "step_timeout": options.step_timeout,
    }
    has_cluster = options.backend in BACKENDS and BACKENDS[options.backend].find_cluster
    if said["address"] and not has_cluster:
        raise SettingError(
            f"--address {said['address']} is of a Ray cluster, and the backend isn't `ray`",
            "Add --backend ray.",
        )
    return {name: value for name, value in said.items() if value is not None}


def chosen_checkpoints(options: argparse.Namespace) -> dict[str, Any]:
    """The options about checkpoints that were given."""
    said = {"checkpoint_every": options.checkpoint_every, "keep": options.keep}
    return {name: value for name, value in said.items() if value is not None}


def chosen_sources(options: argparse.Namespace) -> dict[str, str]:
    """The files that the algorithm and environment come from, where they come from files."""
    said = {"algorithm_from": options.algorithm, "env_from": options.env}
    return {name: text for name, text in said.items() if ".py:" in text}


def code_in_options(options: argparse.Namespace) -> Iterator[str]:
    """The parts of a loop's options that aren't Shoal's own code, each in a few words."""
    for text in (options.algorithm, options.env, options.distribute):
        if text and ".py:" in text:
            yield quoted(text)
    family, _, name = options.env.partition(":")
    if family in FAMILIES and ".py:" not in options.env:
        yield from code_of_env(family, name, dict(_setting(text) for text in options.env_set))


def chosen_loop(options: argparse.Namespace) -> tuple[Any, Any]:
    """The algorithm (with its settings) and the environment."""
    algorithm, env = options.algorithm, options.env
    if env == NONE:
        env = _no_environment(options)
    elif ".py:" in env:
        env = _made_env(env, dict(_setting(text) for text in options.env_set))
    elif options.env_set:
        env = environments.make(env, **dict(_setting(text) for text in options.env_set))
    settings = dict(_setting(text) for text in options.set)
    if ".py:" in algorithm:
        return with_settings(_made(load(algorithm)), settings), env
    if not settings:
        return algorithm, env
    if algorithm not in ALGORITHMS:
        raise UnknownNameError("algorithm", algorithm, ALGORITHMS)
    preset = find_preset(algorithm, env)
    if preset and options.envs is None:
        options.envs = preset.envs
    if preset and getattr(options, "ticks", 0) is None:
        options.ticks = preset.ticks
    return with_settings(preset.algorithm if preset else ALGORITHMS[algorithm](), settings), env


def _no_environment(options: argparse.Namespace) -> None:
    if options.env_set:
        raise SettingError(
            f"--env-set {options.env_set[0]} is about an environment, and none is named",
            "Name one after the algorithm, or leave it out.",
        )


def chosen_distribution(options: argparse.Namespace) -> DistributionPolicy | None:
    """The distribution policy with its parameters; None where none is named."""
    given = {
        name: value
        for name in policy_parameters()
        if (value := getattr(options, f"policy_{name}")) is not None
    }
    if options.distribute is None:
        if given:
            option = option_of(next(iter(given)))
            raise SettingError(f"{option} has no effect without --distribute", "Name one, too.")
        return None
    if ".py:" in options.distribute:
        return _made_policy(options.distribute, given)
    name = options.distribute.replace("-", "_")
    if name not in POLICIES:
        known = [known.replace("_", "-") for known in POLICIES]
        raise UnknownNameError("distribution policy", options.distribute, known)
    taken = inspect.signature(POLICIES[name]).parameters
    for parameter in given:
        if parameter not in taken:
            raise SettingError(
                f"{options.distribute} takes no {option_of(parameter)}",
                f"It takes: {', '.join(map(option_of, taken))}.",
            )
    return POLICIES[name](**given)


def _made_policy(text: str, given: dict[str, Any]) -> Any:
    """The distribution policy that `file.py:name` names, or makes with these parameters."""
    found: Any = load(text)
    taken = inspect.signature(found).parameters if inspect.isfunction(found) else {}
    for parameter in given:
        if parameter not in taken:
            raise SettingError(
                f"{text} takes no {option_of(parameter)}",
                f"It takes: {', '.join(map(option_of, taken)) or 'nothing'}.",
            )
    made = found(**given) if inspect.isfunction(found) else found
    if not isinstance(made, DistributionPolicy):
        raise SettingError(
            f"{text} is no distribution policy, and no function that returns one",
            "Name a function that returns a shoal.DistributionPolicy.",
        )
    return made


def load(text: str) -> Any:
    """The object that `file.py:name` names."""
    file, _, name = text.rpartition(":")
    module = load_file(Path(file))
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UnknownNameError(f"name in {file}", name, public)
    return getattr(module, name)


def _made(found: Any) -> Any:
    """An object of a class or of a function without arguments; other objects as they are."""
    return found() if inspect.isclass(found) or inspect.isfunction(found) else found


def _made_env(text: str, settings: dict[str, Any]) -> Any:
    """The environment that `file.py:name` names or makes, with these settings."""
    found = load(text)
    if not settings:
        return _made(found)
    if not callable(found):
        raise SettingError(
            f"{text} is an object, which takes no --env-set {next(iter(settings))}=...",
            "Name a function or class that makes it.",
        )
    try:
        inspect.signature(found).bind(**settings)
    except TypeError as error:
        raise SettingError(
            f"{text} can't be called with --env-set {', '.join(settings)}: {error}",
            f"It takes: {inspect.signature(found)}.",
        ) from error
    return found(**settings)


BOOLEANS = {"true": True, "false": False}  # as YAML and JSON spell them; Python's work too


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SettingError(f"--set {text}", "Say it as NAME=VALUE.")
    try:
        return name, BOOLEANS[value] if value in BOOLEANS else ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def with_settings(algorithm: Any, settings: dict[str, Any]) -> Any:
    """The algorithm with some settings changed; each must exist and keep its kind."""
    if not settings:
        return algorithm
    title = type(algorithm).__name__
    if not dataclasses.is_dataclass(algorithm) or isinstance(algorithm, type):
        raise SettingError(f"{title} is no dataclass, so it has no settings", "Leave out --set.")
    known = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
    for name, value in settings.items():
        if name not in known:
            raise _unknown_setting(algorithm, name, known)
        if not _fits(value, known[name]):
            kind = type(known[name]).__name__
            raise SettingError(f"{title}.{name} is a {kind}, not {value!r}", f"Give a {kind}.")
    return dataclasses.replace(algorithm, **settings)


def _unknown_setting(algorithm: Any, name: str, known: dict[str, Any]) -> ShoalError:
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
