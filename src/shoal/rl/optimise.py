"""Optimisers: what gradients do to parameters."""

from typing import Any

import optax


def clipped_adam(
    learning_rate: float, max_grad_norm: float, updates: int | None = None
) -> optax.GradientTransformation:
    """Adam on clipped gradients; if the number of `updates` is known, ever slower to the last."""
    return _clipped(optax.adam(falling(learning_rate, updates), eps=1e-5), max_grad_norm)


def clipped_rmsprop(
    learning_rate: float, max_grad_norm: float, updates: int | None = None
) -> optax.GradientTransformation:
    """RMSProp on clipped gradients, as Mnih et al. (2016) have it; slower towards the last."""
    rate = falling(learning_rate, updates)
    return _clipped(optax.rmsprop(rate, decay=0.99, eps=1e-5), max_grad_norm)


def falling(learning_rate: float, updates: int | None) -> Any:
    """A rate that falls to 0 over so many updates; without them it does not."""
    return learning_rate if updates is None else optax.linear_schedule(learning_rate, 0.0, updates)


def _clipped(rule: optax.GradientTransformation, norm: float) -> optax.GradientTransformation:
    return optax.flatten(optax.chain(optax.clip_by_global_norm(norm), rule))
