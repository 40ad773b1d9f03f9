"""From an environment's name to the environment."""

from importlib import import_module
from typing import Any

from shoal.envs.environment import Environment
from shoal.errors import MissingExtraError, UnknownNameError

# The module and simulator of each family. A module is imported when its family is first asked for,
# since each needs its own package. A bare name belongs to the first family that knows it.
FAMILIES = {"gymnax": ("shoal.envs.gymnax", "GymnaxSimulator")}


def make(name: str, **settings: Any) -> Environment:
    """The environment called "CartPole-v1", or "gymnax:CartPole-v1" to name its family too."""
    family, _, short = name.rpartition(":")
    if family and family not in FAMILIES:
        raise UnknownNameError("environment family", family, FAMILIES)
    searched = [family] if family else list(FAMILIES)
    known = {known: each for each in reversed(searched) for known in _load(each).names()}
    if short not in known:
        raise UnknownNameError("environment", short, known)
    family = known[short]
    simulator = getattr(_load(family), FAMILIES[family][1])
    return Environment(f"{family}:{short}", simulator(short, tuple(sorted(settings.items()))))


def _load(family: str) -> Any:
    try:
        return import_module(FAMILIES[family][0])
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("shoal"):
            raise
        raise MissingExtraError(family, family) from error
