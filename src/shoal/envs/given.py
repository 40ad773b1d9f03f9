"""Environments given as objects, classes or factories of Gymnasium, PettingZoo, gymnax or Brax."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from shoal.envs.environment import Environment
from shoal.envs.hosted import HostEnvironment
from shoal.errors import SettingError, of_user_code

# The base class of each library's environments: its package and name, and the family here.
BASES = {
    ("gymnasium", "Env"): "gymnasium",
    ("pettingzoo", "ParallelEnv"): "pettingzoo",
    ("gymnax", "Environment"): "gymnax",
    ("brax", "Env"): "brax",
}
IN_PYTHON = ("gymnasium", "pettingzoo")
REFUSED = {
    ("gymnasium", "VectorEnv"): (
        "steps several environments at once, which Shoal does itself",
        "Give one environment, or a class or function that makes one; `envs` says how many.",
    ),
    ("pettingzoo", "AECEnv"): (
        "has agents that act in turns, which Shoal can't step",
        "Give a parallel environment: pettingzoo.utils.conversions.aec_to_parallel makes one.",
    ),
    ("gym", "Env"): (
        "is an object of gym, which Gymnasium has replaced",
        "Let it extend gymnasium.Env, whose reset and step return (obs, info) and five values.",
    ),
}
Settings = tuple[tuple[str, Any], ...]


def adapted(thing: Any, settings: Mapping[str, Any]) -> Any:
    """The environment that a library's object, class or factory stands for.

    A function is called with the settings. None for what is of no library that is known here.
    """
    given = tuple(sorted(settings.items()))
    if inspect.isclass(thing):
        return _made_by(thing, family_of(thing), given)
    if inspect.isfunction(thing) or isinstance(thing, functools.partial):
        return _of_function(thing, given) if settings or _takes(thing, given) else None
    params = None
    if isinstance(thing, tuple) and len(thing) == 2 and family_of(type(thing[0])) == "gymnax":
        thing, params = thing  # as gymnax.make returns them
    if not (family := family_of(type(thing))):
        return None
    if settings:
        raise SettingError(
            f"the environment is an object, which takes no setting {next(iter(settings))}",
            "Make it with its settings, or give its class or its name.",
        )
    return _of_object(family, thing, params)


def family_of(kind: type) -> str:
    """The family of a class of environments; empty for classes of no library known here."""
    for each in kind.__mro__:
        key = (each.__module__.partition(".")[0], each.__name__)
        if key in REFUSED:
            what, fix = REFUSED[key]
            raise SettingError(f"the environment, a {kind.__name__}, {what}", fix)
        if key in BASES:
            return BASES[key]
    return ""


def _of_function(make: Callable[..., Any], given: Settings) -> Any:
    """The environment that a function makes, which is called again for each one in Python."""
    made = called(make, given)
    family = family_of(type(made))
    if family not in IN_PYTHON:
        return adapted(made, {}) or made
    if callable(close := getattr(made, "close", None)):
        close()
    return _made_by(make, family, given)


def _made_by(make: Any, family: str, given: Settings) -> Any:
    """The environment of a class or function, which makes one a row where Python steps it."""
    if family in IN_PYTHON:
        _check(make, given)
        name = getattr(make, "__name__", "") or type(make).__name__
        return _environment(family, name.strip("<>"), given, make)
    return _of_object(family, called(make, given), None) if family else None


def _of_object(family: str, thing: Any, params: Any) -> Any:
    from shoal.envs.registry import load_family

    return _environment(family, *load_family(family).known_as(thing, params))


def _environment(family: str, name: str, given: Settings, make: Any) -> Any:
    from shoal.envs.registry import FAMILIES, load_family

    _, simulator, kind = FAMILIES[family]
    made: Environment | HostEnvironment
    made = kind(f"{family}:{name}", getattr(load_family(family), simulator)(name, given, make))
    return made


def called(make: Callable[..., Any], given: Settings) -> Any:
    """What a class or function makes with these settings."""
    _check(make, given)
    try:
        return make(**dict(given))
    except Exception as error:
        raise of_user_code(f"{_name(make)} failed", error) from error


def _check(make: Callable[..., Any], given: Settings) -> None:
    """Refuse settings that a class or function doesn't take."""
    try:
        signature(make).bind(**dict(given))
    except TypeError as error:
        said = ", ".join(dict(given)) or "no settings"
        raise SettingError(
            f"{_name(make)} can't be called with {said}: {error}",
            f"It takes: {signature(make)}.",
        ) from error


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", "the environment's factory")


def _takes(make: Callable[..., Any], given: Settings) -> bool:
    """Whether a function can be called with these settings."""
    try:
        signature(make).bind(**dict(given))
    except TypeError:
        return False
    return True
