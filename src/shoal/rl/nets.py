"""Networks as plain pytrees: a function that makes the parameters, a function that applies them."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Dense(NamedTuple):
    """The parameters of x ↦ x W + b."""

    weight: jax.Array
    bias: jax.Array


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


@jax.custom_vjp
def dense(layer: Dense, x: jax.Array) -> jax.Array:
    """One dense layer, whose gradient takes the way that is fast on the machine at hand."""
    return x @ layer.weight + layer.bias


def _forward(layer: Dense, x: jax.Array) -> tuple[jax.Array, tuple[Dense, jax.Array]]:
    return dense(layer, x), (layer, x)


def _backward(saved: tuple[Dense, jax.Array], slope: jax.Array) -> tuple[Dense, jax.Array]:
    layer, x = saved
    rows, slopes = (a.reshape(-1, a.shape[-1]) for a in (x, slope))
    weight = lax.platform_dependent(
        rows, slopes, cpu=_weight_slope_on_cpu, default=lambda rows, slopes: rows.T @ slopes
    )
    return Dense(weight, jnp.sum(slopes, axis=0)), slope @ layer.weight.T


def _weight_slope_on_cpu(rows: jax.Array, slopes: jax.Array) -> jax.Array:
    """rowsᵀ slopes, which XLA's CPU backend is slow at as it stands, and the more so if narrow."""
    if slopes.shape[1] <= 4:
        return jnp.stack([slope @ rows for slope in slopes.T], axis=1)
    # The barrier keeps XLA from folding the transpose back into the product.
    return lax.optimization_barrier(rows.T) @ slopes


dense.defvjp(_forward, _backward)
