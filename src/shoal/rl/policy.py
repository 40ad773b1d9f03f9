"""Policy networks: what an action space needs, categorical or normal."""

from collections.abc import Sequence
from typing import NamedTuple, assert_never

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Box, Discrete, Space
from shoal.rl.distributions import Categorical, Distribution, Normal
from shoal.rl.nets import Layers, init_mlp, mlp


class CategoricalActor(NamedTuple):
    """Chooses one of n actions."""

    layers: Layers


class NormalActor(NamedTuple):
    """Chooses real numbers about a mean; the spread does not depend on what it sees."""

    layers: Layers
    log_std: jax.Array


Actor = CategoricalActor | NormalActor


def init_actor(key: jax.Array, sizes: Sequence[int], space: Space) -> Actor:
    """An actor for `space` with layers of `sizes`, nearly indifferent between actions at first."""
    match space:
        case Discrete(n):
            return CategoricalActor(init_mlp(key, (*sizes, n), last_scale=0.01))
        case Box():
            layers = init_mlp(key, (*sizes, space.size), last_scale=0.01)
            return NormalActor(layers, jnp.zeros(space.size))
    assert_never(space)


def policy(actor: Actor, features: jax.Array) -> Distribution:
    """What `actor` does on seeing `features`."""
    match actor:
        case CategoricalActor(layers):
            return Categorical(mlp(layers, features))
        case NormalActor(layers, log_std):
            return Normal(mlp(layers, features), log_std)
    assert_never(actor)
