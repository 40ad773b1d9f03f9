"""A network of action values, in one or two streams (dueling), with or without memory."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs.spaces import MASK, Discrete, Observation, parts
from shoal.errors import SettingError
from shoal.rl.memory import Memory, State, init_memory, remember, width_of
from shoal.rl.nets import (
    RELU,
    Dense,
    Layers,
    Style,
    dense,
    hidden_layers,
    init_hidden,
    init_mlp,
)
from shoal.rl.observations import features_of, own_part
from shoal.rl.own_network import OwnNetwork, as_numbers
from shoal.rl.torso import Kind, MinAtar, Nature, ResNet, Torso, as_image, embed, init_torso


class Shape(NamedTuple):
    """The settings of a network; `atoms` are its outputs per action."""

    hidden: tuple[int, ...]
    torso: Any
    actions: int
    atoms: int = 1
    dueling: bool = False
    memory: tuple[str, int] = ("none", 0)  # its kind and width
    style: Style = RELU
    noise: float = 0.0  # σ₀ of noisy networks; 0: none


class QNetwork(NamedTuple):
    """The parameters."""

    torso: Torso
    hidden: Layers
    advantage: Dense
    value: Any  # a layer; () with one stream
    memory: Memory = ()  # between the hidden layers and the heads
    noise: Any = ()  # the std of the noise of hidden layers and heads; () without


def count_actions(env: Any) -> int:
    """The number of actions; an error unless one agent chooses among discrete actions."""
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


def obs_features(env: Any, obs: Any, torso: Any) -> Any:
    """Observations of `env` as the input of this torso: a vector, or an image."""
    return features_of(env.observation_space, obs, torso)


def single_obs_features(params: QNetwork, obs: Any) -> Any:
    """The same for one environment, without its observation space."""
    obs = own_part(obs)
    if isinstance(params.torso, OwnNetwork):
        return as_numbers(obs)
    if params.torso:
        kinds: dict[type, Kind] = {Nature: "nature", ResNet: "resnet", MinAtar: "minatar"}
        return as_image(kinds[type(params.torso)], obs)
    leaves = [x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(obs)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def init_q_network(key: jax.Array, seen: Observation, shape: Shape) -> QNetwork:
    """A network for the observation space `seen`; torsos of images have no hidden layers."""
    torso_key, hidden_key, advantage_key, value_key = jax.random.split(key, 4)
    torso, sizes = init_torso(torso_key, parts(seen)[0], shape.torso, shape.hidden)
    *_, seen_width = sizes
    kind, wide = shape.memory
    memory = init_memory(jax.random.fold_in(key, 4), kind, seen_width, wide)
    width = width_of(memory, seen_width)
    hidden = init_hidden(hidden_key, sizes, shape.style) if len(sizes) > 1 else ()
    (advantage,) = init_mlp(advantage_key, (width, shape.actions * shape.atoms))
    (value,) = init_mlp(value_key, (width, shape.atoms)) if shape.dueling else ((),)
    layers = hidden, advantage, value
    noise = jax.tree.map(partial(_init_noise, shape.noise), layers, is_leaf=_is_dense)
    return QNetwork(torso, hidden, advantage, value, memory, noise if shape.noise else ())


def with_noise(params: QNetwork, key: jax.Array | None) -> QNetwork:
    """The network with a draw of its noise in its layers; their means without a key.

    Noise is factorised: an entry's is the product of that of its input and that of its output
    (Fortunato et al., 2018).
    """
    if not params.noise or key is None:
        return params
    layers, tree = jax.tree.flatten(
        (params.hidden, params.advantage, params.value), is_leaf=_is_dense
    )
    stds = jax.tree.leaves(params.noise, is_leaf=_is_dense)
    drawn = zip(jax.random.split(key, len(layers)), layers, stds, strict=True)
    hidden, advantage, value = jax.tree.unflatten(tree, [_perturbed(*each) for each in drawn])
    return params._replace(hidden=hidden, advantage=advantage, value=value)


def noise_keys(key: jax.Array | None, count: int) -> list[Any]:
    """Keys of so many draws of noise; without a key there is none."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def _perturbed(key: jax.Array, layer: Dense, std: Dense) -> Dense:
    inputs, outputs = layer.weight.shape
    x = jax.random.normal(key, (inputs + outputs,))
    seen, given = jnp.split(jnp.sign(x) * jnp.sqrt(jnp.abs(x)), [inputs])
    weight = layer.weight + std.weight * seen[:, None] * given
    return replace(layer, weight=weight, bias=layer.bias + std.bias * given)


def _init_noise(scale: float, layer: Dense) -> Dense:
    std = scale / layer.weight.shape[0] ** 0.5
    return Dense(jnp.full(layer.weight.shape, std), jnp.full(layer.bias.shape, std))


def _is_dense(x: Any) -> bool:
    return isinstance(x, Dense)


def action_atoms(params: QNetwork, features: Any, atoms: int) -> jax.Array:
    """The atoms of every action: [..., actions, atoms]."""
    return apply_heads(params, encode(params, features), atoms)


def encode(params: QNetwork, features: Any) -> jax.Array:
    """The output of the torso and the hidden layers."""
    return hidden_layers(params.hidden, embed(params.torso, features))


def apply(params: QNetwork, state: State, features: Any) -> tuple[State, jax.Array]:
    """The recurrent state after `features`, and the value of every action: [..., actions]."""
    encoded = encode(params, features)
    state, out = remember(params.memory, state, encoded, jnp.zeros(encoded.shape[:-1], bool))
    return state, apply_heads(params, out, 1)[..., 0]


def peek(params: QNetwork, state_t: State, features_t: Any) -> jax.Array:
    """The action values of each of `features_t`; its recurrent state is used and not advanced."""
    return apply(params, state_t, features_t)[1]


def unroll(
    params: QNetwork, state: State, features_t: Any, is_first_t: jax.Array
) -> tuple[State, tuple[jax.Array, State]]:
    """The recurrent state after a sequence; and the action values and the state at each time."""

    def advance(state: State, at: tuple[jax.Array, jax.Array]) -> tuple[State, tuple]:
        state, out = remember(params.memory, state, *at)
        return state, (out, state)

    inputs = encode(params, features_t), is_first_t
    last, (out_t, state_t) = jax.lax.scan(advance, state, inputs)
    return last, (apply_heads(params, out_t, 1)[..., 0], state_t)


def apply_heads(params: QNetwork, x: jax.Array, atoms: int) -> jax.Array:
    """The heads: A(s, a), or V(s) + A(s, a) - mean A(s, ·) (Wang et al., 2016)."""
    advantage = dense(params.advantage, x)
    *lead, width = advantage.shape
    advantage = advantage.reshape(*lead, width // atoms, atoms)
    if not params.value:
        return advantage
    advantage -= jnp.mean(advantage, axis=-2, keepdims=True)
    return dense(params.value, x)[..., None, :] + advantage
