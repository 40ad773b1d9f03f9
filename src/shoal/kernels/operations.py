"""What operations that move, join, choose and compare entries do to values held as tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shoal.kernels.block import (
    IDENTITY,
    RULES,
    Block,
    Keyed,
    aligned,
    each_word,
    elementwise,
    materialised,
    narrow,
    pointwise,
    pointwise_as,
    relabelled,
    rest_of,
    rule,
)
from shoal.kernels.tiles import (
    ROW,
    IneligibleError,
    Tile,
    Tiled,
    constant,
    framed,
    padded,
    tiles_of,
    widened,
)
from shoal.tracing.equations import scan_counts

MOST_UNROLLED = 64  # turns of an inner loop


for _name in IDENTITY:
    RULES[_name] = lambda block, e, args: list(args)


@rule("bitcast_convert_type")
def _bitcast(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    if e.invars[0].aval.dtype.itemsize != e.outvars[0].aval.dtype.itemsize:
        raise IneligibleError("`bitcast_convert_type` to another size has no rule")
    return elementwise(block, e, args)


@rule("select_n")
def _select(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    """The case is one number for all, or one for each entry."""

    def chosen(which: Any, *cases: Any) -> Any:
        if which.dtype == np.bool_:
            return jnp.where(which, cases[1], cases[0])
        found = cases[0]
        for i, case in enumerate(cases[1:], 1):
            found = jnp.where(which == i, case, found)
        return found

    return pointwise_as(e, args, chosen)


@rule("broadcast_in_dim")
def _broadcast(block: Block, e: Any, args: list[Tiled]) -> Tiled:
    value, shape, dims = args[0], e.params["shape"], e.params["broadcast_dimensions"]
    axis = None if value.axis is None else dims[value.axis]
    origin: list[int | None] = [None] * len(shape)
    for old, new in enumerate(dims):
        if old != value.axis:
            origin[new] = value.own(old)
    own = [o for i, o in enumerate(origin) if i != axis]
    rest = rest_of(shape, axis)
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
    return replace(_regrouped(value, rest_of(new, axis)), axis=axis)


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
    parts = [np.broadcast_to(v.tiles, (*outer[:own], v.shape[own], *outer[own:])) for v in values]
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
        filler = np.asarray(np.nan if is_float else np.iinfo(value.dtype).min, value.dtype)
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
    return replace(made, axis=axis, shape=rest_of(aval.shape, axis))


@rule("scan")
def _scan(block: Block, e: Any, args: list[Any]) -> list[Any]:
    """A loop inside a row: turn by turn, as its turns are few."""
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
