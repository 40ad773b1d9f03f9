"""What each JAX operation does to values that a kernel holds as tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from shoal.kernels.tiles import (
    ROW,
    MOST_TILES,
    IneligibleError,
    Tile,
    Tiled,
    at,
    conformed,
    constant,
    entries,
    filled,
    framed,
    padded,
    places,
    sizes_of,
    split_up,
    spread,
    tiles_of,
    widened,
)
from shoal.tracing.equations import CALLS, inner, opened
from shoal.tracing.rowwise import map_rows_p
from shoal.tracing.steps import ELEMENTWISE

MOST_SPLIT = 64  # the longest side of a tile that is taken apart where an operation needs it
WIDE_BITS = True
MOST_UNROLLED = 64  # turns of an inner loop
_IDENTITY = frozenset({"copy", "copy_p", "stop_gradient", "name", "optimization_barrier"})
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Typed random keys: a value for each of their words."""

    words: tuple[Tiled, ...]


Held = Any  # Tiled | Keyed
Operation = Callable[["Block", Any, list[Any]], Any]
RULES: dict[str, Operation] = {}


def rule(*names: str) -> Callable[[Operation], Operation]:
    """Register what operations called so do."""

    def register(function: Operation) -> Operation:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class Block:
    """Runs a jaxpr on a block of `rows` rows, inside a kernel; `valid` says which of them are real.

    `valid` is None where all are.
    """

    rows: int
    valid: Any = None

    def jaxpr(self, closed: Any, args: Sequence[Held]) -> list[Held]:
        """What a jaxpr returns."""
        jaxpr, consts = closed if isinstance(closed, tuple) else opened(closed)
        env: dict[Any, Held] = {
            v: constant(np.asarray(c, v.aval.dtype))
            for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Held:
            if isinstance(atom, jex.Literal):
                return constant(np.asarray(atom.val, atom.aval.dtype))
            return env[atom]

        for e in jaxpr.eqns:
            outs = self.equation(e, [read(a) for a in e.invars])
            env |= dict(zip(e.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, e: Any, args: list[Held]) -> list[Held]:
        """What one equation makes."""
        name = e.primitive.name
        if e.primitive is map_rows_p:
            return self._mapped(e, args)
        if name in CALLS and (found := inner(e)):
            return self.jaxpr(found, args)
        if name not in RULES and name in ELEMENTWISE:
            return [elementwise(self, e, args)]
        if name not in RULES:
            raise IneligibleError(f"operation `{name}` has no rule")
        if name not in _KEY_RULES and any(isinstance(x, Keyed) for x in args):
            return self._by_words(e, args)
        made = RULES[name](self, e, args)
        return made if isinstance(made, list) else [made]

    def _by_words(self, e: Any, args: list[Held]) -> list[Held]:
        """An operation that only moves keys about does the same to each of their words."""
        count = next(len(x.words) for x in args if isinstance(x, Keyed))
        outs = []
        for i in range(count):
            made = RULES[e.primitive.name](
                self, e, [x.words[i] if isinstance(x, Keyed) else x for x in args]
            )
            outs.append(made if isinstance(made, list) else [made])
        return [Keyed(words) for words in zip(*outs, strict=True)]

    def _mapped(self, e: Any, args: list[Held]) -> list[Held]:
        shared = e.params["shared"]
        rows = [each_word(functools.partial(_one_row), x) for x in args[shared:]]
        made = self.jaxpr(e.params["jaxpr"], [*args[:shared], *rows])
        return [each_word(lambda x: replace(x, axis=0), x) for x in made]


def each_word(function: Callable[[Tiled], Tiled], value: Held) -> Held:
    """`function` of a value, or of each word of keys."""
    if isinstance(value, Keyed):
        return Keyed(tuple(map(function, value.words)))
    return function(value)


def _one_row(value: Tiled) -> Tiled:
    """One row of a value whose rows lie along its first axis."""
    if value.axis is None:
        value = dropped(value, 0)
    elif value.axis != 0:
        raise IneligibleError("rows don't lie along the first axis")
    return replace(value, axis=None)


def dropped(value: Tiled, axis: int) -> Tiled:
    """A shared value that is the same for all rows, without the axis that they lie along."""
    if value.tiles.shape[axis] != 1 or any(axis in t.sides for t in value.tiles.flat):
        raise IneligibleError("rows are computed with by their number")
    return relabelled(
        value,
        [i for i in range(len(value.shape)) if i != axis],
        (*value.shape[:axis], *value.shape[axis + 1 :]),
    )


def relabelled(value: Tiled, origin: Sequence[int | None], shape: Sequence[int]) -> Tiled:
    """Each axis of the result is axis `origin[i]` of `value`, or a new one that is uniform.

    Axes of `value` that are not named must be uniform.
    """
    where = {old: new for new, old in enumerate(origin) if old is not None}
    order = [old for old in origin if old is not None]
    gone = [a for a in range(value.tiles.ndim) if a not in where]
    tiles = np.transpose(value.tiles, [*order, *gone])
    tiles = tiles.reshape(tiles.shape[: len(order)])
    tiles = tiles.reshape([1 if o is None else value.tiles.shape[o] for o in origin])
    made = [
        Tile(t.array, tuple(ROW if s == ROW else where[s] for s in t.sides)) for t in tiles.flat
    ]
    wide = tuple(sorted(where[a] for a in value.wide if a in where))
    return Tiled(tiles_of(made, tiles.shape), tuple(shape), value.dtype, wide)


def materialised(value: Tiled, axis: int) -> Tiled:
    """A value with a tile for each place along an axis."""
    value = narrow(value, axis)
    shape = list(value.tiles.shape)
    shape[axis] = value.shape[axis]
    return replace(value, tiles=np.broadcast_to(value.tiles, shape))


def narrow(value: Tiled, axis: int) -> Tiled:
    """A value of which an axis is no side of its tiles."""
    if axis in value.wide and value.shape[axis] > MOST_SPLIT:
        raise IneligibleError(f"an axis of {value.shape[axis]} would have to be taken apart")
    return split_up(value, axis)


def aligned(values: Sequence[Tiled], rank: int) -> tuple[list[Tiled], int | None]:
    """Operands of one shape (or scalars) as rows of one rank, and where the rows lie."""
    axes = {v.axis for v in values if v.axis is not None}
    if len(axes) > 1:
        raise IneligibleError("rows of two operands lie along different axes")
    axis = axes.pop() if axes else None
    found = []
    for v in values:
        if v.axis is None and axis is not None and len(v.shape) == rank > 0:
            v = dropped(v, axis)
        elif not v.shape and v.axis is None:
            v = relabelled(v, [None] * (rank - (axis is not None)), (1,) * (rank - (axis is not None)))
        found.append(v)
    return found, axis


def pointwise(function: Callable[..., Any], values: Sequence[Tiled], dtype: Any) -> Tiled:
    """`function` of tiles at the same places; all values are of one rank."""
    wide = tuple(sorted({a for v in values for a in v.wide}))
    for axis in wide:
        values = [widened(v, axis) for v in values]
    shape = np.broadcast_shapes(*(v.shape for v in values))
    outer = np.broadcast_shapes(*(v.tiles.shape for v in values))
    made = [joined(function, [at(v, place) for v in values]) for place in places(outer)]
    return Tiled(tiles_of(made, outer), shape, np.dtype(dtype), wide)


def joined(function: Callable[..., Any], tiles: Sequence[Tile]) -> Tile:
    """`function` of some tiles, which are brought to one shape; at once where all are known."""
    if all(t.is_known for t in tiles):
        with jax.ensure_compile_time_eval():
            made = function(*(np.asarray(t.array).reshape(()) for t in tiles))
            return Tile(np.asarray(made).reshape(())[()])
    sizes = sizes_of(*tiles)
    sides = tuple(sorted(sizes))
    return Tile(function(*(spread(t, sides, sizes) for t in tiles)), sides)


def elementwise(block: Block, e: Any, args: Sequence[Tiled]) -> Tiled:
    """Any operation that does the same everywhere."""
    params = e.params
    return _pointwise_as(e, args, lambda *xs: e.primitive.bind(*xs, **params))


def _pointwise_as(e: Any, args: Sequence[Tiled], function: Callable[..., Any]) -> Tiled:
    aval = e.outvars[0].aval
    values, axis = aligned(args, len(aval.shape))
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    made = pointwise(function, values, np.uint32 if is_key else aval.dtype)
    return replace(made, axis=axis, shape=_rest(aval.shape, axis))


def _rest(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i != axis)


for _name in _IDENTITY:
    RULES[_name] = lambda block, e, args: list(args)


@rule("bitcast_convert_type")
def _bitcast(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    if e.invars[0].aval.dtype.itemsize != e.outvars[0].aval.dtype.itemsize:
        raise IneligibleError("`bitcast_convert_type` to another size has no rule")
    return elementwise(block, e, args)


@rule("select_n")
def _select(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    """The case is one number for all, or one for each entry; of booleans there are no more tiles."""

    def chosen(which: Any, *cases: Any) -> Any:
        if which.dtype == np.bool_:
            return jnp.where(which, cases[1], cases[0])
        found = cases[0]
        for i, case in enumerate(cases[1:], 1):
            found = jnp.where(which == i, case, found)
        return found

    return _pointwise_as(e, args, chosen)


@rule("round")
def _round(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    to_even = int(e.params["rounding_method"]) == 1

    def nearest(x: Any) -> Any:
        low = jnp.floor(x)
        part = x - low
        odd = low - 2 * jnp.floor(low * 0.5) > 0.5
        up = (part > 0.5) | ((part == 0.5) & (odd if to_even else x > 0))
        return jnp.where(up, low + 1, low)

    return _pointwise_as(e, args, nearest)


@rule("reduce_precision")
def _as_it_is(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    if np.dtype(args[0].dtype) != np.float32 or e.params["mantissa_bits"] != 23:
        raise IneligibleError("`reduce_precision` has no rule")
    return args[0]


@rule("broadcast_in_dim")
def _broadcast(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, shape, dims = args[0], e.params["shape"], e.params["broadcast_dimensions"]
    axis = None if value.axis is None else dims[value.axis]
    origin: list[int | None] = [None] * len(shape)
    for old, new in enumerate(dims):
        if old != value.axis:
            origin[new] = value.own(old)
    own = [o for i, o in enumerate(origin) if i != axis]
    rest = _rest(shape, axis)
    # Along an axis that grows from 1 everything is equal.
    return replace(relabelled(value, own, rest), axis=axis)


@rule("transpose")
def _transpose(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, order = args[0], list(e.params["permutation"])
    axis = None if value.axis is None else order.index(value.axis)
    own = [value.own(o) for o in order if o != value.axis]
    return replace(relabelled(value, own, [value.shape[o] for o in own]), axis=axis)


@rule("squeeze", "reshape", "expand_dims")
def _reshape(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, new = args[0], e.outvars[0].aval.shape
    old = e.invars[0].aval.shape
    axis = None
    if value.axis is not None:
        before, rows = math.prod(old[: value.axis]), old[value.axis]
        fits = [j for j in range(len(new)) if math.prod(new[:j]) == before and new[j] == rows]
        if not fits:
            raise IneligibleError("rows are joined with another axis")
        axis = fits[0]
    return replace(_regrouped(value, _rest(new, axis)), axis=axis)


def _regrouped(value: Tiled, new: tuple[int, ...]) -> Tiled:
    old = value.shape
    long = [i for i, n in enumerate(old) if n != 1]
    if [old[i] for i in long] == [n for n in new if n != 1]:
        found = iter(long)
        return relabelled(value, [next(found) if n != 1 else None for n in new], new)
    origin: dict[int, int] = {}
    for a in value.wide:
        before = math.prod(old[:a])
        to = [j for j, n in enumerate(new) if n == old[a] and math.prod(new[:j]) == before]
        if to:
            origin[a] = to[0]
        else:
            value = narrow(value, a)
    for a in range(len(old)):
        value = value if a in origin else materialised(value, a)
    shape = [1 if j in origin.values() else n for j, n in enumerate(new)]
    tiles = value.tiles.reshape(shape)
    made = [
        Tile(t.array, tuple(ROW if s == ROW else origin[s] for s in t.sides)) for t in tiles.flat
    ]
    return Tiled(tiles_of(made, shape), new, value.dtype, tuple(sorted(origin.values())))


@rule("slice")
def _slice(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, params = args[0], e.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    cuts = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    return cut(value, cuts, e.invars[0].aval.shape)


def cut(value: Tiled, cuts: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> Tiled:
    """Some entries along each axis of the traced value: (start, limit, stride)."""
    for i, (start, limit, stride) in enumerate(cuts):
        if (start, limit, stride) == (0, shape[i], 1):
            continue
        if i == value.axis:
            raise IneligibleError("some rows are taken by their number")
        own = value.own(i)
        value = narrow(value, own)
        count = len(range(start, limit, stride))
        if value.tiles.shape[own] != 1 or shape[i] == 1:
            index = [slice(None)] * value.tiles.ndim
            index[own] = slice(start, limit, stride)
            value = replace(value, tiles=value.tiles[tuple(index)])
        size = (*value.shape[:own], count, *value.shape[own + 1 :])
        value = replace(value, shape=size)
    return value


@rule("rev")
def _rev(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value = args[0]
    for axis in e.params["dimensions"]:
        own = value.own(axis)
        value = materialised(value, own)
        value = replace(value, tiles=np.flip(value.tiles, own))
    return value


@rule("concatenate")
def _concatenate(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    return _joined(args, e.params["dimension"], len(e.outvars[0].aval.shape))


def _joined(args: Sequence[Tiled], dimension: int, rank: int) -> Tiled:
    values, axis = aligned(args, rank)
    if dimension == axis:
        raise IneligibleError("rows are joined to others")
    own = dimension - (axis is not None and dimension > axis)
    values = [materialised(v, own) for v in values]
    wide = {a for v in values for a in v.wide}
    for a in wide:
        values = [widened(v, a) for v in values]
    outer = np.broadcast_shapes(*(_without(v.tiles.shape, own) for v in values))
    parts = [
        np.broadcast_to(v.tiles, (*outer[:own], v.shape[own], *outer[own:])) for v in values
    ]
    shape = list(values[0].shape)
    shape[own] = sum(v.shape[own] for v in values)
    tiles = np.concatenate(parts, own)
    return Tiled(tiles, tuple(shape), values[0].dtype, tuple(sorted(wide)), axis)


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


@rule("stack")
def _stack(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    new, rank = e.params["axis"], len(e.outvars[0].aval.shape)
    grown = [_with_axis(v, new) for v in args]
    return _joined(grown, new, rank)


def _with_axis(value: Tiled, new: int) -> Tiled:
    """A value with one more axis of 1 at `new` of its traced shape."""
    axis = None if value.axis is None else value.axis + (new <= value.axis)
    own = new - (axis is not None and new > axis)
    origin: list[int | None] = list(range(len(value.shape)))
    origin.insert(own, None)
    shape = (*value.shape[:own], 1, *value.shape[own:])
    return replace(relabelled(value, origin, shape), axis=axis)


@rule("split", "unstack")
def _split(block: Block, e: Any, args: list[Tiled]) -> list[Tiled]:
    value, axis, shape = args[0], e.params["axis"], e.invars[0].aval.shape
    outs, start = [], 0
    is_split = e.primitive.name == "split"
    for size in e.params["sizes"] if is_split else [1] * shape[axis]:
        cuts = [(0, n, 1) for n in shape]
        cuts[axis] = (start, start + int(size), 1)
        start += int(size)
        part = cut(value, cuts, shape)
        outs.append(part if is_split else _less(part, axis))
    return outs


def _less(value: Tiled, axis: int) -> Tiled:
    """A value without an axis of 1 of its traced shape."""
    own = value.own(axis)
    rows = None if value.axis is None else value.axis - (axis < value.axis)
    kept = [i for i in range(len(value.shape)) if i != own]
    return replace(relabelled(value, kept, [value.shape[i] for i in kept]), axis=rows)


@rule("pad")
def _pad(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, filler = args
    config, rank = e.params["padding_config"], len(e.outvars[0].aval.shape)
    for axis, (low, high, between) in enumerate(config):
        if not (low or high or between):
            continue
        if between or low < 0 or high < 0:
            raise IneligibleError("`pad` within or with less than nothing has no rule")
        ends = []
        for count in (low, high):
            shape = list(value.shape)
            shape[value.own(axis)] = count
            full = relabelled(filler, [None] * len(shape), shape)
            ends.append(replace(full, axis=value.axis))
        parts = [x for x, n in ((ends[0], low), (value, 1), (ends[1], high)) if n]
        value = _joined(parts, axis, rank)
    return value


@rule("iota")
def _iota(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    shape, axis = e.params["shape"], e.params["dimension"]
    dtype, count = np.dtype(e.params["dtype"]), shape[axis]
    frame = framed((count,), dtype, None)
    if frame.wide:
        tiles = [Tile(lax.iota(dtype, padded(count)), (0,))]
        line = replace(frame, tiles=tiles_of(tiles, (1,)))
    else:
        line = constant(np.arange(count, dtype=dtype))
    return relabelled(line, [0 if i == axis else None for i in range(len(shape))], shape)


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


def only_real(block: Block, array: Any, sides: Sequence[int]) -> Any:
    """An array that is 0 where there is no real row."""
    if block.valid is None or ROW not in sides:
        return array
    where = sides.index(ROW)
    valid = lax.broadcast_in_dim(block.valid, array.shape, (where,))
    return jnp.where(valid, array, jnp.zeros_like(array))


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
        first = pointwise(
            lambda x, b, i: jnp.where(x == b, i, far), [value, again, line], np.int32
        )
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
    return replace(
        pointwise(lambda x: jnp.asarray(x).astype(dtype), [found], dtype), axis=rows
    )


@rule("cumsum", "cumprod", "cummax", "cummin")
def _cumulated(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    fold = {"cumsum": jnp.add, "cumprod": jnp.multiply, "cummax": jnp.maximum,
            "cummin": jnp.minimum}[e.primitive.name]  # fmt: skip
    value = args[0]
    own = value.own(e.params["axis"])
    value = materialised(value, own)
    tiles = np.moveaxis(value.tiles.copy(), own, 0)
    order = range(len(tiles))
    order = list(reversed(order)) if e.params["reverse"] else list(order)
    for before, now in zip(order, order[1:], strict=False):
        for place in places(tiles.shape[1:]):
            pair = [tiles[(before, *place)], tiles[(now, *place)]]
            tiles[(now, *place)] = joined(fold, pair)
    return replace(value, tiles=np.moveaxis(tiles, 0, own))


@rule("threefry2x32")
def _threefry(block: Block, e: Any, args: list[Tiled]) -> list[Tiled]:
    """The words that XLA's own Threefry-2x32 gives (Salmon et al., 2011)."""
    rank = len(e.outvars[0].aval.shape)
    values, axis = aligned(args, rank)

    def both(a: Callable[..., Any], *xs: Tiled) -> Tiled:
        return pointwise(a, xs, np.uint32)

    def turned(x: Any, left: int) -> Any:
        return lax.shift_left(x, jnp.full_like(x, left)) | lax.shift_right_logical(
            x, jnp.full_like(x, 32 - left)
        )

    k1, k2, x1, x2 = values
    keys = k1, k2, both(lambda a, b: a ^ b ^ _PARITY, k1, k2)
    x1, x2 = both(jnp.add, x1, k1), both(jnp.add, x2, k2)
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x1 = both(jnp.add, x1, x2)
            x2 = both(lambda a, b, r=r: turned(b, r) ^ a, x1, x2)
        x1 = both(jnp.add, x1, keys[(group + 1) % 3])
        more = np.uint32(group + 1)
        x2 = both(lambda a, b, m=more: a + b + m, x2, keys[(group + 2) % 3])
    shape = _rest(e.outvars[0].aval.shape, axis)
    return [replace(x, axis=axis, shape=shape) for x in (x1, x2)]


@rule("iota_2x32_shape")
def _numbers(block: Block, e: Any, args: list[Tiled]) -> list[Tiled]:
    shape = e.params["shape"]
    if math.prod(shape) > MOST_TILES:
        raise IneligibleError(f"{math.prod(shape)} random numbers a row are too many")
    if WIDE_BITS and len(shape) == 1 and shape[0] > 1:
        # One tile for all of them: they are drawn side by side.
        line = tiles_of([Tile(lax.iota(np.uint32, padded(shape[0])), (0,))], (1,))
        low = Tiled(line, shape, np.dtype(np.uint32), (0,))
    else:
        low = constant(np.arange(math.prod(shape), dtype=np.uint32).reshape(shape))
    return [constant(np.zeros(shape, np.uint32)), low]


def _of_impl(block: Block, e: Any, keys: Keyed, made: Callable[..., Any], *more: Tiled) -> Any:
    """What a key's own implementation makes of each key, word arrays last."""
    shape = np.broadcast_shapes(keys.words[0].tiles.shape, *(m.tiles.shape for m in more))
    found = {}
    specs = [jax.ShapeDtypeStruct((len(keys.words),), np.uint32)]
    specs += [jax.ShapeDtypeStruct((), m.dtype) for m in more]
    closed = jax.make_jaxpr(made)(*specs)
    for place in places(shape):
        word = tiles_of([at(w, place) for w in keys.words], (len(keys.words),))
        args = [Tiled(word, (len(keys.words),), np.dtype(np.uint32))]
        args += [Tiled(tiles_of([at(m, place)], ()), (), m.dtype) for m in more]
        (found[place],) = block.jaxpr(closed, args)
    one = next(iter(found.values()))
    for a in one.wide:
        found = {place: narrow(x, a) for place, x in found.items()}
    one = next(iter(found.values()))
    tiles = np.empty((*shape, *one.shape), object)
    for place, x in found.items():
        tiles[(*place, ...)] = np.broadcast_to(x.tiles, x.shape)
    return tiles, one.dtype


@rule("random_split")
def _random_split(block: Block, e: Any, args: list[Keyed]) -> list[Keyed]:
    keys, shape = args[0], e.params["shape"]
    impl = e.invars[0].aval.dtype._impl
    tiles, _ = _of_impl(block, e, keys, lambda data: impl.split(data, shape))
    return [_as_keys(tiles, (*keys.words[0].shape, *shape), keys.words[0].axis)]


@rule("random_fold_in")
def _random_fold_in(block: Block, e: Any, args: list[Any]) -> list[Keyed]:
    keys, number = args
    impl = e.invars[0].aval.dtype._impl
    (*words, number), axis = aligned([*keys.words, number], len(e.outvars[0].aval.shape))
    tiles, _ = _of_impl(block, e, Keyed(tuple(words)), impl.fold_in, number)
    return [_as_keys(tiles, words[0].shape, axis)]


@rule("random_bits")
def _random_bits(block: Block, e: Any, args: list[Keyed]) -> Tiled:
    keys, shape, width = args[0], e.params["shape"], e.params["bit_width"]
    impl = e.invars[0].aval.dtype._impl
    tiles, dtype = _of_impl(block, e, keys, lambda data: impl.random_bits(data, width, shape))
    return Tiled(tiles, (*keys.words[0].shape, *shape), dtype, (), keys.words[0].axis)


def _as_keys(tiles: np.ndarray, shape: tuple[int, ...], axis: int | None) -> Keyed:
    words = [tiles[..., i] for i in range(tiles.shape[-1])]
    return Keyed(tuple(Tiled(w, shape, np.dtype(np.uint32), (), axis) for w in words))


@rule("random_wrap")
def _random_wrap(block: Block, e: Any, args: list[Tiled]) -> list[Keyed]:
    value = materialised(args[0], len(args[0].shape) - 1)
    return [_as_keys(value.tiles, value.shape[:-1], value.axis)]


@rule("random_unwrap")
def _random_unwrap(block: Block, e: Any, args: list[Keyed]) -> Tiled:
    keys = args[0]
    tiles = np.stack([w.tiles for w in keys.words], -1)
    first = keys.words[0]
    return Tiled(tiles, (*first.shape, len(keys.words)), first.dtype, (), first.axis)


@rule("random_clone")
def _random_clone(block: Block, e: Any, args: list[Keyed]) -> list[Keyed]:
    return [args[0]]


_KEY_RULES = frozenset(n for n in RULES if n.startswith("random_")) | _IDENTITY


@rule("gather")
def _gather(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    """One entry along one axis, by an index: chosen among all of them."""
    value, index = args
    how, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
    batch = tuple(how.operand_batching_dims)
    fits = len(how.start_index_map) == 1 and how.start_index_map == how.collapsed_slice_dims
    shape = e.invars[0].aval.shape
    whole = all(n == s or i in (*batch, *how.collapsed_slice_dims)
                for i, (n, s) in enumerate(zip(shape, sizes, strict=True)))  # fmt: skip
    if not fits or not whole or len(index.shape) > 1 or len(batch) > 1:
        raise IneligibleError("this kind of `gather` has no rule")
    if batch and (value.axis != batch[0] or index.axis != how.start_indices_batching_dims[0]):
        raise IneligibleError("this kind of `gather` has no rule")
    if value.axis is not None and not batch:
        raise IneligibleError("rows are taken by an index")
    which = relabelled(narrow(index, 0), [], ()) if index.shape else index
    made = _chosen(value, value.own(how.start_index_map[0]), which, e)
    if index.axis is None:
        return made
    offsets = e.outvars[0].aval.shape
    (rows,) = [i for i in range(len(offsets)) if i not in how.offset_dims]
    return replace(made, axis=rows)


def _chosen(value: Tiled, axis: int, which: Tiled, e: Any) -> Tiled:
    """The entry of `value` along an axis that `which` names, which goes."""
    value = materialised(value, axis)
    kept = [i for i in range(len(value.shape)) if i != axis]
    rest = [value.shape[i] for i in kept]
    count = value.shape[axis]
    which = relabelled(which, [None] * len(rest), (1,) * len(rest))
    fills = "FILL_OR_DROP" in str(e.params.get("mode", ""))
    if not fills:
        which = pointwise(lambda i: jnp.clip(i, 0, count - 1), [which], which.dtype)
    parts = [
        relabelled(replace(value, tiles=np.take(value.tiles, [i], axis)), kept, rest)
        for i in range(count)
    ]
    found = parts[0]
    if fills:
        is_float = np.issubdtype(value.dtype, np.floating)
        filler = np.asarray(np.nan if is_float else _neutral("reduce_max", value.dtype), value.dtype)
        found = relabelled(constant(filler), [None] * len(rest), rest)
    for i, part in enumerate(parts):
        if i or fills:
            found = pointwise(
                lambda w, a, b, i=i: jnp.where(w == i, a, b), [which, part, found], value.dtype
            )
    return replace(found, shape=tuple(rest))


@rule("dynamic_slice")
def _dynamic_slice(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, *starts = args
    shape, sizes = e.invars[0].aval.shape, e.params["slice_sizes"]
    for i, (start, size, n) in enumerate(zip(starts, sizes, shape, strict=True)):
        if size == n:
            continue
        now = tuple(sizes[:i]) + tuple(shape[i:])
        if start.is_known:
            first = int(np.clip(int(start.known()), 0, n - size))
            cuts = [(0, m, 1) for m in now]
            cuts[i] = (first, first + size, 1)
            value = cut(value, cuts, now)
        elif size == 1 and i != value.axis:
            own = value.own(i)
            made = _chosen(value, own, start, e)
            origin: list[int | None] = list(range(len(made.shape)))
            origin.insert(own, None)
            size_now = (*made.shape[:own], 1, *made.shape[own:])
            value = replace(relabelled(made, origin, size_now), axis=value.axis)
        else:
            raise IneligibleError("this kind of `dynamic_slice` has no rule")
    return value


@rule("platform_index")
def _platform_index(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    found = None
    for i, platforms in enumerate(e.params["platforms"]):
        if platforms is None or "cuda" in platforms:
            found = i if found is None or platforms is not None else found
    if found is None:
        raise IneligibleError("a choice between platforms has no case for GPUs")
    return constant(np.int32(found))


@rule("cond")
def _cond(block: Block, e: Any, args: list[Any]) -> list[Any]:
    which, *args = args
    branches = e.params["branches"]
    if which.is_known:
        number = int(np.clip(int(which.known()), 0, len(branches) - 1))
        return block.jaxpr(branches[number], args)
    cases = [block.jaxpr(branch, args) for branch in branches]
    outs = []
    for var, *values in zip(e.outvars, *cases, strict=True):
        if any(isinstance(v, Keyed) for v in values):
            words = [
                _case(which, [v.words[i] for v in values], var.aval)
                for i in range(len(values[0].words))
            ]
            outs.append(Keyed(tuple(words)))
        else:
            outs.append(_case(which, values, var.aval))
    return outs


def _case(which: Tiled, values: Sequence[Tiled], aval: Any) -> Tiled:
    last = len(values) - 1

    def chosen(number: Any, *cases: Any) -> Any:
        found = cases[0]
        for i, case in enumerate(cases[1:], 1):
            found = jnp.where(number == i if i < last else number >= i, case, found)
        return found

    (which, *values), axis = aligned([which, *values], len(aval.shape))
    made = pointwise(chosen, [which, *values], values[0].dtype)
    return replace(made, axis=axis, shape=_rest(aval.shape, axis))


@rule("scan")
def _scan(block: Block, e: Any, args: list[Any]) -> list[Any]:
    """A loop inside a row: turn by turn, as its turns are few."""
    from shoal.tracing.equations import scan_counts

    n_const, n_carry = scan_counts(e)
    length = e.params["length"]
    consts, carry = args[:n_const], args[n_const : n_const + n_carry]
    rows = args[n_const + n_carry :]
    if length > MOST_UNROLLED:
        raise IneligibleError(f"an inner loop of {length} turns is too long")
    turns = range(length)
    stacked: list[list[Any]] = []
    for i in reversed(turns) if e.params["reverse"] else turns:
        now = [each_word(lambda x, i=i: _slice_of(x, i), x) for x in rows]
        outs = block.jaxpr(e.params["jaxpr"], [*consts, *carry, *now])
        carry = outs[:n_carry]
        stacked.append(outs[n_carry:])
    stacked = stacked[::-1] if e.params["reverse"] else stacked
    ys = []
    for j, var in enumerate(e.outvars[n_carry:]):
        column = [made[j] for made in stacked]
        rank = len(var.aval.shape)
        if isinstance(column[0], Keyed):
            words = zip(*(x.words for x in column), strict=True)
            ys.append(Keyed(tuple(_piled(w, rank) for w in words)))
        else:
            ys.append(_piled(column, rank))
    return [*carry, *ys]


def _slice_of(value: Tiled, i: int) -> Tiled:
    if value.axis == 0:
        raise IneligibleError("a loop goes over rows")
    own = value.own(0)
    value = narrow(value, own)
    if value.tiles.shape[own] != 1:
        value = replace(value, tiles=np.take(value.tiles, [i], own))
    return _less(replace(value, shape=(1, *value.shape[1:]) if own == 0 else value.shape), 0)


def _piled(values: Sequence[Tiled], rank: int) -> Tiled:
    return _joined([_with_axis(v, 0) for v in values], 0, rank)


@rule("while")
def _while(block: Block, e: Any, args: list[Any]) -> list[Any]:
    """A loop of which each row does as many turns as it wants; rows that are done wait."""
    n_test, n_body = e.params["cond_nconsts"], e.params["body_nconsts"]
    tests, consts = args[:n_test], args[n_test : n_test + n_body]
    first = args[n_test + n_body :]
    frames = [[framed(w.shape, w.dtype, w.axis) for w in _words(x)] for x in first]

    def arrays(values: Sequence[Any]) -> list[list[list[Any]]]:
        return [
            [conformed(w, f, block.rows) for w, f in zip(_words(x), fs, strict=True)]
            for x, fs in zip(values, frames, strict=True)
        ]

    def values(made: Any) -> list[Any]:
        found = []
        for x, fs, arrs in zip(first, frames, made, strict=True):
            words = [filled(f, a, block.rows) for f, a in zip(fs, arrs, strict=True)]
            found.append(Keyed(tuple(words)) if isinstance(x, Keyed) else words[0])
        return found

    def wants(made: Any) -> Any:
        (test,) = block.jaxpr(e.params["cond_jaxpr"], [*tests, *values(made)])
        sizes = {ROW: block.rows}
        return spread(at(test, ()), (ROW,), sizes)

    def body(made: Any) -> Any:
        going = wants(made)
        after = arrays(block.jaxpr(e.params["body_jaxpr"], [*consts, *values(made)]))

        def kept(new: Any, old: Any) -> Any:
            return jnp.where(lax.broadcast_in_dim(going, new.shape, (0,)), new, old)

        return jax.tree.map(kept, after, made)

    final = lax.while_loop(
        lambda made: jnp.max(wants(made).astype(jnp.int32), axis=0) > 0, body, arrays(first)
    )
    return values(final)


def _words(value: Any) -> tuple[Tiled, ...]:
    return value.words if isinstance(value, Keyed) else (value,)
