"""Two operations that are kept whole in the trace: by row, and by block.

`map_rows` does the same for every row, each traced alone: rows can't mix, whatever is done to
them. `in_blocks` is a function of many samples that may be computed some samples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

map_rows_p = jex.Primitive("shoal_map_rows")
map_rows_p.multiple_results = True
in_blocks_p = jex.Primitive("shoal_in_blocks")
in_blocks_p.multiple_results = True


def map_rows(function: Callable[..., Any], rows: Any) -> Any:
    """`function` of every row of `rows`, which is a tuple of trees with a common first axis."""
    leaves, tree = jax.tree.flatten(rows)
    specs = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
    closed, shape = jax.make_jaxpr(
        lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True
    )(*specs)
    # What the function reads from around itself is the same for every row.
    alone = with_consts_first(closed)
    made = map_rows_p.bind(*closed.consts, *leaves, jaxpr=alone, shared=len(closed.consts))
    return jax.tree.unflatten(jax.tree.structure(shape), made)


def where_rarely(
    wanted: Any, function: Callable[..., Any], args: Sequence[Any], otherwise: Any
) -> Any:
    """`function(*args)` of one row where `wanted`, else `otherwise`.

    The same numbers as `jnp.where`, but nothing is computed while no row of a batch needs it.
    `function` may not read traced values from around itself: what rows share is an argument too.
    """

    def chosen(wanted: Any, args: Any, otherwise: Any) -> Any:
        made = function(*args)
        return jax.tree.map(lambda x, y: jnp.where(wanted, x, y), made, _like(made, otherwise))

    alone = custom_vmap(chosen)

    @alone.def_vmap
    def _(rows: int, batched: Any, wanted: Any, args: Any, otherwise: Any) -> Any:
        is_wanted_row, given, other = batched
        wanted, otherwise = jax.tree.map(
            lambda is_row, x: x if is_row else jnp.broadcast_to(x, (rows, *jnp.shape(x))),
            (is_wanted_row, other), (wanted, otherwise),
        )  # fmt: skip
        axes = (0, jax.tree.map(lambda is_row: 0 if is_row else None, given), 0)
        every = jax.vmap(chosen, axes, axis_size=rows)
        otherwise = _like(jax.eval_shape(every, wanted, args, otherwise), otherwise)
        made = lax.cond(
            jnp.any(wanted), every, lambda _, __, otherwise: otherwise, wanted, args, otherwise
        )
        return made, jax.tree.map(lambda _: True, made)

    return alone(wanted, tuple(args), otherwise)


def _like(wanted: Any, tree: Any) -> Any:
    """`tree` in the dtypes of `wanted`."""
    return jax.tree.map(lambda x, y: jnp.asarray(y, x.dtype), wanted, tree)


def with_consts_first(closed: Any) -> Any:
    """A closed jaxpr whose constants are its first arguments."""
    jaxpr = closed.jaxpr
    names = [f"const{i}" for i in range(len(jaxpr.constvars))]
    debug = jaxpr.debug_info
    if debug.arg_names is not None:
        debug = debug._replace(arg_names=(*names, *debug.arg_names))
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jex.ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars, debug_info=debug), ())


def _mapped(*args: Any, jaxpr: Any, shared: int) -> list[Any]:
    function = jex.jaxpr_as_fun(jaxpr)
    axes = (None,) * shared + (0,) * (len(args) - shared)
    if shared == len(args):
        return function(*args)
    return jax.vmap(function, axes)(*args)


def at_once(*args: Any, jaxpr: Any, **_: Any) -> list[Any]:
    """All samples together, as it was traced."""
    return jex.jaxpr_as_fun(jaxpr)(*args)


def take_apart(
    primitive: Any, impl: Callable[..., Any], batched: Callable[..., Any] | None = None
) -> None:
    """Derivatives and batches are of what the primitive does: it is kept whole no longer."""
    each = batched or impl
    # JAX takes apart what holds operations that it has no direct lowering for.
    primitive.to_lojax = each

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        dense = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(lambda *xs: impl(*xs, **params), tuple(primals), tuple(dense))

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        made = jax.vmap(lambda *xs: each(*xs, **params), tuple(dims))(*args)
        return made, (0,) * len(made)

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch


@map_rows_p.def_abstract_eval
def _map_spec(*args: Any, jaxpr: Any, shared: int) -> list[Any]:
    rows = args[shared].shape[0]
    return [x.update(shape=(rows, *x.shape)) for x in jaxpr.out_avals]


map_rows_p.def_impl(jax.jit(_mapped, static_argnames=("jaxpr", "shared")))
mlir.register_lowering(map_rows_p, mlir.lower_fun(_mapped, multiple_results=True))
take_apart(map_rows_p, _mapped)
