"""A network that says what each action is worth, in one or two streams (dueling)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Discrete, Observation
from shoal.errors import SettingError
from shoal.rl.nets import Dense, Layers, dense, init_mlp
from shoal.rl.torso import Torso, embed, init_torso


class Shape(NamedTuple):
    """How a network is built: hidden layers, torso, actions, numbers an action, streams."""

    hidden: tuple[int, ...]
    torso: str
    actions: int
    atoms: int = 1
    dueling: bool = False


class QNetwork(NamedTuple):
    """The parameters."""

    torso: Torso
    hidden: Layers
    advantage: Dense
    value: Any  # a layer; () with one stream


def count_actions(env: Any) -> int:
    """How many actions a network has to judge, where one agent has a choice."""
    if env.agents or not isinstance(env.action_space, Discrete):
        raise SettingError(
            f"action values are of one agent's {Discrete.__name__} actions, and {env.name} has "
            f"{len(env.agents) or 'one'} agent(s) that act in {env.action_space}",
            "Use an algorithm for such actions, or for several agents.",
        )
    return env.action_space.n


def init_q_network(key: jax.Array, seen: Observation, shape: Shape) -> QNetwork:
    """A network for what `seen` shows; images have no hidden layers behind their torso."""
    torso_key, hidden_key, advantage_key, value_key = jax.random.split(key, 4)
    torso, sizes = init_torso(torso_key, seen, shape.torso, shape.hidden)
    *_, width = sizes
    hidden = init_mlp(hidden_key, sizes, 2**0.5) if len(sizes) > 1 else ()
    (advantage,) = init_mlp(advantage_key, (width, shape.actions * shape.atoms))
    (value,) = init_mlp(value_key, (width, shape.atoms)) if shape.dueling else ((),)
    return QNetwork(torso, hidden, advantage, value)


def action_atoms(params: QNetwork, features: jax.Array, atoms: int) -> jax.Array:
    """The numbers of every action: [..., actions, atoms]."""
    return judge(params, embed_all(params, features), atoms)


def embed_all(params: QNetwork, features: jax.Array) -> jax.Array:
    """What is behind the torso and the hidden layers."""
    x = embed(params.torso, features)
    for layer in params.hidden:
        x = jax.nn.relu(dense(layer, x))
    return x


def judge(params: QNetwork, x: jax.Array, atoms: int) -> jax.Array:
    """The heads: A(s, a), or V(s) + A(s, a) - mean A(s, ·) (Wang et al., 2016)."""
    advantage = dense(params.advantage, x)
    advantage = advantage.reshape(*advantage.shape[:-1], -1, atoms)
    if not params.value:
        return advantage
    advantage -= jnp.mean(advantage, axis=-2, keepdims=True)
    return dense(params.value, x)[..., None, :] + advantage
