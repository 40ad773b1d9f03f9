"""JAX equations: their inner jaxprs, their source lines, and how to run one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from shoal.errors import is_core, short_place
from shoal.tracing.agree import agree_p, gather_p, scatter_p
from shoal.tracing.indexing import with_batch_axes
from shoal.tracing.stage import Mark, mark_of

_JAX = os.path.dirname(os.path.abspath(jax.__file__))
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_vmap_call",
    "composite",
    "call_hi_primitive",
)
_HOLDERS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


def inner(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr (and its constants) that a call-like equation or a scan holds."""
    if equation.primitive.name == "call_hi_primitive":
        return _expanded(equation)
    key = next((k for k in _HOLDERS if k in equation.params), None)
    return opened(equation.params[key]) if key else None


def _expanded(equation: Any) -> tuple[Any, Sequence[Any]]:
    """The expansion of a primitive that only newer versions of JAX have."""
    called = equation.params["_prim"]
    specs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]

    def flat(*args: Any) -> list[Any]:
        return jax.tree.leaves(called.expand(*jax.tree.unflatten(called.in_tree, args)))

    return opened(jax.make_jaxpr(flat)(*specs))


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, for all supported versions of JAX."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return with_batch_axes(jaxpr.jaxpr, jaxpr.consts), jaxpr.consts
    consts = tuple(getattr(jaxpr, "consts", ()))
    return with_batch_axes(jaxpr, consts), consts


def below(equation: Any) -> Iterator[Any]:
    """Every jaxpr that an equation holds, whatever its kind."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (jex.ClosedJaxpr, jex.Jaxpr)):
                yield opened(item)[0]


def equation_mark(equation: Any) -> Mark | None:
    """The mark of the stage that `equation` calls, if it calls one."""
    return mark_of(equation.params["name"]) if equation.primitive.name in ("jit", "pjit") else None


def holds(equation: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether `equation`, or any equation inside it, is `wanted`."""
    return wanted(equation) or any(
        holds(e, wanted) for jaxpr in below(equation) for e in jaxpr.eqns
    )


def is_agreement(equation: Any) -> bool:
    """Whether replicas agree in `equation`."""
    return equation.primitive in (agree_p, gather_p, scatter_p)


def is_stage(equation: Any) -> bool:
    """Whether `equation` calls a stage."""
    return equation_mark(equation) is not None


def place_of(equation: Any) -> str:
    """The user's source line that made `equation`."""
    traceback = equation.source_info.traceback
    if traceback is None:
        return ""
    frames = [f for f in traceback.frames if not f.file_name.startswith((_JAX, "<"))]
    own = [f for f in frames if not is_core(f.file_name)]
    chosen = (own or frames)[:1]
    return short_place(chosen[0].file_name, chosen[0].line_num) if chosen else ""


def scan_counts(equation: Any) -> tuple[int, int]:
    """How many constants and how many carried values a scan has.

    Versions of JAX write this down in different ways; the ranks of its values always show it: what
    is looped over or stacked has one axis more outside than inside.
    """
    jaxpr, _ = opened(equation.params["jaxpr"])
    looped = sum(_has_more_axes(*pair) for pair in zip(equation.invars, jaxpr.invars, strict=True))
    stacked = sum(_has_more_axes(*p) for p in zip(equation.outvars, jaxpr.outvars, strict=True))
    carried = len(equation.outvars) - stacked
    return len(equation.invars) - looped - carried, carried


def _has_more_axes(outer: Any, inner: Any) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def which_are_read(function: Callable[..., Any], *args: Any) -> list[bool]:
    """Which leaves of its arguments (arrays, or their specs) a function reads."""
    jaxpr, _ = opened(jax.make_jaxpr(function)(*args))
    read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
    read |= {id(v) for v in jaxpr.outvars}
    return [id(v) in read for v in jaxpr.invars]


def bind(equation: Any, args: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Run one equation on `args`, with some of its parameters replaced."""
    merged = equation.params | params if params else equation.params
    out = equation.primitive.bind(*args, **equation.primitive.get_bind_params(merged))
    return list(out) if equation.primitive.multiple_results else [out]
