"""Policies whose actions lie between -1 and 1 in every entry, and where these lie in a box."""

import math

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Action, Box
from shoal.errors import SettingError
from shoal.rl.distributions import TanhNormal
from shoal.rl.nets import Layers, mlp

LOG_STD = (-5.0, 2.0)


def check_bounded(title: str, space: Action) -> Box:
    """`space`, which must be a box with bounds on every entry."""
    if isinstance(space, Box) and all(map(math.isfinite, (*_each(space, 0), *_each(space, 1)))):
        return space
    raise SettingError(
        f"{title} chooses numbers between bounds, and {space} is not a box that has them",
        "Give the box bounds with a wrapper, or use an algorithm such as PPO.",
    )


def in_box(space: Box, unit: jax.Array) -> jax.Array:
    """The element of `space` that `unit` stands for: -1 is its lower bound and 1 its upper."""
    low, high = (jnp.asarray(_each(space, end)) for end in (0, 1))
    action = low + 0.5 * (unit + 1) * (high - low)
    return action.reshape(*unit.shape[:-1], *space.shape)


def certain(actor: Layers, features: jax.Array) -> jax.Array:
    """The action of a deterministic `actor` for `features`."""
    return jnp.tanh(mlp(actor, features, jax.nn.relu))


def noisy(key: jax.Array | None, unit: jax.Array, scale: float) -> jax.Array:
    """An action with noise, still between the bounds; without a key, as it is."""
    if key is None:
        return unit
    return jnp.clip(unit + scale * jax.random.normal(key, unit.shape), -1, 1)


def squashed(actor: Layers, features: jax.Array) -> TanhNormal:
    """The distribution of an `actor` with two outputs per entry, for `features`."""
    mean, log_std = jnp.split(mlp(actor, features, jax.nn.relu), 2, axis=-1)
    return TanhNormal(mean, jnp.clip(log_std, *LOG_STD))


def _each(space: Box, end: int) -> tuple[float, ...]:
    bound = (space.low, space.high)[end]
    return bound if isinstance(bound, tuple) else (bound,) * space.size
