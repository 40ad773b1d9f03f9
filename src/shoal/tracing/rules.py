"""Which JAX operations keep the rows of the environments apart, and how they run on a share.

A rule gets an operation of whose operands at least one has rows, and answers with a step, or None
if replicas can't each do their share of it. An unknown operation has no rule: ignorance can only
forbid a cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.graph.layout import REPLICATED, Layout, Partial, Replicated, Sharded
from shoal.tracing.steps import ELEMENTWISE, Operation, Rule, Step


def row_step(op: Operation) -> Step | None:
    """How a share of an operation runs, if its rows stay apart or are summed up."""
    kind = op.equation.primitive.name
    rule = RULES.get(kind) or (elementwise if kind in ELEMENTWISE else None)
    return rule(op) if rule else None


def elementwise(op: Operation) -> Step | None:
    """Operands of one shape, or what is spread along an axis, or single numbers."""
    rows = op.common
    return op.alike(rows) if rows is not None else None


def _broadcast(op: Operation) -> Step | None:
    rows = op.rows()
    if rows is None or len(op.ins) > 1:
        return None
    out = rows.at(op.params["broadcast_dimensions"][rows.axis])
    return Step(op.ins, (out,), op.resized("shape", rows, out.axis))


def _reshape(op: Operation) -> Step | None:
    rows = op.rows()
    if rows is None or op.params.get("dimensions") is not None or len(op.ins) > 1:
        return None
    made = _axis_with(op.out, rows, op.shape(), op.count)
    return made and Step(op.ins, (made,), op.resized("new_sizes", made, made.axis))


def _axis_with(
    out: Sequence[int], rows: Sharded, shape: Sequence[int], count: int
) -> Sharded | None:
    """How the rows of `shape` lie in `out`, which has the same numbers in the same order."""
    before = math.prod(shape[: rows.axis]) * rows.before
    after = math.prod(shape[rows.axis + 1 :]) * rows.after
    found = []
    for axis, size in enumerate(out):
        outer, inner = math.prod(out[:axis]), math.prod(out[axis + 1 :])
        if not outer or not inner or before % outer:
            continue
        # The smallest groups whose numbers fill whole entries of the axis.
        group = rows.group * inner // math.gcd(rows.group * inner, after)
        made = Sharded(axis, before // outer, after * group // (rows.group * inner), group)
        if group < count and count % group == 0 and size == made.size(count):
            found.append(replace(made, own=rows.own, cause=rows.cause))
    return min(found, key=lambda x: (x.group, not x.is_plain), default=None)


def _transpose(op: Operation) -> Step | None:
    rows = op.rows()
    return rows and Step(op.ins, (rows.at(list(op.params["permutation"]).index(rows.axis)),))


def _without(key: str) -> Rule:
    """Operations that take the named axes away keep rows that lie along another."""

    def rule(op: Operation) -> Step | None:
        rows = op.common
        gone = op.params[key]
        if rows is None or rows.axis in gone:
            return None
        out = rows.at(rows.axis - sum(a < rows.axis for a in gone))
        return replace(op.alike(rows), outs=(out,) * len(op.equation.outvars))

    return rule


def _reduced(how: str, but: str = "") -> Rule:
    """Sums and extremes keep rows along other axes; along the rows they leave a contribution.

    Numbers whose dtype is `but` of some kinds leave none: bits are joined, complex ones have no
    order.
    """
    kept = _without("axes")

    def rule(op: Operation) -> Step | None:
        rows = op.rows()
        is_other = op.equation.outvars[0].aval.dtype.kind in but
        if rows is None or rows.axis not in op.params["axes"] or is_other:
            return kept(op)
        return Step(op.ins, (Partial(how),))

    return rule


def _along(key: str) -> Rule:
    """Operations along one named axis keep rows that lie along another."""

    def rule(op: Operation) -> Step | None:
        rows, along = op.common, op.params[key]
        if rows is None or rows.axis in (along if isinstance(along, (tuple, list)) else (along,)):
            return None
        return op.alike(rows)

    return rule


def _concatenate(op: Operation) -> Step | None:
    found = [x for x in op.ins if isinstance(x, Sharded)]
    along = op.params["dimension"]
    if all(x.axis != along for x in found):
        return op.alike(op.common) if op.common else None
    # Rows after rows: more of them before each environment's.
    rows, block = found[0], found[0].block(op.count)
    sizes = [op.shape(i)[along] for i in range(len(op.ins))]
    alike = {(x.axis, x.after, x.group) for x in found} == {(along, rows.after, rows.group)}
    if not alike or any(size % block or not size for size in sizes):
        return None
    ins = tuple(replace(rows, before=size // block) for size in sizes)
    return Step(ins, (replace(rows, before=sum(sizes) // block),))


def _stack(op: Operation) -> Step | None:
    rows = op.common
    if rows is None:
        return None
    return replace(op.alike(rows), outs=(rows.at(rows.axis + (op.params["axis"] <= rows.axis)),))


def _tile(op: Operation) -> Step | None:
    """What is repeated along other axes keeps rows; repeated as a whole, there are more of them."""
    rows, reps = op.rows(), op.params["reps"]
    if rows is None or len(reps) != len(op.shape()):
        return None
    times = reps[rows.axis]
    return Step(op.ins, (replace(rows, before=rows.before * times),))


def _unstack(op: Operation) -> Step | None:
    rows, axis = op.rows(), op.params["axis"]
    if rows is None or rows.axis == axis:
        return None
    return Step(op.ins, (rows.at(rows.axis - (axis < rows.axis)),) * len(op.equation.outvars))


def _fft(op: Operation) -> Step | None:
    return _batched(len(op.params["fft_lengths"]))(op)


def _slice(op: Operation) -> Step | None:
    rows, p = op.rows(), op.params
    if rows is None:
        return None
    axis, block = rows.axis, rows.block(op.count)
    start, limit = p["start_indices"][axis], p["limit_indices"][axis]
    stride = p["strides"][axis] if p["strides"] else 1
    # Of several rows for each environment, those at the same places.
    skipped = start % block
    if skipped >= stride or limit % block or limit == start or rows.after % stride:
        return None
    out = replace(rows, before=limit // block - start // block, after=rows.after // stride)

    def local(share: int) -> dict[str, Any]:
        size = rows.block(share)
        starts, limits = list(p["start_indices"]), list(p["limit_indices"])
        starts[axis] = start // block * size + skipped
        limits[axis] = limit // block * size
        return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}

    return Step(op.ins, (out,), local)


def _split(op: Operation) -> Step | None:
    rows = op.rows()
    if rows is None:
        return None
    if rows.axis != op.params["axis"]:
        return Step(op.ins, (rows,) * len(op.equation.outvars))
    block, sizes = rows.block(op.count), op.params["sizes"]
    if any(size % block or not size for size in sizes):
        return None
    outs = tuple(replace(rows, before=size // block) for size in sizes)
    return Step(
        op.ins, outs, lambda share: {"sizes": tuple(s // block * rows.block(share) for s in sizes)}
    )


def _dynamic_slice(op: Operation) -> Step | None:
    rows = op.rows()
    if rows is None or _has_rows(op.ins[1:]) or op.out[rows.axis] != op.shape()[rows.axis]:
        return None
    return Step(op.ins, (rows,), op.resized("slice_sizes", rows, rows.axis))


def _dynamic_update_slice(op: Operation) -> Step | None:
    found = {x for x in op.ins[:2] if isinstance(x, Sharded)}
    if len(found) != 1 or _has_rows(op.ins[2:]):
        return None
    (rows,) = found
    if op.shape(0)[rows.axis] != op.shape(1)[rows.axis]:
        return None
    return Step((rows, rows, *op.ins[2:]), (rows,))


def _pad(op: Operation) -> Step | None:
    rows = op.rows()
    if rows is None or _has_rows(op.ins[1:]):
        return None
    whole = tuple(op.params["padding_config"][rows.axis]) == (0, 0, 0)
    return Step(op.ins, (rows,)) if whole else None


def _dot(op: Operation) -> Step | None:
    (contract_l, contract_r), (batch_l, batch_r) = op.params["dimension_numbers"]
    left, right = op.rows(0), op.rows(1)
    if left is not None and (pair := _partner(left, contract_l, contract_r)):
        return _summed(op, left, pair)
    if right is not None and (pair := _partner(right, contract_r, contract_l)):
        step = _summed(replace(op, ins=op.ins[::-1]), right, pair)
        return step and replace(step, ins=step.ins[::-1])
    if left is not None and (pair := _partner(left, batch_l, batch_r)):
        fits = right is None or right == pair
        return Step((left, pair), (left.at(list(batch_l).index(left.axis)),)) if fits else None
    if right is not None and (pair := _partner(right, batch_r, batch_l)):
        fits = left is None
        return Step((pair, right), (right.at(list(batch_r).index(right.axis)),)) if fits else None
    if left is not None and right is not None:
        return None
    rows, first = (left, 0) if left is not None else (right, 1)
    assert rows is not None
    contract, batch = ((contract_l, batch_l), (contract_r, batch_r))[first]
    free = [i for i in range(len(op.shape(first))) if i not in contract and i not in batch]
    skipped = len(batch) + (len(op.shape(0)) - len(contract_l) - len(batch_l) if first else 0)
    return Step(op.ins, (rows.at(skipped + free.index(rows.axis)),))


def _partner(rows: Sharded, mine: Sequence[int], others: Sequence[int]) -> Sharded | None:
    """How the other operand must lie if rows lie along one of these axes."""
    return rows.at(others[list(mine).index(rows.axis)]) if rows.axis in mine else None


def _summed(op: Operation, rows: Sharded, pair: Sharded) -> Step | None:
    """A product summed over rows: the other operand must lie like them."""
    if isinstance(op.ins[1], Sharded) and op.ins[1] != pair:
        return None
    return Step((rows, pair), (Partial(),))


def _gather(op: Operation) -> Step | None:
    numbers, (operand, indices) = op.params["dimension_numbers"], (op.rows(0), op.rows(1))
    offsets = list(numbers.offset_dims)
    batch = [i for i in range(len(op.out)) if i not in offsets]
    pairs = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    if operand is not None and operand.axis in pairs:
        want = operand.at(pairs[operand.axis])
        if indices is not None and indices != want:
            return None
        return Step((operand, want), (operand.at(batch[want.axis]),))
    if indices is not None and operand is None and indices.axis < len(op.shape(1)) - 1:
        back = {b: a for a, b in pairs.items()}
        first = indices.at(back[indices.axis]) if indices.axis in back else op.ins[0]
        return Step((first, indices), (indices.at(batch[indices.axis]),))
    if operand is None or indices is not None:
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(op.shape())) if i not in gone]
    sizes = op.params["slice_sizes"]
    if operand.axis not in kept or sizes[operand.axis] != op.shape()[operand.axis]:
        return None
    out = operand.at(offsets[kept.index(operand.axis)])
    return Step(op.ins, (out,), op.resized("slice_sizes", operand, operand.axis))


def _scatter(op: Operation) -> Step | None:
    numbers = op.params["dimension_numbers"]
    operand, indices, updates = op.rows(0), op.rows(1), op.rows(2)
    windows = list(numbers.update_window_dims)
    batch = [i for i in range(len(op.shape(2))) if i not in windows]
    for axis, index in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):  # every row has indices of its own
        places = (axis, index, batch[index])
        if base := _along_one(op.ins, places, axis):
            return _aligned(op, tuple(base.at(place) for place in places))
    if indices is None:  # all rows have the same indices
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        kept = [i for i in range(len(op.shape())) if i not in gone]
        for axis, window in zip(kept, windows, strict=True):
            base = _along_one((operand, None, updates), (axis, -1, window), axis)
            if base and op.shape(2)[window] == op.shape()[axis]:
                return _aligned(op, (base, op.ins[1], base.at(window)))
    return _scatter_sum(op, batch) if operand is None else None


def _along_one(ins: Sequence[Any], places: Sequence[int], axis: int) -> Sharded | None:
    """The rows of the first operand that has them at its place, as they would lie along `axis`."""
    found = (
        x.at(axis)
        for x, place in zip(ins, places, strict=True)
        if isinstance(x, Sharded) and x.axis == place
    )
    return next(found, None)


def _aligned(op: Operation, wants: tuple[Layout, ...]) -> Step | None:
    """Operands with rows must lie as they must; those that all replicas have can be cut."""
    fit = all(
        not isinstance(x, Sharded) or x == want for x, want in zip(op.ins, wants, strict=True)
    )
    return Step(wants, wants[:1]) if fit else None


def _scatter_sum(op: Operation, batch: Sequence[int]) -> Step | None:
    """Rows added up where their indices say: a contribution of each replica's."""
    how = {"scatter-add": "sum", "scatter_add": "sum", "scatter_max": "max", "scatter-max": "max"}
    how |= {"scatter_min": "min", "scatter-min": "min", "scatter-sub": "sum"}
    kind, numbers = op.equation.primitive.name, op.params["dimension_numbers"]
    indices, updates = op.rows(1), op.rows(2)
    rows = updates or (indices and indices.at(batch[indices.axis]))
    if kind not in how or rows is None or rows.axis not in batch:
        return None
    want = rows.at(batch.index(rows.axis))
    if numbers.operand_batching_dims or (indices is not None and indices != want):
        return None
    return Step((Partial(how[kind]), want, rows), (Partial(how[kind]),))


def _top_k(op: Operation) -> Step | None:
    rows = op.rows()
    last = len(op.shape()) - 1
    along = op.params.get("axis", op.params.get("operand_axis", last)) % (last + 1)
    return op.alike(rows) if rows is not None and rows.axis != along else None


def _batched(trailing: int) -> Rule:
    """Operations on matrices, or vectors, keep rows of these apart."""

    def rule(op: Operation) -> Step | None:
        rows = op.common
        rank = max(len(v.aval.shape) for v in op.equation.invars)
        return op.alike(rows) if rows is not None and rows.axis < rank - trailing else None

    return rule


def _triangular(op: Operation) -> Step | None:
    """A solution for many right-hand sides keeps those apart too, where all share the matrix."""
    rows = op.rows(1)
    side = len(op.shape(1)) - (1 if op.params["left_side"] else 2)
    if rows is not None and op.rows(0) is None and rows.axis == side:
        return Step(op.ins, (rows,))
    return _batched(2)(op)


def _convolution(op: Operation) -> Step | None:
    lhs, rhs, out = op.params["dimension_numbers"]
    left, right = op.rows(0), op.rows(1)
    if op.params["batch_group_count"] != 1:
        return None
    if left is not None and right is None and left.axis == lhs[0]:
        return Step(op.ins, (left.at(out[0]),))
    summed = op.params["feature_group_count"] == 1
    if summed and left is not None and left.axis == lhs[1]:
        return _summed(op, left, left.at(rhs[1]))
    if summed and right is not None and right.axis == rhs[1] and left is None:
        return Step((right.at(lhs[1]), right), (Partial(),))
    if right is not None and left is None and right.axis == rhs[0] and summed:
        return Step(op.ins, (right.at(out[1]),))
    return None


def _window(op: Operation) -> Step | None:
    """Pooling keeps rows that it takes one by one."""
    rows, p = op.common, op.params
    if rows is None:
        return None
    axis = rows.axis
    alone = p["window_dimensions"][axis] == 1 and p["window_strides"][axis] == 1
    padding = tuple(p.get("padding", ((0, 0),) * (axis + 1))[axis]) == (0, 0)
    wide = [p.get(k) for k in ("base_dilation", "window_dilation")]
    return (
        op.alike(rows)
        if alone and padding and all(d is None or d[axis] == 1 for d in wide)
        else None
    )


def _random_bits(op: Operation) -> Step | None:
    """Draws from a key a row; the drawn shape comes after the rows."""
    rows = op.rows()
    return rows and Step(op.ins, (rows,))


def _random_gamma(op: Operation) -> Step | None:
    """A key is split for the numbers along the axes after its own."""
    rows = op.common
    return op.alike(rows) if rows is not None and rows.axis < len(op.shape()) else None


def _random_wrap(op: Operation) -> Step | None:
    rows = op.rows()
    return Step(op.ins, (rows,)) if rows is not None and rows.axis < len(op.out) else None


def _bitcast(op: Operation) -> Step | None:
    rows, ranks = op.rows(), (len(op.shape()), len(op.out))
    return Step(op.ins, (rows,)) if rows is not None and rows.axis < min(ranks) else None


def _shown(op: Operation) -> Step | None:
    """Each replica prints what it has."""
    return Step(op.ins, ())


def _map_rows(op: Operation) -> Step | None:
    """A stage per environment: rows in, rows out, and what it shares the same everywhere."""
    first = op.params["shared"]
    rows = {x for x in op.ins[first:] if isinstance(x, Sharded)}
    shared = all(isinstance(x, Replicated) for x in op.ins[:first])
    if len(rows) != 1 or not shared:
        return None
    (row,) = rows
    if row.axis != 0:
        return None
    ins = (*op.ins[:first], *(row for _ in op.ins[first:]))
    return Step(ins, (row,) * len(op.equation.outvars))


def _has_rows(layouts: Sequence[Layout]) -> bool:
    return any(layout != REPLICATED for layout in layouts)


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _without("dimensions"),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "fft": _fft,
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "split": _split,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "reduce_sum": _reduced("sum"),
    "reduce_max": _reduced("max", but="c"),
    "reduce_min": _reduced("min", but="c"),
    "reduce_or": _reduced("max", but="iuV"),
    "reduce_and": _reduced("min", but="iuV"),
    "reduce": _without("dimensions"),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "argmax", "argmin"), _without("axes")),
    "dot_general": _dot,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"), _scatter
    ),
    **dict.fromkeys(
        ("scatter-min", "scatter_min", "scatter-max", "scatter_max", "scatter-sub"), _scatter
    ),
    "top_k": _top_k,
    "approx_top_k": _along("reduction_dimension"),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_max",
            "reduce_window_min",
            "reduce_window_sum",
            "select_and_scatter_add",
        ),
        _window,
    ),
    "select_and_gather_add": _window,
    **dict.fromkeys(
        ("cholesky", "lu", "qr", "geqrf", "eigh", "svd", "schur", "eig"),
        _batched(2),
    ),
    "triangular_solve": _triangular,
    "householder_product": _batched(2),
    "lu_pivots_to_permutation": _batched(1),
    **dict.fromkeys(("random_bits", "random_split", "random_unwrap"), _random_bits),
    "random_wrap": _random_wrap,
    "random_gamma": _random_gamma,
    "bitcast_convert_type": _bitcast,
    "shoal_map_rows": _map_rows,
    **dict.fromkeys(("debug_print", "debug_callback"), _shown),
}
