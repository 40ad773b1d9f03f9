"""Normalisation by mean and variance, the same on every replica."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shoal.tracing.stage import mean


class Moments(NamedTuple):
    """The mean and variance of what was seen so far, in so many steps.

    Steps are counted, not entries: they depend neither on how many environments are stepped at once
    nor on how these are divided.
    """

    steps: jax.Array
    mean: jax.Array
    var: jax.Array


def init_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Nothing seen yet."""
    return Moments(jnp.float32(0), jnp.zeros(shape), jnp.ones(shape))


def see(moments: Moments, x: jax.Array) -> Moments:
    """`moments` after seeing `x` of [steps, environments, ...] too (Chan's parallel Welford)."""
    # About the agreed mean, not as E[x²] - E[x]², which loses all digits where the mean is large.
    samples = tuple(range(x.ndim - moments.mean.ndim))
    average = mean(jnp.mean(x, samples))
    var = mean(jnp.mean(jnp.square(x - average), samples))
    steps = moments.steps + x.shape[0]
    share = x.shape[0] / steps
    delta = average - moments.mean
    between = share * (1 - share) * jnp.square(delta)
    return Moments(
        steps,
        moments.mean + share * delta,
        (1 - share) * moments.var + share * var + between,
    )


def normalise(moments: Moments, x: jax.Array, bound: float = 10.0) -> jax.Array:
    """(x - mean) / std, held within ±`bound`."""
    return jnp.clip((x - moments.mean) * jax.lax.rsqrt(moments.var + 1e-8), -bound, bound)


def rescale(moments: Moments, x: jax.Array, bound: float = 10.0) -> jax.Array:
    """The quotient x / std, held within ±`bound`; keeps signs, as rewards need."""
    return jnp.clip(x * jax.lax.rsqrt(moments.var + 1e-8), -bound, bound)


def spread(x: jax.Array) -> jax.Array:
    """The mean and mean square of each step's rows on all replicas: [steps, 2]."""
    rows = tuple(range(1, x.ndim))
    return mean(jnp.stack([jnp.mean(x, rows), jnp.mean(jnp.square(x), rows)], axis=1))


def standardise(x: jax.Array, spreads: jax.Array) -> jax.Array:
    """(x - mean) / std of some steps whose `spread` is known."""
    first, second = jnp.mean(spreads, axis=0)
    return (x - first) * jax.lax.rsqrt(jnp.maximum(second - jnp.square(first), 0) + 1e-8)
