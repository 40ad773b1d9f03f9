"""Which JAX operations keep the rows of the environments apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

import numpy as np
from jax.extend import core as jex

from shoal.tracing.agree import gather_p, mean_p
from shoal.tracing.jaxprs import CALLS, below, inner, is_stage, opened, scan_counts


class Rowless(Enum):
    """What is known of a value without rows: see `shoal.tracing.rows`."""

    SAME = "same"
    PART = "part"


SAME: Final = Rowless.SAME
PART: Final = Rowless.PART
State = int | Rowless  # the axis of the rows, or why there are none

_MOST_TURNS = 16
_ELEMENTWISE = frozenset(
    {
        *("abs", "neg", "sign", "conj", "real", "imag"),
        *("add", "add_any", "sub", "mul", "div", "rem"),
        *("pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt"),
        *("exp", "exp2", "expm1", "log", "log1p", "logistic"),
        *("digamma", "lgamma", "erf", "erf_inv", "erfc"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        *("min", "max", "clamp", "floor", "ceil", "round", "nextafter", "is_finite"),
        *("eq", "ne", "ge", "gt", "le", "lt", "select_n", "and", "or", "xor", "not"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
        *("clz", "population_count", "reduce_precision"),
        *("copy", "copy_p", "convert_element_type", "bitcast_convert_type"),
        *("name", "stop_gradient"),
        *("random_bits", "random_clone", "random_fold_in", "random_split"),
        *("random_unwrap", "random_wrap", "threefry2x32"),
    }
)


def join(a: State, b: State) -> State:
    """What is known of a value that comes from either of two places."""
    return a if a == b else PART


def inside(state: State) -> State:
    """The state of one slice along the first axis; rows can't be sliced apart."""
    if not isinstance(state, int):
        return state
    return state - 1 if state > 0 else PART


def outside(state: State) -> State:
    """The state of slices stacked along a new first axis."""
    return state + 1 if isinstance(state, int) else state


def flow(narrow: Any, wide: Any, ins: Sequence[State], drawn: list[Any]) -> list[State]:
    """The states of what an equation writes; draws from keys that replicas share go to `drawn`."""
    agrees = narrow.primitive in (mean_p, gather_p)
    if PART in ins and not agrees and not any(True for _ in below(narrow)):
        return [PART] * len(narrow.outvars)
    states = _by_kind(narrow, wide, ins, drawn)
    # Batched by vmap, operations have axes that are NumPy's integers.
    states = [int(s) if isinstance(s, np.integer) else s for s in states]
    checked = [
        _check(s, n.aval, w.aval)
        for s, n, w in zip(states, narrow.outvars, wide.outvars, strict=True)
    ]
    random = narrow.primitive.name.startswith("random_")
    if random and all(s == SAME for s in ins) and PART in checked:
        drawn.append(narrow)
    return checked


def _by_kind(narrow: Any, wide: Any, ins: Sequence[State], drawn: list[Any]) -> list[State]:
    if control := _CONTROL.get(narrow.primitive.name):
        return control(narrow, wide, ins, drawn)
    if narrow.primitive.name in CALLS and (one := inner(narrow)) and (two := inner(wide)):
        below_it: list[Any] = []
        states = flow_jaxpr(one[0], two[0], ins, below_it)
        # JAX traces its own functions once for all callers: only the call knows the user's line.
        drawn += below_it if is_stage(narrow) or not below_it else [narrow]
        return states
    return _plain(narrow, wide, ins)


def _plain(narrow: Any, wide: Any, ins: Sequence[State]) -> list[State]:
    """The states of what an equation without a jaxpr inside writes."""
    kind, outs = narrow.primitive.name, len(narrow.outvars)
    moved = [_moved(n.aval, w.aval) for n, w in zip(narrow.outvars, wide.outvars, strict=True)]
    if narrow.primitive is mean_p:
        return [PART if axes else SAME for axes in moved]
    if narrow.primitive is gather_p:
        return [SAME if ins[0] == narrow.params["axis"] else PART]
    if all(s == SAME for s in ins):
        given = [_moved(n.aval, w.aval) for n, w in zip(narrow.invars, wide.invars, strict=True)]
        gathered = kind in _ELEMENTWISE and moved[0] in given
        return [SAME if gathered else _spread(kind, axes) for axes in moved]
    if kind in _ELEMENTWISE:
        return [_meet(ins)] * outs
    rule = _RULES.get(kind)
    return [rule(narrow, ins)] * outs if rule else [PART] * outs


def flow_jaxpr(narrow: Any, wide: Any, ins: Sequence[State], drawn: list[Any]) -> list[State]:
    """The states of what a jaxpr returns; nothing is known of one that isn't the same twice."""
    if [e.primitive for e in narrow.eqns] != [e.primitive for e in wide.eqns]:
        return [PART] * len(narrow.outvars)
    known: dict[Any, State] = dict(zip(narrow.invars, ins, strict=True))
    known |= dict.fromkeys(narrow.constvars, SAME)

    def state(a: Any, b: Any) -> State:
        if isinstance(a, jex.Literal):
            return SAME if same_number(a.val, b.val) else PART
        return known[a]

    for one, two in zip(narrow.eqns, wide.eqns, strict=True):
        seen = [state(a, b) for a, b in zip(one.invars, two.invars, strict=True)]
        known.update(zip(one.outvars, flow(one, two, seen, drawn), strict=True))
    return [state(a, b) for a, b in zip(narrow.outvars, wide.outvars, strict=True)]


def _scan(narrow: Any, wide: Any, ins: Sequence[State], drawn: list[Any]) -> list[State]:
    (one, _), (two, _) = opened(narrow.params["jaxpr"]), opened(wide.params["jaxpr"])
    n_const, n_carry = scan_counts(narrow)
    consts, carry, xs = (
        ins[:n_const],
        list(ins[n_const : n_const + n_carry]),
        ins[n_const + n_carry :],
    )
    rows = [inside(x) for x in xs]
    outs: list[State] = []
    for _ in range(_MOST_TURNS):
        outs = flow_jaxpr(one, two, [*consts, *carry, *rows], drawn)
        after = [join(a, b) for a, b in zip(carry, outs[:n_carry], strict=True)]
        if after == carry:
            break
        carry = after
    return [*carry, *map(outside, outs[n_carry:])]


def _while(narrow: Any, wide: Any, ins: Sequence[State], drawn: list[Any]) -> list[State]:
    n_test, n_body = narrow.params["cond_nconsts"], narrow.params["body_nconsts"]
    test, consts, carry = ins[:n_test], ins[n_test : n_test + n_body], list(ins[n_test + n_body :])
    tests, bodies = (
        (opened(narrow.params[key])[0], opened(wide.params[key])[0])
        for key in ("cond_jaxpr", "body_jaxpr")
    )
    for _ in range(_MOST_TURNS):
        if flow_jaxpr(*tests, [*test, *carry], drawn) != [SAME]:
            return [PART] * len(carry)
        outs = flow_jaxpr(*bodies, [*consts, *carry], drawn)
        after = [join(a, b) for a, b in zip(carry, outs, strict=True)]
        if after == carry:
            break
        carry = after
    return carry


def _cond(narrow: Any, wide: Any, ins: Sequence[State], drawn: list[Any]) -> list[State]:
    if ins[0] != SAME:
        return [PART] * len(narrow.outvars)
    pairs = zip(narrow.params["branches"], wide.params["branches"], strict=True)
    found = [flow_jaxpr(opened(a)[0], opened(b)[0], ins[1:], drawn) for a, b in pairs]
    return [s[0] if len(set(s)) == 1 else PART for s in zip(*found, strict=True)]


def _meet(ins: Sequence[State]) -> State:
    rows = {s for s in ins if s != SAME}
    return rows.pop() if len(rows) == 1 else SAME if not rows else PART


def _spread(kind: str, moved: list[int]) -> State:
    """What comes of equal inputs: equal outputs, or one number repeated for every environment."""
    if not moved:
        return SAME
    return moved[0] if kind in ("broadcast_in_dim", "empty") and len(moved) == 1 else PART


def _check(state: State, narrow: Any, wide: Any) -> State:
    """Rows must be the one axis along which the two shapes differ."""
    return PART if isinstance(state, int) and _moved(narrow, wide) != [state] else state


def _moved(narrow: Any, wide: Any) -> list[int]:
    pairs = zip(narrow.shape, wide.shape, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a != b]


def same_number(a: Any, b: Any) -> bool:
    """Whether two constants of the loop are equal."""
    try:
        return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    except TypeError:  # keys and other extended dtypes
        return a is b


def _shape(equation: Any, index: int = 0) -> tuple[int, ...]:
    return equation.invars[index].aval.shape


def _broadcast(e: Any, ins: Sequence[State]) -> State:
    return e.params["broadcast_dimensions"][ins[0]] if isinstance(ins[0], int) else PART


def _reshape(e: Any, ins: Sequence[State]) -> State:
    if not isinstance(ins[0], int) or e.params["dimensions"] is not None:
        return PART
    shape, axis = _shape(e), ins[0]
    before = int(np.prod(shape[:axis]))
    out = e.outvars[0].aval.shape
    fits = [i for i, n in enumerate(out) if n == shape[axis] and int(np.prod(out[:i])) == before]
    return fits[-1] if fits else PART


def _axis(ins: Sequence[State]) -> int:
    """The axis of the first operand; the rules that ask are for operands with rows."""
    assert isinstance(ins[0], int)
    return ins[0]


def _transpose(e: Any, ins: Sequence[State]) -> State:
    return list(e.params["permutation"]).index(_axis(ins))


def _expand(e: Any, ins: Sequence[State]) -> State:
    kept = [i for i in range(len(e.outvars[0].aval.shape)) if i not in e.params["dimensions"]]
    return kept[_axis(ins)]


def _without(key: str) -> Callable[[Any, Sequence[State]], State]:
    """Operations that take the named axes away keep rows that lie along another."""

    def rule(e: Any, ins: Sequence[State]) -> State:
        gone, axis = e.params[key], _axis(ins)
        return PART if axis in gone else axis - sum(a < axis for a in gone)

    return rule


def _along(key: str) -> Callable[[Any, Sequence[State]], State]:
    """Operations along one named axis keep rows that lie along another."""

    def rule(e: Any, ins: Sequence[State]) -> State:
        axis = _meet(ins)
        along = e.params[key]
        return PART if axis in (along if isinstance(along, (tuple, list)) else (along,)) else axis

    return rule


def _stack(e: Any, ins: Sequence[State]) -> State:
    axis = _meet(ins)
    return axis + (e.params["axis"] <= axis) if isinstance(axis, int) else PART


def _whole_slice(e: Any, ins: Sequence[State]) -> State:
    """Slices, static or dynamic, keep rows that they take whole."""
    axis = ins[0]
    if not isinstance(axis, int) or any(isinstance(s, int) for s in ins[1:]):
        return PART
    return axis if e.outvars[0].aval.shape[axis] == _shape(e)[axis] else PART


def _update_slice(e: Any, ins: Sequence[State]) -> State:
    axis = _meet(ins[:2])
    whole = isinstance(axis, int) and _shape(e, 0)[axis] == _shape(e, 1)[axis]
    return axis if whole and all(s == SAME for s in ins[2:]) and ins[0] == axis else PART


def _pad(e: Any, ins: Sequence[State]) -> State:
    axis, filling = ins
    if not isinstance(axis, int) or filling != SAME:
        return PART
    return axis if e.params["padding_config"][axis] == (0, 0, 0) else PART


def _dot(e: Any, ins: Sequence[State]) -> State:
    (contract_l, contract_r), (batch_l, batch_r) = e.params["dimension_numbers"]
    left, right = ins
    if isinstance(left, int) and isinstance(right, int):
        both = (
            left in batch_l
            and right in batch_r
            and list(batch_l).index(left) == list(batch_r).index(right)
        )
        return list(batch_l).index(left) if both else PART
    axis, contract, batch, first = (
        (left, contract_l, batch_l, 0)
        if isinstance(left, int)
        else (_axis(ins[1:]), contract_r, batch_r, 1)
    )
    if axis in contract or axis in batch:
        return PART
    free = [i for i in range(len(_shape(e, first))) if i not in contract and i not in batch]
    skipped = len(batch) + (len(_shape(e, 0)) - len(contract_l) - len(batch_l) if first else 0)
    return skipped + free.index(axis)


def _gather(e: Any, ins: Sequence[State]) -> State:
    numbers, (operand, indices) = e.params["dimension_numbers"], ins
    offsets = list(numbers.offset_dims)
    rank = len(e.outvars[0].aval.shape)
    batch = [i for i in range(rank) if i not in offsets]
    if isinstance(operand, int) and operand in numbers.operand_batching_dims:
        pair = numbers.start_indices_batching_dims[
            list(numbers.operand_batching_dims).index(operand)
        ]
        return batch[pair] if indices == pair else PART
    if operand == SAME and isinstance(indices, int) and indices < len(_shape(e, 1)) - 1:
        return batch[indices]
    if isinstance(operand, int) and indices == SAME:
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [i for i in range(len(_shape(e))) if i not in gone]
        whole = e.params["slice_sizes"][operand] == _shape(e)[operand]
        return offsets[kept.index(operand)] if operand in kept and whole else PART
    return PART


def _top_k(e: Any, ins: Sequence[State]) -> State:
    return ins[0] if ins[0] != len(_shape(e)) - 1 else PART


_RULES: dict[str, Callable[[Any, Sequence[State]], State]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _without("dimensions"),
    "expand_dims": _expand,
    "slice": _whole_slice,
    "dynamic_slice": _whole_slice,
    "dynamic_update_slice": _update_slice,
    "pad": _pad,
    "concatenate": _along("dimension"),
    "stack": _stack,
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "split": _along("axis"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
            *("argmax", "argmin"),
        ),
        _without("axes"),
    ),
    "dot_general": _dot,
    "gather": _gather,
    "top_k": _top_k,
}

_CONTROL: dict[str, Callable[[Any, Any, Sequence[State], list[Any]], list[State]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
