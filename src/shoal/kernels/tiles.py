"""How a kernel holds a value for a block of rows: small axes as separate tiles, wide ones in them.

Triton computes on tiles whose sides are powers of two, and can neither join nor slice them. So an
axis that is short (an observation's four numbers, a key's two words) is not an axis of a tile at
all: there is a tile for each of its entries, and joining, slicing and indexing cost nothing. An
axis that is long (a layer's 64 outputs) is a side of the tile, padded to a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

ROW = -1  # the side of a tile along which rows lie
SHORT = 8  # the longest axis that is held as separate tiles
LONGEST = 1024  # the longest axis that is a side of a tile
SMALLEST = 16  # the shortest side of a matrix that tensor cores take
MOST_TILES = 512  # of one value
MOST_IN_TILE = 1 << 15  # numbers


class IneligibleError(Exception):
    """What can't become a kernel, and why; it runs on XLA instead."""


def padded(size: int) -> int:
    """How long a tile's side is: a power of two, and not less than tensor cores take."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Tile:
    """An array with a name for each of its sides: an axis of its value, or `ROW`.

    It is the same along every axis that it has no side for. A NumPy scalar is a known number.
    """

    array: Any
    sides: tuple[int, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether it is a number known when the kernel is made."""
        return isinstance(self.array, np.ndarray | np.generic)


@dataclass(frozen=True, slots=True)
class Tiled:
    """A value as tiles, one for each place along its short axes.

    `shape` is that of one row, or of a shared value; `tiles` has as many axes, each as long as the
    value's or 1, where the axis is a side of the tiles or everything along it is equal. `axis`:
    where rows lie in the traced value's own shape; None if nowhere (a stage of one row, or shared).
    """

    tiles: np.ndarray
    shape: tuple[int, ...]
    dtype: Any
    wide: tuple[int, ...] = ()
    axis: int | None = None

    def own(self, axis: int) -> int:
        """An axis of the traced value as an axis of `shape`."""
        assert axis != self.axis, "rows are no axis of one row"
        return axis - (self.axis is not None and axis > self.axis)

    @property
    def is_known(self) -> bool:
        """Whether all of it is known when the kernel is made."""
        return all(tile.is_known for tile in self.tiles.flat)

    def known(self) -> np.ndarray:
        """What is known of it, as an array."""
        values = np.array([np.asarray(t.array) for t in self.tiles.flat], self.dtype)
        return np.broadcast_to(values.reshape(self.tiles.shape), self.shape)


def tiles_of(items: Sequence[Tile], shape: Sequence[int]) -> np.ndarray:
    """An object array of tiles, which NumPy must not take for arrays of numbers."""
    found = np.empty(len(items), object)
    for i, item in enumerate(items):
        found[i] = item
    return found.reshape(tuple(shape))


def constant(value: Any, *, uniform: bool = True) -> Tiled:
    """A known array; what is the same everywhere is one number."""
    array = np.asarray(value)
    if array.size and uniform and (array == array.flat[0]).all():
        tiles = tiles_of([Tile(array.flat[0])], (1,) * array.ndim)
        return Tiled(tiles, array.shape, array.dtype)
    if array.size > MOST_TILES:
        raise IneligibleError(f"a constant of shape {array.shape} is too large")
    return Tiled(tiles_of([Tile(x) for x in array.flat], array.shape), array.shape, array.dtype)


def places(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The indices of all tiles."""
    if math.prod(shape) > MOST_TILES:
        raise IneligibleError(f"a value of shape {tuple(shape)} has too many short axes")
    return np.ndindex(*shape)


def at(value: Tiled, place: Sequence[int]) -> Tile:
    """The tile at a place, or the one that stands for all along an axis."""
    return value.tiles[tuple(0 if n == 1 else i for i, n in zip(place, value.tiles.shape))]  # noqa: B905


def wide_axes(shape: Sequence[int], sides: int = 2) -> tuple[int, ...]:
    """Which axes of a value that is read from memory are sides of its tiles."""
    wide = tuple(i for i, n in enumerate(shape) if n > SHORT)
    if len(wide) > sides or any(shape[i] > LONGEST for i in wide):
        raise IneligibleError(f"an array of shape {tuple(shape)} doesn't fit on chip")
    return wide


def spread(tile: Tile, sides: Sequence[int], sizes: dict[int, int]) -> Any:
    """The array of a tile with exactly these sides, as long as `sizes` says; no side is lost."""
    target = tuple(sizes[s] for s in sides)
    if tile.is_known:
        number = np.asarray(tile.array).reshape(())[()]
        return lax.full(target, number, number.dtype)
    order = sorted(range(len(tile.sides)), key=lambda i: sides.index(tile.sides[i]))
    array = tile.array if order == list(range(len(order))) else jnp.transpose(tile.array, order)
    where = tuple(sides.index(tile.sides[i]) for i in order)
    if tuple(array.shape) == target:
        return array
    return lax.broadcast_in_dim(array, target, where)


def sizes_of(*values: Tiled | Tile) -> dict[int, int]:
    """How long each side is, over all tiles given."""
    found: dict[int, int] = {}
    for value in values:
        for tile in value.tiles.flat if isinstance(value, Tiled) else (value,):
            if not tile.is_known:
                found |= dict(zip(tile.sides, tile.array.shape, strict=True))
    return found


def entries(side: int, sides: Sequence[int], sizes: dict[int, int]) -> Any:
    """The index along one side, as an array with all of `sides`."""
    shape = tuple(sizes[s] for s in sides)
    return lax.broadcasted_iota(jnp.int32, shape, sides.index(side))


def widened(value: Tiled, axis: int) -> Tiled:
    """The same value with a short axis as a side of its tiles."""
    if axis in value.wide:
        return value
    many = value.tiles.shape[axis]
    if many == 1:
        return replace(value, wide=tuple(sorted({*value.wide, axis})))
    shape = (*value.tiles.shape[:axis], 1, *value.tiles.shape[axis + 1 :])
    made = []
    for place in places(shape):
        parts = [at(value, (*place[:axis], i, *place[axis + 1 :])) for i in range(many)]
        sizes = sizes_of(*parts) | {axis: padded(many)}
        sides = tuple(sorted(sizes))
        index = entries(axis, sides, sizes)
        array = spread(parts[0], sides, sizes)
        for i, part in enumerate(parts[1:], 1):
            array = jnp.where(index == i, spread(part, sides, sizes), array)
        made.append(Tile(array, sides))
    return replace(value, tiles=tiles_of(made, shape), wide=tuple(sorted({*value.wide, axis})))


def split_up(value: Tiled, axis: int) -> Tiled:
    """The same value with a side of its tiles as an axis of separate tiles."""
    if axis not in value.wide:
        return value
    rest = tuple(a for a in value.wide if a != axis)
    if all(axis not in tile.sides for tile in value.tiles.flat):
        return replace(value, wide=rest)
    many = value.shape[axis]
    shape = (*value.tiles.shape[:axis], many, *value.tiles.shape[axis + 1 :])
    made = [
        _entry(at(value, (*place[:axis], 0, *place[axis + 1 :])), axis, place[axis])
        for place in places(shape)
    ]
    return replace(value, tiles=tiles_of(made, shape), wide=rest)


def _entry(tile: Tile, axis: int, index: int) -> Tile:
    """What a tile has at one index of a side."""
    if axis not in tile.sides:
        return tile
    sizes = sizes_of(tile)
    here = entries(axis, tile.sides, sizes) == index
    where = tile.sides.index(axis)
    is_bool = tile.array.dtype == np.bool_
    array = tile.array.astype(jnp.int32) if is_bool else tile.array
    found = jnp.sum(jnp.where(here, array, jnp.zeros_like(array)), axis=where, dtype=array.dtype)
    found = found > 0 if is_bool else found
    return Tile(found, tuple(s for s in tile.sides if s != axis))


def conformed(value: Tiled, like: Tiled, rows: int) -> list[Any]:
    """The arrays of a value's tiles, each with all the sides that `like` has: a loop carries them.

    `rows` is the length of a block, or 0 for what is shared.
    """
    for axis in like.wide:
        value = widened(value, axis)
    for axis in set(value.wide) - set(like.wide):
        value = split_up(value, axis)
    sizes = {axis: padded(like.shape[axis]) for axis in like.wide}
    sizes |= {ROW: rows} if rows else {}
    sides = tuple(sorted(sizes))
    found = []
    for place in places(like.tiles.shape):
        tile = at(value, place)
        if set(tile.sides) - set(sides):
            raise IneligibleError("rows are mixed with what all rows share")
        found.append(spread(tile, sides, sizes).astype(like.dtype))
    return found


def filled(like: Tiled, arrays: Sequence[Any], rows: int) -> Tiled:
    """The value that `conformed` gave the arrays of."""
    sides = (*([ROW] if rows else []), *like.wide)
    return replace(like, tiles=tiles_of([Tile(x, sides) for x in arrays], like.tiles.shape))


def framed(shape: Sequence[int], dtype: Any, axis: int | None, sides: int = 2) -> Tiled:
    """A value without tiles yet: which axes are short and which are sides, as read from memory."""
    wide = wide_axes(shape, sides)
    outer = [1 if i in wide else n for i, n in enumerate(shape)]
    if math.prod(outer) > MOST_TILES:
        raise IneligibleError(f"an array of shape {tuple(shape)} has too many short axes")
    empty = np.empty(outer, object)
    return Tiled(empty, tuple(shape), np.dtype(dtype), wide, axis)
