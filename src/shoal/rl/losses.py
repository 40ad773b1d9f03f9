"""Losses and diagnostics, entry by entry; the algorithm takes the mean."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.rl.distributions import Distribution
from shoal.rl.normalise import weighted
from shoal.rl.q_values import huber


def policy_gradient(log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """-A log π(a|s), whose gradient is the policy gradient (Williams, 1992)."""
    return -jax.lax.stop_gradient(advantage) * log_prob


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, clip: float) -> jax.Array:
    """-min(ρ A, clip(ρ, 1-ε, 1+ε) A), where ρ = π(a|s) / π_old(a|s) (Schulman et al., 2017)."""
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


def squared_error(value: jax.Array, target: jax.Array) -> jax.Array:
    """½ (V - G)²."""
    return 0.5 * jnp.square(value - target)


def value_loss(
    value: jax.Array,
    old_value: jax.Array,
    target: jax.Array,
    clip: float | None = None,
    delta: float | None = None,
) -> jax.Array:
    """½ (V - G)², or with a `delta` that of Huber; with a clip ε, the larger of it and of V_c's.

    V_c is V held within ε of V_old.
    """

    def error(value: jax.Array) -> jax.Array:
        return squared_error(value, target) if delta is None else huber(value - target, delta)

    if clip is None:
        return error(value)
    held = old_value + jnp.clip(value - old_value, -clip, clip)
    return jnp.maximum(error(value), error(held))


def approximate_kl(log_ratio: jax.Array) -> jax.Array:
    """(ρ - 1) - log ρ: unbiased for KL(π_old, π) under π_old's actions, and never negative."""
    return jnp.expm1(log_ratio) - log_ratio


def clipped(log_ratio: jax.Array, clip: float) -> jax.Array:
    """1 where |ρ - 1| > ε, else 0."""
    return (jnp.abs(jnp.expm1(log_ratio)) > clip).astype(jnp.float32)


def ppo(now: Distribution, value: jax.Array, batch: Any, settings: Any) -> dict[str, jax.Array]:
    """The parts of PPO's loss, entry by entry.

    `batch` has `action`, `log_prob`, `advantage`, `value` and `target`.
    """
    clip, delta = settings.clip_eps, getattr(settings, "huber_delta", None)
    log_ratio = now.log_prob(batch.action) - batch.log_prob
    return {
        "policy_loss": clipped_surrogate(log_ratio, batch.advantage, clip),
        "value_loss": value_loss(value, batch.value, batch.target, settings.clip_eps_vf, delta),
        "entropy": now.entropy(),
        "approx_kl": approximate_kl(log_ratio),
        "clip_fraction": clipped(log_ratio, clip),
    }


def actor_critic(
    parts: dict[str, jax.Array], weight: Any, vf_coef: float, ent_coef: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Policy loss + c₁ value loss - c₂ entropy, and these parts: weighted means over all."""
    parts = {name: jnp.mean(weighted(part, weight)) for name, part in parts.items()}
    loss = parts["policy_loss"] + vf_coef * parts["value_loss"]
    loss -= ent_coef * parts["entropy"]
    return loss, {"loss": loss, **parts}


class Fit(NamedTuple):
    """How values fit their targets: means that replicas may agree on as on any others."""

    error: jax.Array
    squared_error: jax.Array
    target: jax.Array
    squared_target: jax.Array


def fit(value: jax.Array, target: jax.Array, weight: Any) -> Fit:
    """The fit of values to targets, weighted."""
    error = target - value
    means = error, jnp.square(error), target, jnp.square(target)
    return Fit(*(jnp.mean(weighted(x, weight)) for x in means))


def explained_variance(fit: Fit) -> jax.Array:
    """1 - Var(target - value) / Var(target): 1 is perfect, 0 as good as a constant."""
    error = fit.squared_error - jnp.square(fit.error)
    return 1 - error / jnp.maximum(fit.squared_target - jnp.square(fit.target), 1e-8)


def soft_value(
    q_values: jax.Array, log_prob: jax.Array | float = 0.0, temperature: jax.Array | float = 0.0
) -> jax.Array:
    """min_i Q_i - α log π of [critics, ...] (Fujimoto et al., 2018; Haarnoja et al., 2018)."""
    return jnp.min(q_values, axis=0) - temperature * log_prob


def temperature_loss(
    log_temperature: jax.Array, log_prob: jax.Array, target_entropy: float
) -> jax.Array:
    """-log α (log π + H), which raises α where the policy's entropy is below H."""
    return -log_temperature * (jax.lax.stop_gradient(log_prob) + target_entropy)
