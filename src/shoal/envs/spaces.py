"""What an environment shows and accepts: plain data, without JAX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, assert_never


@dataclass(frozen=True, slots=True)
class Discrete:
    """One of the integers 0..n-1."""

    n: int


@dataclass(frozen=True, slots=True)
class MultiDiscrete:
    """Several choices at once, the i-th one of the integers 0..sizes[i]-1."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """An array of `shape` between `low` and `high`.

    A bound is one number for all entries, or one for each in row-major order.
    """

    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """How many numbers an element has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Dict:
    """Several observations by name: a dictionary of arrays, its names sorted."""

    spaces: tuple[tuple[str, Observation], ...]

    @property
    def size(self) -> int:
        """How many numbers an element has."""
        return sum(leaf.size for leaf in leaves(self))


Action = Discrete | MultiDiscrete | Box
Observation = Box | Dict
Space = Action | Dict
ACTIONS = (Discrete, MultiDiscrete, Box)  # every kind of action space


@dataclass(frozen=True, slots=True)
class Groups:
    """Agents that differ: what each agent of a group sees or does, by the group's sorted name."""

    spaces: tuple[tuple[str, Space], ...]


# What each agent is shown, by name, where it is shown more than what it sees itself.
SEEN, MASK, WORLD = "seen", "mask", "world"


def has_parts(names: Iterable[str]) -> bool:
    """Whether an observation of these names is one of parts, and not just several things seen."""
    names = set(names)
    return SEEN in names and names <= {SEEN, MASK, WORLD}


def parts(space: Observation) -> tuple[Observation, bool, Observation | None]:
    """The agent's own observation, whether there is a mask, and the world if there is one."""
    named = dict(space.spaces) if isinstance(space, Dict) else {}
    if not has_parts(named):
        return space, False, None
    return named[SEEN], MASK in named, named.get(WORLD)


def leaves(space: Observation) -> tuple[Box, ...]:
    """The boxes of an observation, in the order of its sorted names."""
    match space:
        case Box():
            return (space,)
        case Dict(spaces):
            return tuple(leaf for _, inner in spaces for leaf in leaves(inner))
    assert_never(space)


def unflatten(space: Observation, arrays: tuple[Any, ...]) -> Any:
    """The observation whose leaves are `arrays`."""
    match space:
        case Box():
            (array,) = arrays
            return array
        case Dict(spaces):
            tree = {}
            for name, inner in spaces:
                count = len(leaves(inner))
                tree[name], arrays = unflatten(inner, arrays[:count]), arrays[count:]
            return tree
    assert_never(space)
