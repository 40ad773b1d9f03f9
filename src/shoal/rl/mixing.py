"""Each agent's action values, and the team's value Q_tot that is mixed from them.

The mixing network is monotonic in each agent's value, so that each agent's greedy action is also
greedy for the team (Rashid et al., 2018). Agents are an axis: [..., agents, ...].
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Discrete
from shoal.errors import SettingError
from shoal.rl.distributions import Categorical, masked
from shoal.rl.memory import Memory, init_memory, remember, start
from shoal.rl.nets import RELU, Dense, Layers, dense, init_mlp, mlp
from shoal.rl.routing import Routes
from shoal.rl.teams import Shown, recall, widths, with_index


class AgentNetwork(NamedTuple):
    """One policy's network of action values: a layer, memory, a layer."""

    embed: Dense
    memory: Memory
    head: Dense


class Mixer(NamedTuple):
    """Hypernetworks, which compute the mixing network's weights from the global state."""

    first: Layers  # weights of the agents' values
    first_bias: Dense
    second: Layers
    second_bias: Layers


class Networks(NamedTuple):
    """The network of each policy's agents, and the mixer; () is a plain sum."""

    agents: dict[str, AgentNetwork]
    mixer: Mixer | tuple[()]


def check_one_team(env: Any, routes: Routes, settings: Any) -> None:
    """Refuse to mix groups of agents that may be opponents, unless the settings say otherwise."""
    groups = [name for name, _ in routes.groups]
    if len(groups) > 1 and not settings.one_team:
        raise SettingError(
            f"{type(settings).__name__} adds up what all agents of {env.name} earn, and the groups "
            f"{', '.join(groups)} may be opponents",
            "If they share one goal, set one_team=True; otherwise use mappo or ippo, which learn "
            "from each agent's own reward.",
        )


def init_networks(
    key: jax.Array, routes: Routes, memory: tuple[str, int], mixer: tuple[int, int] | tuple[()]
) -> Networks:
    """Networks of a team; `memory` is kind and width, `mixer` its widths, or () for a plain sum."""
    own, world = widths(routes)
    networks, count = {}, 0
    for i, p in enumerate(routes.policies):
        assert isinstance(p.action_space, Discrete)
        sizes = own[p.name], len(p.agents), p.action_space.n
        networks[p.name] = init_agent_network(jax.random.fold_in(key, i), *sizes, memory)
        count += len(p.agents)
    mixer_key = jax.random.fold_in(key, len(networks))
    return Networks(networks, init_mixer(mixer_key, world, count, *mixer) if mixer else ())


def init_agent_network(
    key: jax.Array, own: int, agents: int, actions: int, memory: tuple[str, int]
) -> AgentNetwork:
    """A network whose input is `own` features and the agent's index; `memory` is kind and width."""
    embed_key, memory_key, head_key = jax.random.split(key, 3)
    kind, width = memory
    (embed,) = init_mlp(embed_key, (own + agents, width))
    (head,) = init_mlp(head_key, (width, actions), last_scale=0.1)
    return AgentNetwork(embed, init_memory(memory_key, kind, width, width), head)


def init_mixer(key: jax.Array, world: int, agents: int, width: int, hidden: int) -> Mixer:
    """A mixing network with `width` units, whose hypernetworks have one `hidden` layer."""
    keys = jax.random.split(key, 4)
    (first_bias,) = init_mlp(keys[1], (world, width), last_scale=0.1)
    return Mixer(
        init_mlp(keys[0], (world, hidden, agents * width), 0.1, RELU),
        first_bias,
        init_mlp(keys[2], (world, hidden, width), 0.1, RELU),
        init_mlp(keys[3], (world, hidden, 1), 0.1, RELU),
    )


def mix(mixer: Mixer | tuple[()], q: jax.Array, world: Any) -> jax.Array:
    """Q_tot = |w₂|ᵀ elu(|W₁|ᵀ q + b₁) + b₂; without a mixer, Σ q (VDN).

    Weights and biases are functions of the global state; `q` is [..., agents].
    """
    if not isinstance(mixer, Mixer):
        return jnp.sum(q, axis=-1)
    first = jnp.abs(mlp(mixer.first, world))
    first = first.reshape(*q.shape, -1)
    unit = jnp.einsum("...a,...au->...u", q, first) + dense(mixer.first_bias, world)
    second = jnp.abs(mlp(mixer.second, world))
    bias = mlp(mixer.second_bias, world)[..., 0]
    return jnp.sum(jax.nn.elu(unit) * second, axis=-1) + bias


def agent_q_values(params: AgentNetwork, memory: Any, shown: Shown) -> tuple[Any, jax.Array]:
    """The next memory, and the value of each agent's actions; masked ones are very low."""
    features = _embed(params, shown.own)
    memory, seen = remember(params.memory, memory, features, jnp.zeros(features.shape[:-1], bool))
    return memory, _allowed(dense(params.head, seen), shown.mask)


def unroll_q_values(
    params: AgentNetwork, memory: Any, shown: tuple[Shown, Shown], ended: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The action values over time, at each step's observation and at its next: [steps, ...]."""
    now, last = shown
    features = _embed(params, now.own), _embed(params, last.own)
    _, seen_t, then_t = recall(params.memory, memory, features, ended)
    q_values, next_q_values = dense(params.head, seen_t), dense(params.head, then_t)
    return _allowed(q_values, now.mask), _allowed(next_q_values, last.mask)


def team_q_values(
    params: Networks,
    memory: dict[str, Any],
    shown: tuple[dict[str, Shown], dict[str, Shown]],
    ended: jax.Array,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The same for all policies, by name; an episode ends for all agents at once."""
    q_values, next_q_values = {}, {}
    for name, network in params.agents.items():
        now, last = (by_policy[name] for by_policy in shown)
        over = jnp.broadcast_to(ended[..., None], now.own.shape[:-1])
        given = memory[name], (now, last), over
        q_values[name], next_q_values[name] = unroll_q_values(network, *given)
    return q_values, next_q_values


def q_total(
    params: Networks,
    q_values: dict[str, jax.Array],
    action: dict[str, jax.Array],
    shown: dict[str, Shown],
) -> jax.Array:
    """Q_tot of the joint action; agents are in the order of their policies' names."""
    chosen = [
        jnp.take_along_axis(q_values[name], action[name][..., None], axis=-1)[..., 0]
        for name in sorted(q_values)
    ]
    world = next(iter(shown.values())).world
    return mix(params.mixer, jnp.concatenate(chosen, axis=-1), world)


def act(
    params: dict[str, AgentNetwork],
    memory: dict[str, Any],
    shown: dict[str, Shown],
    keys: Sequence[jax.Array | None],
    epsilon: Any,
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """The next memory and ε-greedy actions, by policy; without a key, the greedy actions."""
    action = {}
    for key, (name, network) in zip(keys, params.items(), strict=True):
        after, q_values = agent_q_values(network, memory[name], shown[name])
        memory = memory | {name: after}
        action[name] = epsilon_greedy(key, q_values, shown[name].mask, epsilon)
    return memory, action


def play(
    params: dict[str, AgentNetwork], memory: Any, shown: dict[str, Shown], key: Any, epsilon: Any
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """The same in one environment, with one key or none; `memory` is None at an episode's start."""
    if memory is None:
        memory = {n: start(of.memory, shown[n].own.shape[:-1]) for n, of in params.items()}
    keys = [None] * len(params) if key is None else jax.random.split(key, len(params))
    return act(params, memory, shown, list(keys), epsilon)


def epsilon_greedy(
    key: jax.Array | None, q_values: jax.Array, mask: Any, epsilon: Any
) -> jax.Array:
    """Each agent's greedy action, or with probability ε a uniform one among those allowed.

    Without a key, the greedy one.
    """
    best = jnp.argmax(q_values, axis=-1).astype(jnp.int32)
    if key is None:
        return best
    explore_key, action_key = jax.random.split(key)
    uniform = Categorical(jnp.zeros_like(q_values))
    allowed = uniform if isinstance(mask, tuple) else masked(uniform, mask)
    explores = jax.random.uniform(explore_key, q_values.shape[:-1]) < epsilon
    return jnp.where(explores, allowed.sample(action_key), best)


def _embed(params: AgentNetwork, own: jax.Array) -> jax.Array:
    return jax.nn.relu(dense(params.embed, with_index(own)))


def _allowed(q_values: jax.Array, mask: Any) -> jax.Array:
    return q_values if isinstance(mask, tuple) else jnp.where(mask.astype(bool), q_values, -1e9)
