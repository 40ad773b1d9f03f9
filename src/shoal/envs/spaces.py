"""What an environment shows and accepts: a choice of n, or a box of real numbers."""

from dataclasses import dataclass
from math import prod
from typing import assert_never

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Discrete:
    """One of the integers 0..n-1."""

    n: int


@dataclass(frozen=True, slots=True)
class Box:
    """An array of `shape` between `low` and `high`.

    A bound is one number for all entries, or one for each in row-major order.
    """

    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers an element has."""
        return prod(self.shape)


Space = Discrete | Box


def clip(space: Space, x: jax.Array) -> jax.Array:
    """The element of `space` nearest to `x`."""
    match space:
        case Discrete(n):
            return jnp.clip(x, 0, n - 1)
        case Box(low, high, shape):
            return jnp.clip(x, _bound(low, shape), _bound(high, shape))
    assert_never(space)


def _bound(bound: float | tuple[float, ...], shape: tuple[int, ...]) -> float | jax.Array:
    return jnp.asarray(bound).reshape(shape) if isinstance(bound, tuple) else bound
