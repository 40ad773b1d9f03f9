"""Matrix products of values held as tiles; a product over rows is a sum over the block."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shoal.kernels.block import Block, dropped, narrow, only_real, rule
from shoal.kernels.tiles import (
    MOST_IN_TILE,
    ROW,
    SMALLEST,
    IneligibleError,
    Tile,
    Tiled,
    at,
    entries,
    padded,
    places,
    sizes_of,
    spread,
    tiles_of,
    widened,
)


@dataclass(frozen=True)
class _Factor:
    """An operand, with the name of each of its own axes; rows have none, they are `ROW`."""

    value: Tiled
    names: tuple[int, ...]

    def tile(self, place: dict[int, int]) -> Tile:
        """The tile at a place, its sides called by the axes' names."""
        found = at(self.value, [place.get(n, 0) for n in self.names])
        return Tile(found.array, tuple(s if s == ROW else self.names[s] for s in found.sides))

    def is_wide(self, name: int) -> bool:
        """Whether an axis of this name is a side of its tiles."""
        return name in self.names and self.names.index(name) in self.value.wide

    def is_short(self, name: int) -> bool:
        """Whether there is a tile for each of several places along it."""
        return name in self.names and self.value.tiles.shape[self.names.index(name)] > 1

    def with_side(self, name: int) -> _Factor:
        """The same with this axis as a side of its tiles."""
        return replace(self, value=widened(self.value, self.names.index(name)))

    def without_side(self, name: int) -> _Factor:
        """The same with this axis as separate tiles."""
        return replace(self, value=narrow(self.value, self.names.index(name)))


@dataclass(frozen=True)
class _Product:
    """What is multiplied: names of the result's own axes, what is summed over, and how exactly."""

    out: tuple[int, ...]
    summed: tuple[int, ...]
    lengths: dict[int, int]
    over_rows: bool
    precision: Any
    dtype: Any


@rule("dot_general")
def _dot_general(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    (left_sums, right_sums), (left_batch, right_batch) = e.params["dimension_numbers"]
    shapes = [v.aval.shape for v in e.invars]
    # Every axis gets a name: those that are paired have the same one.
    names = [[-9] * len(s) for s in shapes]
    count = itertools.count()
    for i, j in [
        *zip(left_batch, right_batch, strict=True),
        *zip(left_sums, right_sums, strict=True),
    ]:
        names[0][i] = names[1][j] = next(count)
    for own in names:
        own[:] = [next(count) if n == -9 else n for n in own]
    lengths = {
        n: s for own, sh in zip(names, shapes, strict=True) for n, s in zip(own, sh, strict=True)
    }
    rows = {own[v.axis] for v, own in zip(args, names, strict=True) if v.axis is not None}
    if len(rows) > 1:
        raise IneligibleError("a product pairs rows with other rows")
    summed = tuple(names[0][i] for i in left_sums)
    order = [names[0][i] for i in left_batch]
    for own in names:
        order += [n for n in own if n not in order and n not in summed]
    factors = [_factor(v, own, rows) for v, own in zip(args, names, strict=True)]
    made = _product(
        block,
        factors,
        _Product(
            tuple(n for n in order if n not in rows),
            tuple(n for n in summed if n not in rows),
            lengths,
            bool(rows & set(summed)),
            e.params["precision"],
            np.dtype(e.outvars[0].aval.dtype),
        ),
    )
    kept = rows - set(summed)
    return replace(made, axis=order.index(kept.pop()) if kept else None)


def _factor(value: Tiled, names: list[int], rows: set[int]) -> _Factor:
    if value.axis is None and rows & set(names):
        (name,) = rows
        value = dropped(value, names.index(name))
    return _Factor(value, tuple(n for n in names if n not in rows))


def _product(block: Block, factors: list[_Factor], what: _Product) -> Tiled:
    for name in (*what.summed, *what.out):
        if any(f.is_wide(name) for f in factors):
            factors = [f.with_side(name) if name in f.names else f for f in factors]
    factors = _as_matrices(factors, what)
    left, right = factors
    outer = tuple(what.lengths[n] if any(f.is_short(n) for f in factors) else 1 for n in what.out)
    short = [n for n in what.summed if any(f.is_short(n) for f in factors)]
    plain = [n for n in what.summed if n not in short]
    wide = tuple(i for i, n in enumerate(what.out) if any(f.is_wide(n) for f in factors))
    made = []
    for place in places(outer):
        where = dict(zip(what.out, place, strict=True))
        terms = [
            _term(block, left.tile(where | here), right.tile(where | here), plain, what)
            for here in (
                dict(zip(short, p, strict=True)) for p in places([what.lengths[n] for n in short])
            )
        ]
        total = functools.reduce(_add, terms)
        made.append(
            Tile(total.array, tuple(s if s == ROW else what.out.index(s) for s in total.sides))
        )
    shape = tuple(what.lengths[n] for n in what.out)
    return Tiled(tiles_of(made, outer), shape, what.dtype, wide)


def _as_matrices(factors: list[_Factor], what: _Product) -> list[_Factor]:
    """For a sum over rows, short axes as sides too if the other factor is wide: one product."""
    free = [[n for n in f.names if n in what.out] for f in factors]
    wide = [any(map(f.is_wide, f.names)) for f in factors]
    if not what.over_rows or any(len(names) != 1 for names in free) or not any(wide):
        return factors
    return [
        f.with_side(names[0]) if f.is_short(names[0]) else f
        for f, names in zip(factors, free, strict=True)
    ]


def _add(a: Tile, b: Tile) -> Tile:
    sizes = sizes_of(a, b)
    sides = tuple(sorted(sizes))
    return Tile(spread(a, sides, sizes) + spread(b, sides, sizes), sides)


def _term(block: Block, left: Tile, right: Tile, summed: list[int], what: _Product) -> Tile:
    """One tile's product with another, summed over sides they share and maybe over rows."""
    sums = [*summed, *([ROW] if what.over_rows else [])]
    factor = 1.0
    for name in summed:
        if name not in left.sides and name not in right.sides:
            factor *= what.lengths[name]
    sums = [s for s in sums if s == ROW or s in left.sides or s in right.sides]
    if len(sums) == 1 and (found := _matmul(block, left, right, sums[0], what)):
        made = found
    else:
        made = _by_parts(block, left, right, sums, what)
    return made if factor == 1.0 else Tile(made.array * made.array.dtype.type(factor), made.sides)


def _real(block: Block, tile: Tile, side: int, what: _Product) -> Tile:
    """A tile that is 0 beyond the real entries of a side."""
    if side not in tile.sides:
        return tile
    if side == ROW:
        return Tile(only_real(block, tile.array, tile.sides), tile.sides)
    sizes = sizes_of(tile)
    if sizes[side] == what.lengths[side]:
        return tile
    here = entries(side, tile.sides, sizes) < what.lengths[side]
    return Tile(jnp.where(here, tile.array, jnp.zeros_like(tile.array)), tile.sides)


def _matmul(block: Block, left: Tile, right: Tile, over: int, what: _Product) -> Tile | None:
    """A product on tensor cores, where both are matrices large enough."""
    if (
        len(left.sides) != 2
        or len(right.sides) != 2
        or over not in left.sides
        or over not in right.sides
    ):
        return None
    if left.is_known or right.is_known or set(left.sides) == set(right.sides):
        return None
    if min(*left.array.shape, *right.array.shape) < SMALLEST:
        return None
    left, right = _real(block, left, over, what), _real(block, right, over, what)
    rows = next(s for s in left.sides if s != over)
    columns = next(s for s in right.sides if s != over)
    a = left.array if left.sides == (rows, over) else jnp.transpose(left.array, (1, 0))
    b = right.array if right.sides == (over, columns) else jnp.transpose(right.array, (1, 0))
    made = lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), what.precision, preferred_element_type=jnp.float32
    )
    if rows > columns:
        return Tile(jnp.transpose(made.astype(what.dtype), (1, 0)), (columns, rows))
    return Tile(made.astype(what.dtype), (rows, columns))


def _by_parts(block: Block, left: Tile, right: Tile, sums: Sequence[int], what: _Product) -> Tile:
    """Multiply entry by entry, then add."""
    for side in sums:
        left, right = _real(block, left, side, what), _real(block, right, side, what)
    sizes = sizes_of(left, right) | ({ROW: block.rows} if ROW in sums else {})
    for name in sums:
        if name != ROW:
            sizes[name] = padded(what.lengths[name])
    sides = tuple(sorted(sizes))
    if math.prod(sizes.values()) > MOST_IN_TILE:
        raise IneligibleError("a product doesn't fit on chip")
    array = (spread(left, sides, sizes).astype(what.dtype)
             * spread(right, sides, sizes).astype(what.dtype))  # fmt: skip
    if ROW in sums and ROW not in left.sides and ROW not in right.sides:
        array = only_real(block, array, sides)
    for side in sorted(sums, reverse=True):
        array = jnp.sum(array, axis=sides.index(side), dtype=array.dtype)
        sides = tuple(s for s in sides if s != side)
    return Tile(array, sides)
