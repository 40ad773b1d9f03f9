"""The convolutional network of Mnih et al. (2015), as matrix products.

XLA's own convolutions are slow on CPUs, and the more so inside loops. Here a layer of stride s
first folds blocks of s × s pixels into channels, after which its stride is 1; then it gathers the
patches under its window and multiplies. Images are [..., height, width, channels].
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Box, Observation
from shoal.rl.nets import Dense, dense

SMALLEST = 36  # pixels: fewer leave nothing for the last layer to see
# Filters, window and stride of each layer.
LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
WIDTH = 512


class Nature(NamedTuple):
    """Three convolutions, their windows unrolled, and a dense layer."""

    convolutions: tuple[Dense, ...]
    dense: Dense


def is_image(space: Observation) -> TypeGuard[Box]:
    """Whether `space` is an image that this network can see."""
    if not isinstance(space, Box) or len(space.shape) != 3 or space.dtype != "uint8":
        return False
    return min(sides(space.shape)[:2]) >= SMALLEST


def fold_image(x: jax.Array) -> jax.Array:
    """Images as the network wants them: channels last, folded for its first layer; still bytes."""
    channels_first = sides(x.shape[-3:]) != x.shape[-3:]
    x = jnp.moveaxis(x, -3, -1) if channels_first else x
    _, window, stride = LAYERS[0]
    return _fold(x, window, stride)


def init_nature(key: jax.Array, space: Box) -> Nature:
    """A network for images of `space`, with scaled orthogonal weights."""
    *pixels, channels = sides(space.shape)
    keys = jax.random.split(key, len(LAYERS) + 1)
    convolutions = []
    for layer_key, (filters, window, stride) in zip(keys, LAYERS, strict=False):
        convolutions.append(orthogonal(layer_key, (window**2 * channels, filters)))
        pixels = [(side - window) // stride + 1 for side in pixels]
        channels = filters
    seen = pixels[0] * pixels[1] * channels
    return Nature(tuple(convolutions), orthogonal(keys[-1], (seen, WIDTH)))


def nature(net: Nature, x: jax.Array) -> jax.Array:
    """What the network sees in folded images: [..., WIDTH]."""
    batch = x.shape[:-3]
    first, *others = net.convolutions
    # Bytes are scaled to 0..1 by way of the weights, which are fewer.
    first = replace(first, weight=first.weight / 255) if x.dtype == jnp.uint8 else first
    for layer, (_, window, stride) in zip((first, *others), LAYERS, strict=True):
        x = x if layer is first else _fold(x, window, stride)
        # Patches are gathered as bytes where they are bytes: four times fewer.
        x = jax.nn.relu(dense(layer, patches(x, window // stride).astype(jnp.float32)))
    return jax.nn.relu(dense(net.dense, x.reshape(*batch, -1)))


def _fold(x: jax.Array, window: int, stride: int) -> jax.Array:
    """Blocks of stride × stride pixels as channels; what no window reaches is cut off."""
    *batch, height, width, channels = x.shape
    rows, columns = ((side - window) // stride + window // stride for side in (height, width))
    x = x[..., : rows * stride, : columns * stride, :]
    x = x.reshape(*batch, rows, stride, columns, stride, channels)
    return jnp.swapaxes(x, -4, -3).reshape(*batch, rows, columns, stride**2 * channels)


def patches(x: jax.Array, window: int) -> jax.Array:
    """What lies under the window at each place, as channels."""
    rows, columns = (side - window + 1 for side in x.shape[-3:-1])
    shifts = product(range(window), repeat=2)
    parts = [x[..., i : i + rows, j : j + columns, :] for i, j in shifts]
    return jnp.concatenate(parts, axis=-1)


def sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Height, width and channels, where the fewest of first and last are the channels."""
    return (*shape[1:], shape[0]) if shape[0] < shape[-1] else tuple(shape)


def orthogonal(key: jax.Array, shape: tuple[int, int]) -> Dense:
    """A layer with orthogonal weights, scaled for relu."""
    return Dense(jax.nn.initializers.orthogonal(2**0.5)(key, shape), jnp.zeros(shape[1]))
