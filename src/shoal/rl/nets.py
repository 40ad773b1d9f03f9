"""Networks as plain pytrees: a function that makes the parameters, a function that applies them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shoal.errors import UnknownNameError

COMPUTE = ("float32", "bfloat16")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Dense:
    """The parameters of x ↦ x W + b, and the type of number that the product is computed in.

    Parameters, sums and results are float32 whatever that is.
    """

    weight: jax.Array
    bias: jax.Array
    compute: str = field(default="float32", metadata={"static": True})


Layers = tuple[Dense, ...]


def init_mlp(
    key: jax.Array, sizes: Sequence[int], last_scale: float = 1.0, scale: float = 2**0.5
) -> Layers:
    """Layers from sizes[0] inputs to sizes[-1] outputs, with scaled orthogonal weights."""
    keys = jax.random.split(key, len(sizes) - 1)
    scales = [scale] * (len(sizes) - 2) + [last_scale]
    return tuple(
        Dense(jax.nn.initializers.orthogonal(scale)(key, shape), jnp.zeros(shape[1]))
        for key, shape, scale in zip(keys, pairwise(sizes), scales, strict=True)
    )


def mlp(
    layers: Layers, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jnp.tanh
) -> jax.Array:
    """Dense layers with `activation` between them."""
    *hidden, last = layers
    for layer in hidden:
        x = activation(dense(layer, x))
    return dense(last, x)


def computed_in(params: Any, compute: str) -> Any:
    """The same parameters, with their layers' products computed in "bfloat16" or "float32"."""
    if compute not in COMPUTE:
        raise UnknownNameError("type to compute in", compute, COMPUTE)

    def change(x: Any) -> Any:
        return replace(x, compute=compute) if isinstance(x, Dense) else x

    return jax.tree.map(change, params, is_leaf=lambda x: isinstance(x, Dense))


@jax.custom_vjp
def dense(layer: Dense, x: jax.Array) -> jax.Array:
    """One dense layer, whose gradient takes the way that is fast on the machine at hand."""
    return multiply(x, layer.weight, layer.compute) + layer.bias


def multiply(a: jax.Array, b: jax.Array, compute: str) -> jax.Array:
    """`a @ b` from numbers rounded to `compute`, summed up in float32."""
    if compute == "float32":
        return a @ b
    low = jnp.dtype(compute)
    return jnp.matmul(a.astype(low), b.astype(low), preferred_element_type=jnp.float32)


def _forward(layer: Dense, x: jax.Array) -> tuple[jax.Array, tuple[Dense, jax.Array]]:
    return dense(layer, x), (layer, x)


def _backward(saved: tuple[Dense, jax.Array], slope: jax.Array) -> tuple[Dense, jax.Array]:
    layer, x = saved
    rows, slopes = (a.reshape(-1, a.shape[-1]) for a in (x, slope))
    if layer.compute == "float32":
        weight = lax.platform_dependent(
            rows, slopes, cpu=_weight_slope_on_cpu, default=lambda rows, slopes: rows.T @ slopes
        )
    else:
        weight = multiply(rows.T, slopes, layer.compute)
    slope_of_x = multiply(slope, layer.weight.T, layer.compute)
    return replace(layer, weight=weight, bias=jnp.sum(slopes, axis=0)), slope_of_x


def _weight_slope_on_cpu(rows: jax.Array, slopes: jax.Array) -> jax.Array:
    """rowsᵀ slopes, which XLA's CPU backend is slow at as it stands, and the more so if narrow."""
    if slopes.shape[1] <= 4:
        return jnp.stack([slope @ rows for slope in slopes.T], axis=1)
    # The barrier keeps XLA from folding the transpose back into the product.
    return lax.optimization_barrier(rows.T) @ slopes


dense.defvjp(_forward, _backward)
