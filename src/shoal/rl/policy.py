"""Policy networks: what an action space needs, categorical or normal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Action, Box, Discrete, MultiDiscrete
from shoal.rl.distributions import Categorical, Distribution, MultiCategorical, Normal
from shoal.rl.nets import TANH, Layers, Style, init_mlp, mlp


class CategoricalActor(NamedTuple):
    """Chooses one of n actions."""

    layers: Layers


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class MultiCategoricalActor:
    """Makes several choices at once."""

    layers: Layers
    sizes: tuple[int, ...] = field(metadata={"static": True})


class NormalActor(NamedTuple):
    """Chooses real numbers around a mean; the standard deviation doesn't depend on features."""

    layers: Layers
    log_std: jax.Array


Actor = CategoricalActor | MultiCategoricalActor | NormalActor


def init_actor(key: jax.Array, sizes: Sequence[int], space: Action, style: Style = TANH) -> Actor:
    """An actor for `space` with layers of `sizes`, nearly indifferent between actions at first."""
    match space:
        case Discrete(n):
            return CategoricalActor(init_mlp(key, (*sizes, n), 0.01, style))
        case MultiDiscrete(choices):
            layers = init_mlp(key, (*sizes, sum(choices)), 0.01, style)
            return MultiCategoricalActor(layers, choices)
        case Box():
            layers = init_mlp(key, (*sizes, space.size), 0.01, style)
            return NormalActor(layers, jnp.zeros(space.size))
    assert_never(space)


def distribution(actor: Actor, features: jax.Array) -> Distribution:
    """π(·|s) of `actor` for `features`."""
    match actor:
        case CategoricalActor(layers):
            return Categorical(mlp(layers, features))
        case MultiCategoricalActor(layers, sizes):
            return MultiCategorical(mlp(layers, features), sizes)
        case NormalActor(layers, log_std):
            return Normal(mlp(layers, features), log_std)
    assert_never(actor)
