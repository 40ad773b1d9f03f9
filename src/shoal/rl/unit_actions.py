"""Policies of continuous actions in [-1, 1], and their scaling to the bounds of a box."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Action, Box
from shoal.errors import SettingError
from shoal.rl.critics import Net, outputs
from shoal.rl.distributions import TanhNormal

LOG_STD = (-5.0, 2.0)


def check_bounded(title: str, space: Action) -> Box:
    """`space`, or an error if it is not a box with finite bounds."""
    if isinstance(space, Box) and all(map(math.isfinite, (*_each(space, 0), *_each(space, 1)))):
        return space
    raise SettingError(
        f"{title} chooses numbers between bounds, and {space} is not a box that has them",
        "Give the box bounds with a wrapper, or use an algorithm such as PPO.",
    )


def scale_to_box(space: Box, unit: jax.Array) -> jax.Array:
    """`unit` scaled from [-1, 1] to the bounds of `space`."""
    low, high = (jnp.asarray(_each(space, end)) for end in (0, 1))
    action = low + 0.5 * (unit + 1) * (high - low)
    return action.reshape(*unit.shape[:-1], *space.shape)


def deterministic_action(actor: Net, features: Any) -> jax.Array:
    """μ(s): the action of a deterministic `actor`, in [-1, 1]."""
    return jnp.tanh(outputs(actor, features))


def add_noise(key: jax.Array | None, unit: jax.Array, scale: float) -> jax.Array:
    """`unit` plus Gaussian noise, clipped to [-1, 1]; without a key, `unit`."""
    if key is None:
        return unit
    return jnp.clip(unit + scale * jax.random.normal(key, unit.shape), -1, 1)


def squashed_normal(actor: Net, features: Any) -> TanhNormal:
    """π(· | s): the tanh-squashed Gaussian whose mean and log std `actor` computes."""
    mean, log_std = jnp.split(outputs(actor, features), 2, axis=-1)
    return TanhNormal(mean, jnp.clip(log_std, *LOG_STD))


def uniform_until(ready: jax.Array, key: jax.Array, unit: jax.Array) -> jax.Array:
    """`unit` if `ready`, else a uniform action."""
    uniform = jax.random.uniform(key, unit.shape, minval=-1, maxval=1)
    return jnp.where(ready, unit, uniform)


def _each(space: Box, end: int) -> tuple[float, ...]:
    bound = (space.low, space.high)[end]
    return bound if isinstance(bound, tuple) else (bound,) * space.size
