"""Losses and diagnostics, entry by entry; the algorithm takes the mean."""

import jax
import jax.numpy as jnp


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, clip: float) -> jax.Array:
    """-min(ρ A, clip(ρ, 1-ε, 1+ε) A), where ρ = π(a|s) / π_old(a|s) (Schulman et al., 2017)."""
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


def squared_error(value: jax.Array, target: jax.Array) -> jax.Array:
    """½ (V - G)²."""
    return 0.5 * jnp.square(value - target)


def clipped_squared_error(
    value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float
) -> jax.Array:
    """½ max((V - G)², (V_c - G)²), where V_c is V held within ε of V_old."""
    held = old_value + jnp.clip(value - old_value, -clip, clip)
    return jnp.maximum(squared_error(value, target), squared_error(held, target))


def value_loss(
    value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float | None
) -> jax.Array:
    """The squared error of a value, clipped where a clip is given."""
    if clip is None:
        return squared_error(value, target)
    return clipped_squared_error(value, old_value, target, clip)


def approximate_kl(log_ratio: jax.Array) -> jax.Array:
    """(ρ - 1) - log ρ: unbiased for KL(π_old, π) under π_old's actions, and never negative."""
    return jnp.expm1(log_ratio) - log_ratio


def clipped(log_ratio: jax.Array, clip: float) -> jax.Array:
    """1 where |ρ - 1| > ε, else 0."""
    return (jnp.abs(jnp.expm1(log_ratio)) > clip).astype(jnp.float32)
