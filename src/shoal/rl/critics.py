"""Critics of continuous actions: an ensemble of networks Q(s, a)."""

import jax
import jax.numpy as jnp

from shoal.rl.nets import Layers, init_mlp, mlp

Critics = tuple[Layers, ...]


def init_critics(key: jax.Array, sizes: tuple[int, ...], count: int) -> Critics:
    """`count` critics with layers of `sizes`; the first is the width of features and action."""
    return tuple(init_mlp(each, (*sizes, 1)) for each in jax.random.split(key, count))


def q_values(critics: Critics, features: jax.Array, action: jax.Array) -> jax.Array:
    """Q(s, a) by each critic: [critics, ...]."""
    both = jnp.concatenate([features, action], axis=-1)
    return jnp.stack([mlp(critic, both, jax.nn.relu)[..., 0] for critic in critics])
