"""How replicas of a whole-batch stage agree: `mean` and `gather`, one primitive each.

With one replica both are the identity. Lowering replaces them by JAX's own collectives where a
fragment has several replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")
_replicas: ContextVar[int] = ContextVar("replicas", default=1)


@contextmanager
def tracing_for(replicas: int) -> Iterator[None]:
    """Trace as one of `replicas` replicas sees it, so that gathered shapes are right."""
    token = _replicas.set(replicas)
    try:
        yield
    finally:
        _replicas.reset(token)


def traced_replicas() -> int:
    """How many replicas the trace under way is for."""
    return _replicas.get()


def mean(tree: T) -> T:
    """The mean of `tree` over the replicas that run this stage."""
    leaves, structure = jax.tree.flatten(tree)
    # All leaves in one equation: one exchange between replicas.
    return jax.tree.unflatten(structure, mean_p.bind(*map(jnp.asarray, leaves)))


def gather(tree: T, axis: int = 0) -> T:
    """The rows of all replicas, in the order of the environments, along `axis`."""
    replicas = _replicas.get()
    return jax.tree.map(lambda x: gather_p.bind(x, axis=axis, replicas=replicas), tree)


mean_p = Primitive("shoal_mean")
mean_p.multiple_results = True
gather_p = Primitive("shoal_gather")


@gather_p.def_abstract_eval
def _gather_spec(x: Any, *, axis: int, replicas: int) -> Any:
    shape = (*x.shape[:axis], x.shape[axis] * replicas, *x.shape[axis + 1 :])
    return x.update(shape=shape)


def _gather_alone(x: Any, *, axis: int, replicas: int) -> Any:
    assert replicas == 1, "a gather between replicas is lowered to a collective"
    return x


def _batch_gather(args: Any, dims: Any, *, axis: int, replicas: int) -> tuple[Any, Any]:
    (x,), (d,) = args, dims
    moved = jnp.moveaxis(x, d, 0)
    return gather_p.bind(moved, axis=axis + 1, replicas=replicas), 0


def _mean_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return mean_p.bind(*primals), mean_p.bind(*map(ad.instantiate_zeros, tangents))


mean_p.def_abstract_eval(lambda *xs: list(xs))
mean_p.def_impl(lambda *xs: list(xs))
gather_p.def_impl(_gather_alone)
mlir.register_lowering(mean_p, mlir.lower_fun(lambda *xs: list(xs), multiple_results=True))
mlir.register_lowering(gather_p, mlir.lower_fun(_gather_alone, multiple_results=False))
# A mean is linear, and its own transpose.
ad.primitive_jvps[mean_p] = _mean_tangents
ad.primitive_transposes[mean_p] = lambda cts, *xs: mean_p.bind(*map(ad.instantiate_zeros, cts))
batching.primitive_batchers[mean_p] = lambda args, dims: (mean_p.bind(*args), dims)
batching.primitive_batchers[gather_p] = _batch_gather
