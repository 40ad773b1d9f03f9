"""Gymnasium's spaces as Shoal's, and their elements as rows of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces as gym

from shoal.envs.host import Leaves
from shoal.envs.spaces import Action, Box, Dict, Discrete, MultiDiscrete, Observation
from shoal.errors import SettingError

# JAX computes with 32 bits by default.
NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32"}


def observation_space(space: gym.Space) -> Observation:
    """What is shown of `space`: a discrete observation one-hot, a tuple as a dictionary."""
    match space:
        case gym.Box():
            return _box(space)
        case gym.Discrete():
            return Box(0.0, 1.0, (int(space.n),))
        case gym.MultiBinary():
            return Box(0.0, 1.0, tuple(space.shape), "int8")
        case gym.MultiDiscrete():
            high = tuple((space.start + space.nvec - 1).ravel().astype(float).tolist())
            low = tuple(space.start.ravel().astype(float).tolist())
            return Box(low, high, tuple(space.shape), "int32")
        case gym.Dict() | gym.Tuple():
            return Dict(tuple((n, observation_space(inner)) for n, inner in _named(space)))
    raise SettingError(
        f"The observation space {space} is not made of arrays.",
        "Wrap the environment so that it shows arrays, or a dictionary of arrays.",
    )


def action_space(space: gym.Space) -> Action:
    """The choices that `space` offers, counted from 0."""
    match space:
        case gym.Box():
            return _box(space)
        case gym.Discrete():
            return Discrete(int(space.n))
        case gym.MultiBinary():
            return MultiDiscrete((2,) * int(np.prod(space.shape)))
        case gym.MultiDiscrete():
            return MultiDiscrete(tuple(map(int, space.nvec.ravel())))
    raise SettingError(
        f"The action space {space} is neither discrete nor a box.",
        "Wrap the environment so that it takes one array.",
    )


def action_rows(space: gym.Space) -> Callable[[np.ndarray], Any]:
    """A function from checked actions, [n, ...], to a sequence of what each environment takes."""
    match space:
        case gym.Discrete():
            start = int(space.start)
            return lambda action: (action + start).tolist() if start else action.tolist()
        case gym.MultiDiscrete():
            dtype, shape, start = space.dtype, tuple(space.shape), space.start
            return lambda action: action.astype(dtype).reshape(-1, *shape) + start
    dtype, shape = space.dtype, tuple(space.shape or ())
    return lambda action: action.astype(dtype).reshape(-1, *shape)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of an observation: where it is found, and what it looks like."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int | None = None  # of a discrete observation, which is shown one-hot

    def write(self, array: np.ndarray, row: int | tuple[int, int], obs: Any) -> None:
        """Writes what `obs` says here into a row of `array`."""
        for name in self.path:
            obs = obs[name]
        if self.start is not None:
            array[row] = 0
            array[row][int(obs) - self.start] = 1
            return
        x = obs if isinstance(obs, np.ndarray) else np.asarray(obs)
        if x.shape != self.shape:
            raise ValueError(f"the observation has shape {x.shape}, not {self.shape}")
        if x.dtype != self.dtype and not np.can_cast(x.dtype, self.dtype, "same_kind"):
            raise ValueError(f"the observation has dtype {x.dtype}, not {self.dtype}")
        array[row] = x


def leaves_of(space: gym.Space, path: tuple[Any, ...] = ()) -> tuple[Leaf, ...]:
    """The arrays of which an observation is made, in the order of their sorted names."""
    match space:
        case gym.Dict():
            return tuple(
                leaf for n, inner in _named(space) for leaf in leaves_of(inner, (*path, n))
            )
        case gym.Tuple():
            inner = enumerate(space.spaces)
            return tuple(leaf for i, each in inner for leaf in leaves_of(each, (*path, i)))
    shown = observation_space(space)
    assert isinstance(shown, Box)
    start = int(space.start) if isinstance(space, gym.Discrete) else None
    return (Leaf(path, shown.shape, np.dtype(shown.dtype), start),)


def empty_rows(leaves: tuple[Leaf, ...], *axes: int) -> Leaves:
    """Arrays to write observations into."""
    return tuple(np.empty((*axes, *leaf.shape), leaf.dtype) for leaf in leaves)


def _named(space: gym.Dict | gym.Tuple) -> list[tuple[str, gym.Space]]:
    if isinstance(space, gym.Dict):
        return sorted(space.spaces.items())
    width = len(str(len(space.spaces) - 1))
    return [(str(i).zfill(width), inner) for i, inner in enumerate(space.spaces)]


def _box(space: gym.Box) -> Box:
    dtype = NARROW.get(str(space.dtype), str(space.dtype))
    low, high = (_bound(bound, dtype) for bound in (space.low, space.high))
    return Box(low, high, tuple(map(int, space.shape)), dtype)


def _bound(bound: np.ndarray, dtype: str) -> float | tuple[float, ...]:
    values = np.asarray(bound, np.float32 if dtype.startswith("float") else float).ravel().tolist()
    return values[0] if len(set(values)) == 1 else tuple(values)
