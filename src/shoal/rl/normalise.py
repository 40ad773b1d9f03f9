"""Normalisation by mean and variance, the same on every replica."""

from typing import Any, NamedTuple

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


def update_moments(moments: Moments, x: jax.Array, weight: Any = ()) -> Moments:
    """`moments` updated by `x` of [steps, environments, ...] (Chan's parallel Welford).

    With a `weight` from `weight_of_active`, inactive agents are left out.
    """
    # About the agreed mean, not as E[x²] - E[x]², which loses all digits where the mean is large.
    samples = tuple(range(x.ndim - moments.mean.ndim))
    if not isinstance(weight, tuple):
        weight = weight.reshape(*weight.shape, *[1] * moments.mean.ndim)
    average = mean(jnp.mean(weighted(x, weight), samples))
    var = mean(jnp.mean(weighted(jnp.square(x - average), weight), samples))
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


def restore(moments: Moments, x: jax.Array) -> jax.Array:
    """The inverse of `normalise`, without bounds."""
    return moments.mean + x * jnp.sqrt(moments.var + 1e-8)


def scale_by_std(moments: Moments, x: jax.Array, bound: float = 10.0) -> jax.Array:
    """The quotient x / std, held within ±`bound`; keeps signs, as rewards need."""
    return jnp.clip(x * jax.lax.rsqrt(moments.var + 1e-8), -bound, bound)


def standardise(x: jax.Array, weight: Any = ()) -> jax.Array:
    """(x - mean) / std over all entries and replicas, each with its weight if there is one."""
    average = mean(jnp.mean(weighted(x, weight)))
    var = mean(jnp.mean(weighted(jnp.square(x - average), weight)))
    return (x - average) * jax.lax.rsqrt(var + 1e-8)


def explained_variance(value: jax.Array, target: jax.Array, weight: Any = ()) -> jax.Array:
    """1 - Var(target - value) / Var(target): 1 is perfect, 0 as good as a constant."""
    both = target - value, target
    averages = mean([jnp.mean(weighted(x, weight)) for x in both])
    squares = [jnp.square(x - average) for x, average in zip(both, averages, strict=True)]
    error, whole = mean([jnp.mean(weighted(x, weight)) for x in squares])
    return 1 - error / jnp.maximum(whole, 1e-8)


def weight_of_active(active: Any) -> Any:
    """Weights of 0 for inactive agents, and of a mean of 1 over all replicas; () for one agent.

    The mean of `weighted` values is their mean over the active agents.
    """
    if isinstance(active, tuple):
        return ()
    active = active.astype(jnp.float32)
    return active / mean(jnp.mean(active))


def weighted(x: jax.Array, weight: Any) -> jax.Array:
    """`x` times its weight; as it is where there is none."""
    return x if isinstance(weight, tuple) else x * weight
