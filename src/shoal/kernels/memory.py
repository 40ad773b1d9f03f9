"""How arrays in memory become tiles on chip, and tiles arrays again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from shoal.kernels.block import Held, Keyed, dropped
from shoal.kernels.tiles import (
    MOST_IN_TILE,
    IneligibleError,
    Tile,
    Tiled,
    conformed,
    framed,
    padded,
    places,
    tiles_of,
)


@dataclass(frozen=True)
class Port:
    """An array that a kernel reads or writes: rows of it, or all of it where rows share it.

    `lead` counts its first axes that a kernel indexes: turns of a loop, and rows. A sum over rows
    is added up as the matrix products give it: both its axes are sides of one tile.
    """

    aval: Any
    lead: int
    by_rows: bool
    is_sum: bool = False

    @property
    def is_key(self) -> bool:
        """Whether it is an array of typed random keys."""
        return jnp.issubdtype(self.aval.dtype, jax.dtypes.prng_key)

    @property
    def words(self) -> tuple[int, ...]:
        """What a key adds to a shape."""
        return self.aval.dtype._impl.key_shape if self.is_key else ()

    @property
    def frame(self) -> Tiled:
        """One row of it, or all of it, without its numbers."""
        shape = (*self.aval.shape[self.lead :], *self.words)
        dtype = np.uint32 if self.is_key else self.aval.dtype
        if np.dtype(dtype).itemsize > 4:
            raise IneligibleError(f"numbers of type {np.dtype(dtype)} are not held in kernels")
        frame = framed(shape, dtype, None, 1 if self.by_rows else 2)
        if self.is_sum and len(shape) == 2 and frame.wide and 1 not in shape:
            frame = Tiled(np.empty((1, 1), object), shape, frame.dtype, (0, 1))
        if math.prod(padded(shape[i]) for i in frame.wide) > MOST_IN_TILE:
            raise IneligibleError(f"an array of shape {shape} doesn't fit on chip")
        return frame

    @property
    def on_chip(self) -> int:
        """How many bytes its tiles take."""
        frame = self.frame
        sides = math.prod(padded(frame.shape[i]) for i in frame.wide)
        return frame.tiles.size * sides * frame.dtype.itemsize

    def sizes(self, lead: Sequence[int]) -> tuple[int, ...]:
        """The shape in memory, its wide axes padded, for these first axes."""
        frame = self.frame
        rest = [padded(n) if i in frame.wide else n for i, n in enumerate(frame.shape)]
        return (*lead, *rest)

    def spec(self, lead: Sequence[int]) -> jax.ShapeDtypeStruct:
        """What is in memory, as a kernel's result."""
        return jax.ShapeDtypeStruct(self.sizes(lead), self.frame.dtype)

    def prepared(self, x: Any, lead: Sequence[int]) -> Any:
        """An array as a kernel reads it; rows beyond the last are like the last."""
        x = jax.random.key_data(x) if self.is_key else jnp.asarray(x)
        more = [(0, n - m) for n, m in zip(lead, x.shape, strict=False)]
        if any(n for _, n in more):
            x = jnp.pad(x, [*more, *[(0, 0)] * (x.ndim - len(more))], mode="edge")
        wanted = self.sizes(lead)
        if x.shape == wanted:
            return x
        return jnp.pad(x, [(0, n - m) for n, m in zip(wanted, x.shape, strict=True)])

    def restored(self, x: Any, lead: Sequence[int]) -> Any:
        """A kernel's result as the array that the loop continues with."""
        shape = (*lead, *self.frame.shape)
        if x.shape != shape:
            x = x[tuple(slice(0, n) for n in shape)]
        return jax.random.wrap_key_data(x, impl=self.aval.dtype._impl.name) if self.is_key else x

    def load(self, ref: Any, lead: Sequence[Any], sides: Sequence[int]) -> Held:
        """The value at `lead`; `sides` are those of its tiles that `lead` has slices for."""
        frame = self.frame
        made = [
            Tile(ref[(*lead, *self._index(frame, place))], (*sides, *frame.wide))
            for place in places(frame.tiles.shape)
        ]
        return self.held(Tiled(tiles_of(made, frame.tiles.shape), frame.shape, frame.dtype,
                               frame.wide, 0 if self.by_rows else None))  # fmt: skip

    def held(self, value: Tiled) -> Held:
        """A value as what the loop computes with: keys apart from numbers."""
        if not self.is_key:
            return value
        tiles = value.tiles.reshape(*value.tiles.shape[: len(value.shape) - len(self.words)], -1)
        shape = value.shape[: len(value.shape) - len(self.words)]
        return Keyed(
            tuple(
                Tiled(tiles[..., i], shape, value.dtype, value.wide, value.axis)
                for i in range(tiles.shape[-1])
            )
        )

    def plain(self, value: Held) -> Tiled:
        """The reverse of `held`."""
        if not isinstance(value, Keyed):
            return value
        first = value.words[0]
        outer = np.broadcast_shapes(*(w.tiles.shape for w in value.words))
        tiles = np.stack([np.broadcast_to(w.tiles, outer) for w in value.words], -1)
        return Tiled(tiles, (*first.shape, len(value.words)), first.dtype, first.wide, first.axis)

    def arrays(self, value: Held, rows: int) -> list[Any]:
        """The tiles of a value, as a loop carries them or memory takes them."""
        plain = self.plain(value)
        if self.by_rows and plain.axis not in (0, None):
            raise IneligibleError("a result's rows don't lie along its first axis")
        return conformed(_without_rows(plain, self), self.frame, rows)

    def store(self, ref: Any, lead: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Write what `arrays` gave."""
        frame = self.frame
        for place, x in zip(places(frame.tiles.shape), arrays, strict=True):
            ref[(*lead, *self._index(frame, place))] = x

    def _index(self, frame: Tiled, place: Sequence[int]) -> tuple[Any, ...]:
        return tuple(
            pl.ds(0, padded(frame.shape[i])) if i in frame.wide else i_
            for i, i_ in enumerate(place)
        )


def _without_rows(value: Tiled, port: Port) -> Tiled:
    """A result that is the same for all rows still has their axis, which tiles have not."""
    if port.by_rows and value.axis is None and len(value.shape) > len(port.frame.shape):
        return dropped(value, 0)
    return value
