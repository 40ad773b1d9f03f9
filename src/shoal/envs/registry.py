"""From an environment's name to the environment."""

from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from io import StringIO
from typing import Any

from shoal.envs.environment import Environment
from shoal.envs.given import adapted
from shoal.envs.hosted import HostEnvironment
from shoal.envs.later import import_named
from shoal.envs.previous import with_previous
from shoal.errors import MissingExtraError, SettingError, UnknownNameError

# The module, simulator and environment of each family. A module is imported when its family is
# asked for, since each needs its own package. A bare name belongs to the first family.
FAMILIES = {
    "gymnax": ("shoal.envs.gymnax", "GymnaxSimulator", Environment),
    "brax": ("shoal.envs.brax", "BraxSimulator", Environment),
    "gymnasium": ("shoal.envs.gymnasium", "GymnasiumSimulator", HostEnvironment),
    "envpool": ("shoal.envs.envpool", "EnvPoolSimulator", HostEnvironment),
    "pettingzoo": ("shoal.envs.pettingzoo", "PettingZooSimulator", HostEnvironment),
    "jaxmarl": ("shoal.envs.jaxmarl", "JaxMARLSimulator", Environment),
}
MANY = 60  # names, beyond which only near ones are worth reading


def make(name: Any, **settings: Any) -> Environment | HostEnvironment:
    """The environment called "CartPole-v1", or "gymnasium:CartPole-v1" to name its family too.

    Or that of an object, a class or a function of Gymnasium, PettingZoo, gymnax or Brax.
    """
    if not isinstance(name, str):
        if (made := adapted(name, settings)) is None:
            raise SettingError(
                f"{name!r} is no environment of a library that is known here",
                f"Give a name, or an object, a class or a function of: {', '.join(FAMILIES)}.",
            )
        return made
    family, colon, short = name.partition(":")
    if not colon:
        family, short = next(iter(FAMILIES)), name
    if family not in FAMILIES:
        raise UnknownNameError("environment family", family, FAMILIES)
    module = load_family(family)
    _, simulator, environment = FAMILIES[family]
    known = module.names()
    if short not in known and ":" not in short:
        elsewhere = [] if colon else _elsewhere(short)
        kind = "environment" if colon else f"{family} environment"
        raise UnknownNameError(kind, short, [*elsewhere, *_near(short, known)])
    if ":" in short:
        _check_module(short.partition(":")[0])
    if settings.get("previous") is True and environment is Environment:
        settings.pop("previous")
        return with_previous(make(name, **settings))
    given = tuple(sorted((key, _hashable(key, value)) for key, value in settings.items()))
    more = {}
    if family == "gymnasium" and (factory := module.factory_of(short)):
        more["make"] = factory
    return environment(f"{family}:{short}", getattr(module, simulator)(short, given, **more))


def load_family(family: str) -> Any:
    """The module of a family of environments, if its package is installed."""
    try:
        with redirect_stdout(StringIO()):  # of what else a family could use and doesn't need
            return import_module(FAMILIES[family][0])
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("shoal"):
            raise
        raise MissingExtraError(family, family) from error


def _elsewhere(name: str) -> list[str]:
    """The full name of an environment called so in the next family that has one, if any."""
    for family in list(FAMILIES)[1:]:
        with suppress(MissingExtraError):
            if name in load_family(family).names():
                return [f"{family}:{name}"]
    return []


def _check_module(name: str) -> None:
    """A name such as "my_worlds:World-v0" imports the module before the colon."""
    try:
        import_named(name)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"there is no module `{name}` to import environments from: {error}",
            "Install it, or run from the folder that has it.",
        ) from error


def _near(name: str, known: list[str]) -> list[str]:
    return known if len(known) <= MANY else get_close_matches(name, known, n=8, cutoff=0.3)


def _hashable(key: str, value: Any) -> Any:
    value = tuple(value) if isinstance(value, list) else value
    try:
        hash(value)
    except TypeError as error:
        raise SettingError(
            f"the setting {key}={value!r} can't be kept, since environments are plain data",
            "Give numbers, text, or tuples of these.",
        ) from error
    return value
