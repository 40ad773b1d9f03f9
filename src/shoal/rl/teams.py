"""What a team sees, and the networks of one of its policies: actors, and a critic of the whole.

Agents are the last axis before features: own features are [..., agents, features].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shoal.envs.spaces import MASK, SEEN, WORLD, leaves, parts
from shoal.rl import normalise
from shoal.rl.distributions import Distribution, check_mask, masked
from shoal.rl.memory import Memory, forget, init_memory, remember, start, unroll, width_of
from shoal.rl.nets import TANH, Style, init_mlp, mlp, style_of
from shoal.rl.normalise import Moments
from shoal.rl.policy import Actor, distribution, init_actor
from shoal.rl.rollouts import Rollout
from shoal.rl.routing import Policy, Routes
from shoal.rl.torso import check_flat

OWN = 0x3E302  # sets the key of a critic's memory apart from those of its layers


class Shown(NamedTuple):
    """What the agents of one policy are shown."""

    own: jax.Array  # [..., agents, features]
    mask: Any  # [..., agents, actions]: what each may do; () without a mask
    world: Any  # [..., features] that all share: the world's state, or what all agents see; or ()


class Member(NamedTuple):
    """The parameters of one policy, whose critic sees the world too if it is central.

    The critic has a memory of its own, or sees what the actor's makes of the observation.
    """

    memory: Memory
    actor: Actor
    critic: Any  # layers; () where none is needed
    critic_memory: Memory = ()

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


class ShownMoments(NamedTuple):
    """The moments of what the agents of one policy are shown."""

    own: Moments
    world: Any  # (), where the critic isn't central


def init_moments(routes: Routes, settings: Any) -> dict[str, ShownMoments]:
    """Of every policy: nothing seen yet."""
    own, world = widths(routes)
    of_world = normalise.init_moments((world,)) if settings.central else ()
    return {n: ShownMoments(normalise.init_moments((of,)), of_world) for n, of in own.items()}


def update_moments(moments: ShownMoments, shown: Shown, weight: Any) -> ShownMoments:
    """The moments after seeing [steps, envs, ...]; an inactive agent's own features don't count."""
    own = normalise.update_moments(moments.own, shown.own, weight)
    if isinstance(shown.world, tuple):
        return moments._replace(own=own)
    return ShownMoments(own, normalise.update_moments(moments.world, shown.world))


def see(shown: Shown, moments: ShownMoments, settings: Any) -> Shown:
    """What networks see: standardised and with the agent's index, if so set."""
    if settings.norm_obs:
        own = normalise.normalise(moments.own, shown.own)
        has_world = not isinstance(shown.world, tuple)
        world = normalise.normalise(moments.world, shown.world) if has_world else ()
        shown = shown._replace(own=own, world=world)
    if settings.agent_ids:
        shown = shown._replace(own=with_index(shown.own))
    return shown


def with_index(own: jax.Array) -> jax.Array:
    """Features of [..., agents, features] with each agent's index among them, one-hot."""
    agents = own.shape[-2]
    index = jnp.broadcast_to(jnp.eye(agents), (*own.shape[:-1], agents))
    return jnp.concatenate([own, index], axis=-1)


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
    critic_memory: tuple[str, int] = ("none", 0),
    style: Style = TANH,
) -> Member:
    """Networks for (own features, features of the world, actions); memories are kind and width."""
    actor_key, critic_key = keys
    own, world, actions = spaces
    remembers = init_memory(jax.random.fold_in(actor_key, 1), memory[0], own, memory[1])
    inputs = width_of(remembers, own)
    kind, width = critic_memory
    critics = init_memory(jax.random.fold_in(critic_key, OWN), kind, own + world, width)
    seen = width_of(critics, own + world) if critics else inputs + world
    critic = init_mlp(critic_key, (seen, *hidden, 1), style=style)
    actor = init_actor(actor_key, (inputs, *hidden), actions, style)
    return Member(remembers, actor, critic, critics)


def init_members(key: jax.Array, routes: Routes, settings: Any) -> dict[str, Member]:
    """The networks of every policy, by its name."""
    own, world = widths(routes)
    memory, params = (settings.memory, settings.memory_width), {}
    critics = ("none", 0) if settings.shared_memory else memory
    for i, p in enumerate(routes.policies):
        keys = jax.random.split(jax.random.fold_in(key, i))
        width = own[p.name] + (len(p.agents) if settings.agent_ids else 0)
        spaces = width, world if settings.central else 0, p.action_space
        nets = settings.hidden, memory, critics, style_of(settings)
        params[p.name] = init_member((keys[0], keys[1]), spaces, *nets)
    return params


def start_memory(params: Member, rows: tuple[int, ...]) -> tuple[Any, Any]:
    """What the actor and the critic remember at first."""
    return start(params.memory, rows), start(params.critic_memory, rows)


def decide(params: Member, memory: Any, shown: Shown) -> tuple[Any, Distribution]:
    """The new memory, and each agent's distribution."""
    of_actor, of_critic = memory
    of_actor, seen = remember(params.memory, of_actor, shown.own, _never(shown.own))
    if params.critic_memory:
        world = _with_world(shown.own, shown.world)
        of_critic, _ = remember(params.critic_memory, of_critic, world, _never(world))
    return (of_actor, of_critic), _policy(params, seen, shown.mask)


def act(
    params: dict[str, Member], memory: dict[str, Any], shown: dict[str, Shown], keys: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The next memory, and the actions drawn and their log-probabilities, by policy."""
    after, action, log_prob = {}, {}, {}
    for key, (name, of) in zip(keys, params.items(), strict=True):
        after[name], pi = decide(of, memory[name], shown[name])
        action[name] = pi.sample(key)
        log_prob[name] = pi.log_prob(action[name])
    return after, action, log_prob


def play(
    params: dict[str, Member], routes: Routes, shown: dict[str, Shown], memory: Any, key: Any = None
) -> tuple[Any, Any]:
    """All agents' likeliest actions in one environment, and what is remembered; None: nothing.

    With a key actions are drawn instead.
    """
    if memory is None:
        memory = {n: start_memory(of, shown[n].own.shape[:-1]) for n, of in params.items()}
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

    def along(of: Memory, state: Any, seen: jax.Array) -> jax.Array:
        seen_t, fresh_t = (jnp.swapaxes(x, 0, 1) for x in (seen, is_first))
        return jnp.swapaxes(unroll(of, state, seen_t, fresh_t)[1], 0, 1)

    of_actor, of_critic = memory or ((), ())
    seen = along(params.memory, of_actor, shown.own) if params.memory else shown.own
    if params.critic_memory:
        world = along(params.critic_memory, of_critic, _with_world(shown.own, shown.world))
    else:
        world = _with_world(seen, shown.world)
    return _policy(params, seen, shown.mask), mlp(params.critic, world)[..., 0]


def rollouts_by_policy(routes: Routes, steps: Any, done: tuple) -> dict[str, Rollout]:
    """Each policy's rollout; `done` is its actions, their logs, what was shown, and memory."""
    fields = ("reward", "terminated", "truncated", "active")
    outcome = {field: routes.split(getattr(steps, field), 2) for field in fields}
    action, log_prob, shown, last, memory = done
    return {
        name: Rollout(
            obs=shown[name],
            action=action[name],
            log_prob=log_prob[name],
            last_obs=last[name],
            after=(),
            memory=memory[name],
            **{field: each[name] for field, each in outcome.items()},
        )
        for name in shown
    }


def forward(
    params: Member, shown: tuple[Shown, Shown], memory: Any, ended: jax.Array
) -> tuple[Any, jax.Array, jax.Array]:
    """What was remembered before each step, the value of what it acted on and of what it led to.

    `shown` is both, [steps, envs, ...]; `memory` what was remembered before the first step.
    """
    now, last = shown
    of_actor_t, of_critic_t, seen_t, then_t = (), (), now.own, last.own
    if params.memory:
        own = now.own, last.own
        of_actor_t, seen_t, then_t = recall(params.memory, memory[0], own, ended)
    if params.critic_memory:
        both = _with_world(now.own, now.world), _with_world(last.own, last.world)
        of_critic_t, *both = recall(params.critic_memory, memory[1], both, ended)
    else:
        both = _with_world(seen_t, now.world), _with_world(then_t, last.world)
    value_t, next_value_t = (mlp(params.critic, x)[..., 0] for x in both)
    return (of_actor_t, of_critic_t), value_t, next_value_t


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


def _with_world(seen: jax.Array, world: Any) -> jax.Array:
    """What each agent sees, with the world beside it if there is one."""
    if isinstance(world, tuple):
        return seen
    shared = jnp.broadcast_to(world[..., None, :], (*seen.shape[:-1], world.shape[-1]))
    return jnp.concatenate([seen, shared], axis=-1)


def _never(seen: jax.Array) -> jax.Array:
    return jnp.zeros(seen.shape[:-1], bool)
