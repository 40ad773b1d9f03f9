"""Networks as plain pytrees: a function that makes the parameters, a function that applies them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shoal.errors import UnknownNameError

COMPUTE = ("float32", "bfloat16")


class Style(NamedTuple):
    """What follows each hidden layer's product."""

    activation: str = "tanh"  # a function of jax.nn
    layer_norm: bool = False  # before the activation (Ba et al., 2016)


TANH, RELU = Style(), Style("relu")


class Norm(NamedTuple):
    """The parameters of layer normalisation."""

    scale: jax.Array
    offset: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Dense:
    """The parameters of x ↦ x W + b, and the type of number that the product is computed in.

    Parameters, sums and results are float32 whatever that is. A hidden layer also has what follows.
    """

    weight: jax.Array
    bias: jax.Array
    norm: Any = ()  # Norm, or () without
    compute: str = field(default="float32", metadata={"static": True})
    activation: str = field(default="tanh", metadata={"static": True})


Layers = tuple[Dense, ...]


def style_of(settings: Any) -> Style:
    """The style that an algorithm's settings say."""
    return Style(settings.activation, settings.layer_norm)


def init_mlp(
    key: jax.Array,
    sizes: Sequence[int],
    last_scale: float = 1.0,
    style: Style = TANH,
) -> Layers:
    """Layers from sizes[0] inputs to sizes[-1] outputs, with scaled orthogonal weights."""
    *hidden, last = init_hidden(key, sizes, style, last_scale)
    return (*hidden, replace(last, norm=()))


def init_hidden(
    key: jax.Array, sizes: Sequence[int], style: Style, last_scale: float = 2**0.5
) -> Layers:
    """The same, where the last layer is a hidden one too."""
    keys = jax.random.split(key, len(sizes) - 1)
    scales = [2**0.5] * (len(sizes) - 2) + [last_scale]
    layers = []
    for layer_key, shape, scale in zip(keys, pairwise(sizes), scales, strict=True):
        weight, zeros = jax.nn.initializers.orthogonal(scale)(layer_key, shape), jnp.zeros(shape[1])
        norm = Norm(jnp.ones(shape[1]), zeros) if style.layer_norm else ()
        layers.append(Dense(weight, zeros, norm, activation=style.activation))
    return tuple(layers)


def mlp(layers: Layers, x: jax.Array) -> jax.Array:
    """Hidden layers, then one without an activation."""
    *hidden, last = layers
    return dense(last, hidden_layers(tuple(hidden), x))


def hidden_layers(layers: Layers, x: jax.Array) -> jax.Array:
    """Each layer's product, normalised if it says so, through its activation."""
    for layer in layers:
        x = dense(layer, x)
        if layer.norm:
            x = layer.norm.scale * standardised(x) + layer.norm.offset
        x = getattr(jax.nn, layer.activation)(x)
    return x


def standardised(x: jax.Array) -> jax.Array:
    """Each vector with mean 0 and variance 1."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def computed_in(params: Any, compute: str) -> Any:
    """The same parameters, with their layers' products computed in "bfloat16" or "float32"."""
    if compute not in COMPUTE:
        raise UnknownNameError("type to compute in", compute, COMPUTE)

    def change(x: Any) -> Any:
        return replace(x, compute=compute) if isinstance(x, Dense) else x

    return jax.tree.map(change, params, is_leaf=lambda x: isinstance(x, Dense))


def dense(layer: Dense, x: jax.Array) -> jax.Array:
    """One layer's product, whose gradient takes the way that is fast on the machine at hand."""
    return _affine(replace(layer, norm=()), x)


@jax.custom_vjp
def _affine(layer: Dense, x: jax.Array) -> jax.Array:
    return multiply(x, layer.weight, layer.compute) + layer.bias


def multiply(a: jax.Array, b: jax.Array, compute: str) -> jax.Array:
    """`a @ b` from numbers rounded to `compute`, summed up in float32."""
    if compute == "float32":
        return a @ b
    low = jnp.dtype(compute)
    return jnp.matmul(a.astype(low), b.astype(low), preferred_element_type=jnp.float32)


def _forward(layer: Dense, x: jax.Array) -> tuple[jax.Array, tuple[Dense, jax.Array]]:
    return _affine(layer, x), (layer, x)


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


_affine.defvjp(_forward, _backward)
