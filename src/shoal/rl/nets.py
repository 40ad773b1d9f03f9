"""Networks as plain pytrees: a function that makes the parameters, a function that applies them."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Dense(NamedTuple):
    """x ↦ x W + b."""

    weight: jax.Array
    bias: jax.Array


Layers = tuple[Dense, ...]


def init_mlp(
    key: jax.Array, sizes: Sequence[int], last_scale: float = 1.0, scale: float = 2**0.5
) -> Layers:
    """Layers from sizes[0] inputs to sizes[-1] outputs, with scaled orthogonal weights."""
    keys = jax.random.split(key, len(sizes) - 1)
    scales = [scale] * (len(sizes) - 2) + [last_scale]
    shapes = pairwise(sizes)
    return tuple(
        Dense(jax.nn.initializers.orthogonal(scale)(key, shape), jnp.zeros(shape[1]))
        for key, shape, scale in zip(keys, shapes, scales, strict=True)
    )


def mlp(
    layers: Layers, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jnp.tanh
) -> jax.Array:
    """Dense layers with `activation` between them."""
    *hidden, last = layers
    for layer in hidden:
        x = activation(x @ layer.weight + layer.bias)
    return x @ last.weight + last.bias
