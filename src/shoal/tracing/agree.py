"""How replicas of a stage agree: means, sums, extremes, and all rows; a primitive each.

In the loop itself, and with one replica, all of them are the identity (or an ordinary sum). The
program of a replica is derived from the loop's; there they become JAX's own collectives.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shoal.errors import TraceError

T = TypeVar("T")
# The stage whose rows are traced one by one, if one is.
per_env: ContextVar[str] = ContextVar("per_env", default="")


def mean(tree: T, *, approximate: bool = False) -> T:
    """The mean over all environments, where each replica has the mean over its own.

    Any sum, mean or gradient over all environments is allowed, and anything linear in one. With
    `approximate=True` it may be anything that a replica computes from its own environments: the
    replicas' mean is taken, which need not be what one replica with all environments computes.
    """
    return _agree(tree, "mean", approximate=approximate)


def sum(tree: T) -> T:
    """The sum over all environments, where each replica has the sum over its own."""
    return _agree(tree, "sum")


def max(tree: T) -> T:
    """The maximum over all environments, where each replica has the maximum over its own."""
    return _agree(tree, "max")


def min(tree: T) -> T:
    """The minimum over all environments, where each replica has the minimum over its own."""
    return _agree(tree, "min")


def weighted_mean(x: Any, weight: Any, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """The mean of `x` by `weight` over all environments: sum(x * weight) / sum(weight).

    `weight` has the shape of `x`, or can be broadcast to it; it may be a mask. 0 where all is 0.
    """
    x = jnp.asarray(x)
    weight = jnp.broadcast_to(jnp.asarray(weight).astype(_inexact(x)), x.shape)
    total, weights = sum((jnp.sum(x * weight, axis), jnp.sum(weight, axis)))
    return total / jnp.where(weights == 0, 1, weights)


def moments(x: Any, axis: int | tuple[int, ...] | None = None) -> tuple[jax.Array, jax.Array]:
    """The mean and the variance of `x` over all environments and the other axes in `axis`."""
    x = jnp.asarray(x).astype(_inexact(jnp.asarray(x)))
    center = mean(jnp.mean(x, axis, keepdims=True))
    spread = mean(jnp.mean((x - center) ** 2, axis))
    return center.reshape(spread.shape), spread


def gather(tree: T, axis: int = 0) -> T:
    """The rows of all replicas, in the order of the environments, along `axis`."""
    return jax.tree.map(lambda x: _rows(gather_p, x, axis), tree)


def scatter(tree: T, axis: int = 0) -> T:
    """A replica's own rows of what all replicas have whole: the inverse of `gather`."""
    return jax.tree.map(lambda x: _rows(scatter_p, x, axis), tree)


def _agree(tree: Any, how: str, *, approximate: bool = False) -> Any:
    _refuse_inside(how)
    leaves, structure = jax.tree.flatten(tree)
    # All leaves in one equation: one exchange between replicas.
    made = agree_p.bind(*map(jnp.asarray, leaves), how=how, approximate=approximate)
    return jax.tree.unflatten(structure, made)


def _rows(primitive: Any, x: Any, axis: int) -> Any:
    _refuse_inside(primitive.name.removeprefix("shoal_"))
    x = jnp.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise TraceError(
            f"shoal.{primitive.name.removeprefix('shoal_')} along axis {axis} "
            f"of an array of shape {x.shape}",
            "Name one of its axes.",
        )
    return primitive.bind(x, axis=axis % x.ndim)


def _refuse_inside(how: str) -> None:
    if stage := per_env.get():
        raise TraceError(
            f"shoal.{how} is called inside stage `{stage}`, which sees one environment at a time",
            f"Call it outside `{stage}`, on what has a row for every environment "
            "or was made from all of them.",
        )


def _inexact(x: Any) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32


agree_p = Primitive("shoal_agree")
agree_p.multiple_results = True
gather_p = Primitive("shoal_gather")
scatter_p = Primitive("shoal_scatter")


def _agree_tangents(primals: Any, tangents: Any, *, how: str, approximate: bool) -> Any:
    params = dict(how="mean" if how == "mean" else "sum", approximate=approximate)
    made = agree_p.bind(*map(ad.instantiate_zeros, tangents), **params)
    return agree_p.bind(*primals, how=how, approximate=approximate), made


def _agree_transposed(cts: Any, *xs: Any, how: str, approximate: bool) -> Any:
    return agree_p.bind(*map(ad.instantiate_zeros, cts), how=how, approximate=approximate)


agree_p.def_abstract_eval(lambda *xs, **_: list(xs))
agree_p.def_impl(lambda *xs, **_: list(xs))
mlir.register_lowering(agree_p, mlir.lower_fun(lambda *xs, **_: list(xs), multiple_results=True))
ad.primitive_jvps[agree_p] = _agree_tangents
# In the loop it is the identity. Where replicas each use what they agreed on, what comes back is
# each one's contribution, to be summed; where it is the same everywhere, it stays.
ad.primitive_transposes[agree_p] = _agree_transposed
batching.primitive_batchers[agree_p] = lambda args, dims, **params: (
    agree_p.bind(*args, **params),
    dims,
)


def _register(primitive: Any, inverse: Any) -> None:
    primitive.def_abstract_eval(lambda x, **_: x)
    primitive.def_impl(lambda x, **_: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x, **_: x, multiple_results=False))

    def batch(args: Any, dims: Any, *, axis: int) -> tuple[Any, Any]:
        moved = jnp.moveaxis(args[0], dims[0], 0)
        return primitive.bind(moved, axis=axis + 1), 0

    ad.deflinear2(primitive, lambda ct, _, *, axis: [_linear(inverse, ct, axis)])
    batching.primitive_batchers[primitive] = batch


def _linear(primitive: Any, ct: Any, axis: int) -> Any:
    return ct if type(ct) is ad.Zero else primitive.bind(ct, axis=axis)


_register(gather_p, scatter_p)
_register(scatter_p, gather_p)
