"""Reads `x[jnp.arange(n), i]` as what it means: every row is indexed by itself.

JAX gathers and scatters such indices in tuples, one of which counts the rows, so that any row seems
to be read by any other. Here the count becomes a batch axis, as `vmap` would have made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex

# The dimension numbers of each: axes taken away, those that indices are for, and batch axes.
_FIELDS = {
    "gather": ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims"),
    "scatter": (
        "inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims"
    ),
}  # fmt: skip
_MOST = 1 << 22  # entries of an index that is looked at
_REWRITTEN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def with_batch_axes(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """`jaxpr`, in which rows that are indexed by their own numbers are a batch axis."""
    if not any(_kind(e) for e in jaxpr.eqns):
        return jaxpr
    if jaxpr not in _REWRITTEN:
        _REWRITTEN[jaxpr] = _rewritten(jaxpr, dict(zip(jaxpr.constvars, consts, strict=False)))
    return _REWRITTEN[jaxpr] or jaxpr


def _kind(equation: Any) -> str:
    name = equation.primitive.name
    return "gather" if name == "gather" else "scatter" if name.startswith("scatter") else ""


def _rewritten(jaxpr: Any, consts: Mapping[Any, Any]) -> Any:
    """The jaxpr with batch axes; None if there are none."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    found = [_batched(e, makers, consts) for e in jaxpr.eqns]
    if not any(found):
        return None
    equations = [x for e, new in zip(jaxpr.eqns, found, strict=True) for x in (new or [e])]
    read = {v for e in equations for v in e.invars if not isinstance(v, jex.Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    joins = {id(makers[e.invars[1]]) for e, new in zip(jaxpr.eqns, found, strict=True) if new}
    unread = [e for e in equations if id(e) in joins and e.outvars[0] not in read]
    return jaxpr.replace(eqns=[e for e in equations if e not in unread])


def _batched(e: Any, makers: Mapping[Any, Any], consts: Mapping[Any, Any]) -> list[Any]:
    """A gather or scatter with a batch axis for each index that counts rows; empty if none do."""
    join = _kind(e) and not isinstance(e.invars[1], jex.Literal) and makers.get(e.invars[1])
    if not join or not _joins_columns(join):
        return []
    gone, index_map, batching = _FIELDS[_kind(e)]
    numbers, shape = e.params["dimension_numbers"], e.invars[0].aval.shape
    pairs = dict(zip(numbers.operand_batching_dims, getattr(numbers, batching), strict=True))
    columns = dict(zip(getattr(numbers, index_map), join.invars, strict=True))
    for axis in [axis for axis in columns if axis in getattr(numbers, gone)]:
        counted = _counted_axis(_constant(columns[axis], makers, consts), shape[axis])
        if counted is not None and counted not in pairs.values() and len(columns) > 1:
            pairs[axis] = counted
            del columns[axis]
    if len(columns) == len(join.invars):
        return []
    pairs = dict(sorted(pairs.items()))
    changed = numbers._replace(
        **{
            gone: tuple(axis for axis in getattr(numbers, gone) if axis not in pairs),
            index_map: tuple(columns),
            "operand_batching_dims": tuple(pairs),
            batching: tuple(pairs.values()),
        }
    )
    operand, _, *updates = e.invars
    before, indices = _joined(list(columns.values()))
    params = {**e.params, "dimension_numbers": changed}
    return [*before, e.replace(invars=[operand, indices, *updates], params=params)]


def _joins_columns(equation: Any) -> bool:
    """Whether an equation joins indices, one of each kind, along the last axis."""
    last = len(equation.outvars[0].aval.shape) - 1
    is_join = equation.primitive.name == "concatenate" and equation.params["dimension"] == last
    return is_join and all(v.aval.shape[-1] == 1 for v in equation.invars)


def _joined(columns: list[Any]) -> tuple[list[Any], Any]:
    """The equation that joins the remaining indices, if it takes one, and the joined indices."""
    if len(columns) == 1:
        return [], columns[0]
    specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in columns]
    join = jax.make_jaxpr(lambda *xs: lax.concatenate(xs, xs[0].ndim - 1))(*specs).jaxpr.eqns[0]
    return [join.replace(invars=columns)], join.outvars[0]


def _counted_axis(index: np.ndarray | None, size: int) -> int | None:
    """The axis along which an index is 0 to `size` - 1, everywhere alike."""
    if index is None or size == 1:
        return None
    for axis in range(index.ndim - 1):
        count = np.arange(size).reshape(*(-1 if i == axis else 1 for i in range(index.ndim)))
        if index.shape[axis] == size and np.array_equal(index, np.broadcast_to(count, index.shape)):
            return axis
    return None


def _constant(atom: Any, makers: Mapping[Any, Any], consts: Mapping[Any, Any]) -> Any:
    """The value of what depends on numbers alone; None if it isn't known, or too large."""
    if isinstance(atom, jex.Literal):
        return np.asarray(atom.val)
    if np.prod(atom.aval.shape) > _MOST or not np.issubdtype(atom.aval.dtype, np.generic):
        return None
    if atom in consts:
        return np.asarray(consts[atom])
    e = makers.get(atom)
    rule = None if e is None else _VALUES.get(e.primitive.name)
    if e is None or rule is None:
        return None
    args = [_constant(x, makers, consts) for x in e.invars]
    return None if any(x is None for x in args) else rule(e.outvars[0].aval, e.params, *args)


def _iota(aval: Any, params: Mapping[str, Any]) -> np.ndarray:
    axis = params["dimension"]
    count = np.arange(aval.shape[axis], dtype=aval.dtype)
    return np.broadcast_to(count.reshape(-1, *[1] * (len(aval.shape) - axis - 1)), aval.shape)


def _spread(aval: Any, params: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    sides = dict(zip(params["broadcast_dimensions"], x.shape, strict=True))
    return np.broadcast_to(x.reshape([sides.get(i, 1) for i in range(len(aval.shape))]), aval.shape)


_VALUES: dict[str, Callable[..., Any]] = {
    "iota": _iota,
    "broadcast_in_dim": _spread,
    "reshape": lambda aval, params, x: x.reshape(aval.shape),
    "squeeze": lambda aval, params, x: x.reshape(aval.shape),
    "convert_element_type": lambda aval, params, x: x.astype(aval.dtype),
    "lt": lambda aval, params, x, y: np.less(x, y),
    "add": lambda aval, params, x, y: np.add(x, y, dtype=aval.dtype),
    "select_n": lambda aval, params, which, *cases: np.choose(which, cases),
}
