"""What replicas may do with a contribution so that it stays one: linear, or monotone, operations.

A rule answers for an operation of whose operands at least one is `Partial`; None: what comes out
is no contribution any more.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from shoal.graph.layout import Layout, Partial, Replicated
from shoal.tracing.steps import Operation, Step

_MOVES = frozenset(  # numbers change places, and nothing else
    {
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "dynamic_slice"),
        *("rev", "copy", "copy_p", "concatenate", "split", "name", "stack", "unstack", "tile"),
        *("dynamic_update_slice", "gather", "select_n", "stop_gradient"),
    }
)
_LINEAR = frozenset({"neg", "reduce_sum", "cumsum", "real", "imag", "conj", "reduce_window_sum"})
# Rising on all numbers: `sqrt` and `log` are not, for one replica's extreme may lie outside their
# domain where the extreme of all does not.
_RISING = frozenset({"exp", "expm1", "exp2", "tanh", "logistic", "floor", "ceil", "round", "sign"})
_RISING |= frozenset({"cbrt", "atan", "asinh", "erf"})
_SUMS_OF = 32  # bits of the whole numbers that sums are taken in; narrower ones wrap round early
_ROUNDED_TO = 16  # bits of the real numbers that parts may be rounded to; narrower ones are coarse
_OPPOSITE = {"max": "min", "min": "max"}


def partial_step(op: Operation) -> Step | None:
    """How an operation on contributions runs, if what it makes is a contribution too."""
    parts = {x for x in op.ins if isinstance(x, Partial)}
    others = [x for x in op.ins if not isinstance(x, Partial)]
    if len(parts) != 1 or not all(isinstance(x, Replicated) for x in others):
        return None
    (part,) = parts
    if part.how == "sum":
        found = _sums(op, part)
    else:
        found = None if _has_complex(op) else _extremes(op, part)
    return found or _moves(op, part)


def _moves(op: Operation, part: Partial) -> Step | None:
    """Operations that put numbers in other places, by what all replicas have."""
    kind = op.equation.primitive.name
    if kind not in _MOVES or (kind == "gather" and not _gathers_what_is_there(op)):
        return None
    data = {"dynamic_slice": 1, "gather": 1, "dynamic_update_slice": 2}.get(kind)
    if kind == "select_n":
        moved = (op.ins[0], *(part for _ in op.ins[1:]))
        return _made(op, moved, part) if isinstance(op.ins[0], Replicated) else None
    count = len(op.ins) if data is None else data
    if not all(isinstance(x, Replicated) for x in op.ins[count:]):
        return None
    return _made(op, (*(part for _ in op.ins[:count]), *op.ins[count:]), part)


def _made(op: Operation, ins: tuple[Layout, ...], out: Partial) -> Step:
    return Step(ins, (out,) * len(op.equation.outvars))


def _gathers_what_is_there(op: Operation) -> bool:
    """Whether nothing is filled in but NaNs or zeros: anything else would be summed up."""
    filled, value = "fill" in str(op.params.get("mode")).lower(), op.params.get("fill_value")
    is_nan = _is_inexact(op) and (value is None or np.isnan(value))
    return not filled or is_nan or (value is not None and value == 0)


def _sums(op: Operation, part: Partial) -> Step | None:
    kind, ins = op.equation.primitive.name, op.ins
    one = sum(isinstance(x, Partial) for x in ins) == 1
    linear = (
        kind in _LINEAR
        or (one and kind in ("mul", "dot_general", "conv_general_dilated"))
        or (one and kind == "div" and isinstance(ins[0], Partial) and _is_inexact(op))
        or kind == "convert_element_type"
        or (kind == "pad" and isinstance(ins[0], Partial) and _is_zero(op.equation.invars[1]))
    )
    if linear:
        return _made(op, ins, part) if _keeps_sums(op) else None
    if kind in ("add", "sub", "add_any"):
        return _made(op, (part,) * len(ins), part)
    if kind in ("scatter-add", "scatter_add", "scatter-sub") and isinstance(ins[1], Replicated):
        return _made(op, (part, ins[1], part), part)
    return None


def _extremes(op: Operation, part: Partial) -> Step | None:
    kind = op.equation.primitive.name
    if kind == f"reduce_{part.how}" or kind == part.how or kind in _RISING:
        return _made(op, op.ins, part)
    logical = {("max", "or"), ("max", "reduce_or"), ("min", "and"), ("min", "reduce_and")}
    if (part.how, kind) in logical and op.equation.outvars[0].aval.dtype == np.bool_:
        return _made(op, op.ins, part)
    if (kind == "neg" and _is_inexact(op)) or (
        kind == "not" and op.equation.outvars[0].aval.dtype == np.bool_
    ):  # the negative of a whole number may wrap round
        return _made(op, op.ins, Partial(_OPPOSITE[part.how], part.own))
    if kind == "convert_element_type" and _keeps_order(op):
        return _made(op, op.ins, part)
    one = sum(isinstance(x, Partial) for x in op.ins) == 1
    if (
        one
        and _is_inexact(op)
        and (kind == "add" or (kind == "sub" and isinstance(op.ins[0], Partial)))
    ):
        return _made(op, op.ins, part)
    return None


def _has_complex(op: Operation) -> bool:
    """Whether complex numbers are read, whose order no function keeps."""
    return any(jnp.issubdtype(x.aval.dtype, jnp.complexfloating) for x in op.equation.invars)


def _is_inexact(op: Operation) -> bool:
    return jnp.issubdtype(op.equation.outvars[0].aval.dtype, jnp.inexact)


def _keeps_sums(op: Operation) -> bool:
    """Whether the sum may be taken in the result's type: a sum that wraps round must wrap alike."""
    at = next(i for i, x in enumerate(op.ins) if isinstance(x, Partial))
    old, new = op.equation.invars[at].aval.dtype, op.equation.outvars[0].aval.dtype
    if jnp.issubdtype(old, jnp.inexact):
        return _is_wide(new)
    if old == np.bool_ or new == np.bool_:
        return False
    if jnp.issubdtype(new, jnp.inexact):  # a difference of unsigned numbers wraps round, too
        return old.kind == "i" and jnp.iinfo(old).bits >= _SUMS_OF and _is_wide(new)
    return jnp.iinfo(new).bits <= jnp.iinfo(old).bits


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= _ROUNDED_TO


def _widens(old: Any, new: Any) -> bool:
    return jnp.issubdtype(new, jnp.integer) and jnp.iinfo(new).bits >= jnp.iinfo(old).bits


def _keeps_order(op: Operation) -> bool:
    old, new = op.equation.invars[0].aval.dtype, op.equation.outvars[0].aval.dtype
    if jnp.issubdtype(new, jnp.floating):
        return _is_wide(new)
    if old == np.bool_:
        return not jnp.issubdtype(new, jnp.complexfloating)
    return jnp.issubdtype(old, jnp.integer) and _widens(old, new) and (old.kind == new.kind)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jex.Literal) and bool(np.all(np.asarray(atom.val) == 0))
