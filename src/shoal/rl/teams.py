"""What a team sees, and the networks of one of its policies: actors, and a critic of the whole.

Agents are the last axis before features: own features are [..., agents, features].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shoal.envs.spaces import MASK, SEEN, WORLD, leaves, parts
from shoal.rl.distributions import Distribution, check_mask, masked
from shoal.rl.memory import Memory, forget, init_memory, remember, start, unroll, width_of
from shoal.rl.nets import TANH, Style, init_mlp, mlp
from shoal.rl.policy import Actor, distribution, init_actor
from shoal.rl.routing import Policy, Routes
from shoal.rl.torso import check_flat


class Shown(NamedTuple):
    """What the agents of one policy are shown."""

    own: jax.Array  # [..., agents, features]
    mask: Any  # [..., agents, actions]: what each may do; () without a mask
    world: Any  # [..., features] that all share: the world's state, or what all agents see; or ()


class Member(NamedTuple):
    """The parameters of one policy; what it sees and remembers goes to its actor and its critic."""

    memory: Memory
    actor: Actor
    critic: Any  # layers, which see the world too if the critic is central; () where none is needed

    @property
    def acting(self) -> "Member":
        """The part that choosing actions needs."""
        return self._replace(critic=())


def look(routes: Routes, obs: Any, axis: int, central: bool) -> dict[str, Shown]:  # noqa: FBT001
    """What the agents of each policy are shown; the world only where a `central` critic looks."""
    by_policy = routes.split(obs, axis)
    found = {p.name: _shown(p, by_policy[p.name], axis) for p in routes.policies}
    if not central:
        return {name: shown._replace(world=()) for name, shown in found.items()}
    world = next(iter(found.values())).world
    if isinstance(world, tuple):
        each = [shown.own.reshape(*shown.own.shape[:axis], -1) for shown in found.values()]
        world = jnp.concatenate(each, axis=-1)
    return {name: shown._replace(world=world) for name, shown in found.items()}


def widths(routes: Routes) -> tuple[dict[str, int], int]:
    """How many features of its own each policy's agents see, and how many the world has."""
    seen = {p.name: parts(p.observation_space)[0].size for p in routes.policies}
    world = parts(routes.policies[0].observation_space)[2]
    all_own = sum(seen[p.name] * len(p.agents) for p in routes.policies)
    return seen, world.size if world else all_own


def check_team(algorithm: Any, routes: Routes) -> Routes:
    """`routes`, if every policy can see what it is shown and obey its mask."""
    for p in routes.policies:
        check_flat(type(algorithm).__name__, parts(p.observation_space)[0], algorithm.torso)
        check_mask(p.observation_space, p.action_space)
    return routes


def by_name(parts: dict[str, dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Each policy's metrics with its name before theirs; of a single one, as they are."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return {f"{policy}.{name}": x for policy, of in parts.items() for name, x in of.items()}


def init_member(
    keys: tuple[jax.Array, jax.Array],
    spaces: tuple[int, int, Any],
    hidden: tuple[int, ...],
    memory: tuple[str, int] = ("none", 0),
    style: Style = TANH,
) -> Member:
    """Networks for (own features, features of the world, actions); `memory` is kind and width."""
    actor_key, critic_key = keys
    own, world, actions = spaces
    kind, width = memory
    remembers = init_memory(jax.random.fold_in(actor_key, 1), kind, own, width)
    inputs = width_of(remembers, own)
    critic = init_mlp(critic_key, (inputs + world, *hidden, 1), style=style)
    return Member(remembers, init_actor(actor_key, (inputs, *hidden), actions, style), critic)


def decide(params: Member, memory: Any, shown: Shown) -> tuple[Any, Distribution]:
    """The new memory, and each agent's distribution."""
    memory, seen = remember(params.memory, memory, shown.own, _never(shown.own))
    return memory, _policy(params, seen, shown.mask)


def play(
    params: dict[str, Member], routes: Routes, shown: dict[str, Shown], memory: Any, key: Any = None
) -> tuple[Any, Any]:
    """All agents' likeliest actions in one environment, and what is remembered; None: nothing.

    With a key actions are drawn instead.
    """
    if memory is None:
        memory = {n: start(of.memory, shown[n].own.shape[:-1]) for n, of in params.items()}
    made = {name: decide(of, memory[name], shown[name]) for name, of in params.items()}
    if key is None:
        action = {name: now.mode() for name, (_, now) in made.items()}
    else:
        keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))
        action = {name: now.sample(keys[name]) for name, (_, now) in made.items()}
    return routes.join(action, 0), {name: kept for name, (kept, _) in made.items()}


def policy_and_value(
    params: Member, shown: Shown, memory: Any, is_first: Any
) -> tuple[Distribution, jax.Array]:
    """Each agent's π(·|s), and V(s).

    With memory these are chunks, [samples, steps, ...]: `memory` is its state before each, and
    `is_first` says which steps are the first of an episode.
    """
    seen = shown.own
    if params.memory:
        seen_t, fresh_t = (jnp.swapaxes(x, 0, 1) for x in (seen, is_first))
        seen = jnp.swapaxes(unroll(params.memory, memory, seen_t, fresh_t)[1], 0, 1)
    return _policy(params, seen, shown.mask), _value(params, seen, shown.world)


def expect(
    params: Member, shown: tuple[Shown, Shown], memory: Any, ended: jax.Array
) -> tuple[Any, jax.Array, jax.Array]:
    """What was remembered before each step, the value of what it acted on and of what it led to.

    `shown` is both, [steps, envs, ...]; `memory` what was remembered before the first step.
    """
    now, last = shown
    memory_t, seen_t, then_t = (), now.own, last.own
    if params.memory:
        memory_t, seen_t, then_t = recall(params.memory, memory, (now.own, last.own), ended)
    return memory_t, _value(params, seen_t, now.world), _value(params, then_t, last.world)


def recall(
    memory: Memory, state: Any, features: tuple[jax.Array, jax.Array], ended: jax.Array
) -> tuple[Any, jax.Array, jax.Array]:
    """What was remembered before each step; what it acted on and led to, with what is remembered.

    `features` are of what each step acted on and of what it really led to, [steps, ...].
    """

    def along(state: Any, at: tuple[jax.Array, ...]) -> tuple[Any, tuple]:
        own, led_to, over = at
        after, seen = remember(memory, state, own, _never(own))
        _, then = remember(memory, after, led_to, _never(led_to))
        return forget(after, over), (state, seen, then)

    return lax.scan(along, state, (*features, ended))[1]


def _shown(policy: Policy, obs: Any, axis: int) -> Shown:
    seen, has_mask, world = parts(policy.observation_space)
    own = obs[SEEN] if has_mask or world else obs
    each = zip(leaves(seen), jax.tree.leaves(own), strict=True)
    vectors = [_vector(x, x.ndim - len(box.shape)) for box, x in each]
    mask = obs[MASK] if has_mask else ()
    # All agents are shown the same world, so that of the first will do.
    of_all = jnp.take(obs[WORLD], 0, axis=axis) if world else ()
    return Shown(jnp.concatenate(vectors, axis=-1), mask, of_all)


def _vector(x: jax.Array, axes: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:axes], -1)


def _policy(params: Member, seen: jax.Array, mask: Any) -> Distribution:
    pi = distribution(params.actor, seen)
    return pi if isinstance(mask, tuple) else masked(pi, mask)


def _value(params: Member, seen: jax.Array, world: Any) -> jax.Array:
    if not isinstance(world, tuple):
        shared = jnp.broadcast_to(world[..., None, :], (*seen.shape[:-1], world.shape[-1]))
        seen = jnp.concatenate([seen, shared], axis=-1)
    return mlp(params.critic, seen)[..., 0]


def _never(seen: jax.Array) -> jax.Array:
    return jnp.zeros(seen.shape[:-1], bool)
