"""Running mean and variance, the same on every replica."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.tracing.stage import mean


class Moments(NamedTuple):
    """The mean and variance of what was seen so far, and how much that was.

    `count` counts a batch by its length along time, not by its entries, so it does not depend on how many environments
    are seen at once, nor on how they are divided.
    """

    count: jax.Array
    mean: jax.Array
    var: jax.Array


def init_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Nothing seen yet: leaves what it normalises as it is."""
    return Moments(jnp.float32(0), jnp.zeros(shape), jnp.ones(shape))


def batch_moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The mean and variance of `x` over `axes` and over all replicas, which hold equally many entries."""
    # About the agreed mean, not as E[x²] - E[x]², which loses all digits where the mean is large.
    average = mean(jnp.mean(x, axes))
    return average, mean(jnp.mean(jnp.square(x - jnp.expand_dims(average, axes)), axes))


def update_moments(moments: Moments, x: jax.Array) -> Moments:
    """`moments` after seeing `x` of shape [time, environments, ...] too (Chan's parallel form of Welford's rule)."""
    average, var = batch_moments(x, (0, 1))
    count = moments.count + x.shape[0]
    share = x.shape[0] / count
    delta = average - moments.mean
    new_var = (1 - share) * moments.var + share * var + share * (1 - share) * jnp.square(delta)
    return Moments(count, moments.mean + share * delta, new_var)


def normalise(moments: Moments, x: jax.Array, bound: float = 10.0) -> jax.Array:
    """(x - mean) / std, held within ±`bound`."""
    return jnp.clip((x - moments.mean) * jax.lax.rsqrt(moments.var + 1e-8), -bound, bound)


def rescale(moments: Moments, x: jax.Array, bound: float = 10.0) -> jax.Array:
    """x / std, held within ±`bound`: keeps the sign and the zero, as rewards need."""
    return jnp.clip(x * jax.lax.rsqrt(moments.var + 1e-8), -bound, bound)
