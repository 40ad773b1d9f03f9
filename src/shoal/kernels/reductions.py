"""Sums, extremes and their places, along axes of a row or over the rows of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shoal.kernels.block import (
    Block,
    joined,
    materialised,
    narrow,
    only_real,
    pointwise,
    relabelled,
    rule,
)
from shoal.kernels.tiles import (
    ROW,
    IneligibleError,
    Tile,
    Tiled,
    constant,
    entries,
    padded,
    sizes_of,
    spread,
    tiles_of,
)

_FOLDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "reduce_sum": (jnp.add, jnp.sum),
    "reduce_max": (jnp.maximum, jnp.max),
    "reduce_min": (jnp.minimum, jnp.min),
    "reduce_and": (jnp.logical_and, jnp.min),
    "reduce_or": (jnp.logical_or, jnp.max),
    "reduce_prod": (jnp.multiply, None),
}


@rule(*_FOLDS)
def _reduce(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, name, axes = args[0], e.primitive.name, e.params["axes"]
    rows = value.axis
    for axis in sorted((value.own(a) for a in axes if a != rows), reverse=True):
        value = _reduced(value, axis, name)
    if rows in axes:
        if name != "reduce_sum":
            raise IneligibleError(f"`{name}` over rows has no rule")
        return replace(summed_rows(block, value), axis=None)
    rows = None if rows is None else rows - sum(a < rows for a in axes)
    return replace(value, axis=rows)


def _reduced(value: Tiled, axis: int, name: str) -> Tiled:
    """A value reduced along one of its own axes, which goes."""
    fold, whole = _FOLDS[name]
    if axis in value.wide and any(axis in t.sides for t in value.tiles.flat) and whole is None:
        value = narrow(value, axis)
    kept = [i for i in range(len(value.shape)) if i != axis]
    if axis in value.wide:
        made = [_along(t, axis, value.shape[axis], name) for t in value.tiles.flat]
        value = replace(value, tiles=tiles_of(made, value.tiles.shape))
        value = replace(value, wide=tuple(a for a in value.wide if a != axis))
        return relabelled(value, kept, [value.shape[i] for i in kept])
    if name in ("reduce_sum", "reduce_prod"):
        value = materialised(value, axis)
    parts = [
        relabelled(
            replace(value, tiles=np.take(value.tiles, [i], axis)),
            kept, [value.shape[i] for i in kept],
        )
        for i in range(value.tiles.shape[axis])
    ]  # fmt: skip
    return functools.reduce(lambda a, b: pointwise(fold, [a, b], value.dtype), parts)


def _along(tile: Tile, axis: int, count: int, name: str) -> Tile:
    """A tile reduced along a side, of which `count` entries are real."""
    if axis not in tile.sides:
        if name != "reduce_sum":
            return tile
        return joined(lambda x: x * jnp.asarray(count, x.dtype), [tile])
    sizes, where = sizes_of(tile), tile.sides.index(axis)
    array, is_bool = tile.array, tile.array.dtype == np.bool_
    array = array.astype(jnp.int32) if is_bool else array
    if sizes[axis] != count:
        neutral = _neutral(name, array.dtype)
        array = jnp.where(entries(axis, tile.sides, sizes) < count, array, neutral)
    made = _FOLDS[name][1](array, axis=where)
    made = made.astype(array.dtype) if not is_bool else made > 0
    return Tile(made, tuple(s for s in tile.sides if s != axis))


def _neutral(name: str, dtype: Any) -> Any:
    if name in ("reduce_sum", "reduce_or"):
        return np.zeros((), dtype)[()]
    if name == "reduce_and":
        return np.ones((), dtype)[()]
    is_float = np.issubdtype(dtype, np.floating)
    limits = np.finfo(np.float32) if is_float else np.iinfo(dtype)
    low, high = (-np.inf, np.inf) if is_float else (limits.min, limits.max)
    return np.asarray(low if name == "reduce_max" else high, dtype)[()]


def summed_rows(block: Block, value: Tiled) -> Tiled:
    """The sum over the real rows of a block."""

    def total(tile: Tile) -> Tile:
        sizes = sizes_of(tile) | {ROW: block.rows}
        sides = tuple(sorted(sizes))
        array = only_real(block, spread(tile, sides, sizes), sides)
        return Tile(jnp.sum(array, axis=0, dtype=array.dtype), sides[1:])

    made = [total(t) for t in value.tiles.flat]
    return replace(value, tiles=tiles_of(made, value.tiles.shape))


@rule("argmax", "argmin")
def _argmax(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    (axis,), value = e.params["axes"], args[0]
    dtype, is_max = e.params["index_dtype"], e.primitive.name == "argmax"
    own = value.own(axis)
    best = _reduced(value, own, "reduce_max" if is_max else "reduce_min")
    kept = [i for i in range(len(value.shape)) if i != own]
    rows = None if value.axis is None else value.axis - (axis < value.axis)
    found = None
    if own in value.wide:
        origin: list[int | None] = list(range(len(kept)))
        origin.insert(own, None)
        again = relabelled(best, origin, (*value.shape[:own], 1, *value.shape[own + 1 :]))
        shape = [1] * len(value.shape)
        shape[own] = value.shape[own]
        side = Tile(lax.iota(jnp.int32, padded(value.shape[own])), (own,))
        line = Tiled(tiles_of([side], [1] * len(shape)), tuple(shape), np.dtype(np.int32), (own,))
        far = np.int32(value.shape[own])
        first = pointwise(lambda x, b, i: jnp.where(x == b, i, far), [value, again, line], np.int32)
        found = _reduced(first, own, "reduce_min")
    else:
        value = materialised(value, own)
        for i in reversed(range(value.tiles.shape[own])):
            one = relabelled(
                replace(value, tiles=np.take(value.tiles, [i], own)),
                kept, [value.shape[k] for k in kept],
            )  # fmt: skip
            if found is None:
                found = replace(constant(np.int32(i)), shape=())
                found = relabelled(found, [None] * len(kept), one.shape)
                continue
            here = np.int32(i)
            found = pointwise(
                lambda x, b, f, here=here: jnp.where(x == b, here, f), [one, best, found], np.int32
            )
    assert found is not None
    return replace(pointwise(lambda x: jnp.asarray(x).astype(dtype), [found], dtype), axis=rows)
