"""A network of action values, in one or two streams (dueling)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs.spaces import MASK, Discrete, Observation, parts
from shoal.errors import SettingError
from shoal.rl.memory import Memory, State, init_memory, remember, width_of
from shoal.rl.nets import Dense, Layers, dense, init_mlp
from shoal.rl.observations import features_of, own_part
from shoal.rl.torso import Kind, MinAtar, Nature, ResNet, Torso, as_image, embed, init_torso


class Shape(NamedTuple):
    """How a network is built: hidden layers, torso, actions, numbers an action, streams."""

    hidden: tuple[int, ...]
    torso: str
    actions: int
    atoms: int = 1
    dueling: bool = False
    memory: tuple[str, int] = ("none", 0)  # its kind and width


class QNetwork(NamedTuple):
    """The parameters."""

    torso: Torso
    hidden: Layers
    advantage: Dense
    value: Any  # a layer; () with one stream
    memory: Memory = ()  # between the hidden layers and the heads


def count_actions(env: Any) -> int:
    """The number of actions of an environment with one agent and discrete actions."""
    if env.agents or not isinstance(env.action_space, Discrete):
        raise SettingError(
            f"action values are of one agent's {Discrete.__name__} actions, and {env.name} has "
            f"{len(env.agents) or 'one'} agent(s) that act in {env.action_space}",
            "Use an algorithm for such actions, or for several agents.",
        )
    if parts(env.observation_space)[1]:
        raise SettingError(
            f"{env.name} shows a `{MASK}` of the actions that may be taken, and these action "
            "values are of all actions",
            "Use an algorithm that obeys masks: a2c, impala or ppo.",
        )
    return env.action_space.n


def features(env: Any, obs: Any, torso: str) -> jax.Array:
    """Observations of `env` as a network with this torso sees them: a vector, or an image."""
    return features_of(env.observation_space, obs, torso)


def features_of_one(params: QNetwork, obs: Any) -> jax.Array:
    """The same for one environment, by the network alone."""
    obs = own_part(obs)
    if params.torso:
        kinds: dict[type, Kind] = {Nature: "nature", ResNet: "resnet", MinAtar: "minatar"}
        return as_image(kinds[type(params.torso)], obs)
    leaves = [x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(obs)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def init_q_network(key: jax.Array, seen: Observation, shape: Shape) -> QNetwork:
    """A network for what `seen` shows; images have no hidden layers behind their torso."""
    torso_key, hidden_key, advantage_key, value_key = jax.random.split(key, 4)
    torso, sizes = init_torso(torso_key, parts(seen)[0], shape.torso, shape.hidden)
    *_, seen_width = sizes
    kind, wide = shape.memory
    memory = init_memory(jax.random.fold_in(key, 4), kind, seen_width, wide)
    width = width_of(memory, seen_width)
    hidden = init_mlp(hidden_key, sizes, 2**0.5) if len(sizes) > 1 else ()
    (advantage,) = init_mlp(advantage_key, (width, shape.actions * shape.atoms))
    (value,) = init_mlp(value_key, (width, shape.atoms)) if shape.dueling else ((),)
    return QNetwork(torso, hidden, advantage, value, memory)


def action_atoms(params: QNetwork, features: jax.Array, atoms: int) -> jax.Array:
    """The numbers of every action: [..., actions, atoms]."""
    return heads(params, embed_all(params, features), atoms)


def embed_all(params: QNetwork, features: jax.Array) -> jax.Array:
    """The embedding after the torso and the hidden layers."""
    x = embed(params.torso, features)
    for layer in params.hidden:
        x = jax.nn.relu(dense(layer, x))
    return x


def look(params: QNetwork, state: State, seen: jax.Array) -> tuple[State, jax.Array]:
    """The memory after `seen`, and the value of every action then: [..., actions]."""
    seen = embed_all(params, seen)
    state, out = remember(params.memory, state, seen, jnp.zeros(seen.shape[:-1], bool))
    return state, heads(params, out, 1)[..., 0]


def peek(params: QNetwork, states_t: State, seen_t: jax.Array) -> jax.Array:
    """The value of every action for each of `seen_t`, each in its own memory state."""
    return look(params, states_t, seen_t)[1]


def walk(
    params: QNetwork, state: State, seen_t: jax.Array, fresh_t: jax.Array
) -> tuple[State, tuple[jax.Array, State]]:
    """The state after a sequence; and at each time the action values, and the state."""

    def turn(state: State, seen: tuple[jax.Array, jax.Array]) -> tuple[State, tuple]:
        state, out = remember(params.memory, state, *seen)
        return state, (out, state)

    last, (out_t, states_t) = jax.lax.scan(turn, state, (embed_all(params, seen_t), fresh_t))
    return last, (heads(params, out_t, 1)[..., 0], states_t)


def heads(params: QNetwork, x: jax.Array, atoms: int) -> jax.Array:
    """The heads: A(s, a), or V(s) + A(s, a) - mean A(s, ·) (Wang et al., 2016)."""
    advantage = dense(params.advantage, x)
    *lead, width = advantage.shape
    advantage = advantage.reshape(*lead, width // atoms, atoms)
    if not params.value:
        return advantage
    advantage -= jnp.mean(advantage, axis=-2, keepdims=True)
    return dense(params.value, x)[..., None, :] + advantage
