"""Networks of continuous control: an actor, and an ensemble of critics Q(s, a).

Each has a torso of its own, where there is one, and layers behind it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Observation
from shoal.rl.nets import RELU, Layers, Style, init_mlp, mlp
from shoal.rl.torso import Torso, embed, init_torso


class Net(NamedTuple):
    """The parameters of one network."""

    torso: Torso
    layers: Layers


Critics = tuple[Net, ...]
OWN = 0x70250  # sets the key of a torso apart from those of the layers


class Sizes(NamedTuple):
    """What such networks see and how large they are."""

    space: Observation
    action: int  # how many numbers an action has
    hidden: tuple[int, ...]  # layers behind the torso
    torso: Any = "auto"
    style: Style = RELU


def init_actor(key: jax.Array, sizes: Sizes, outputs: int) -> Net:
    """An actor with so many outputs, nearly 0 at first."""
    torso, width = _init_torso(key, sizes)
    return Net(torso, init_mlp(key, (width, *sizes.hidden, outputs), 0.01, sizes.style))


def init_critics(key: jax.Array, sizes: Sizes, count: int) -> Critics:
    """`count` critics, whose layers see the features and the action."""

    def one(key: jax.Array) -> Net:
        torso, width = _init_torso(key, sizes)
        layers = init_mlp(key, (width + sizes.action, *sizes.hidden, 1), style=sizes.style)
        return Net(torso, layers)

    return tuple(one(each) for each in jax.random.split(key, count))


def outputs(net: Net, features: Any) -> jax.Array:
    """What an actor's last layer gives."""
    return mlp(net.layers, embed(net.torso, features))


def q_values(critics: Critics, features: Any, action: jax.Array) -> jax.Array:
    """Q(s, a) by each critic: [critics, ...]."""

    def one(critic: Net) -> jax.Array:
        seen = jnp.concatenate([embed(critic.torso, features), action], axis=-1)
        return mlp(critic.layers, seen)[..., 0]

    return jnp.stack([one(critic) for critic in critics])


def _init_torso(key: jax.Array, sizes: Sizes) -> tuple[Torso, int]:
    torso, widths = init_torso(jax.random.fold_in(key, OWN), sizes.space, sizes.torso, ())
    return torso, widths[0]
