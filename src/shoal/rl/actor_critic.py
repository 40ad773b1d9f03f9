"""An actor and a critic: two networks that share only the image torso and the memory.

Observations go through a torso if they are images, then through memory if there is one, then to
both networks. Actions that an observation's mask forbids are never chosen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shoal.envs.spaces import Action, Observation, parts
from shoal.rl.blocks import map_in_blocks
from shoal.rl.distributions import Distribution, check_mask, masked
from shoal.rl.memory import Memory, forget, init_memory, remember, start, unroll, width_of
from shoal.rl.nets import TANH, Layers, Style, computed_in, init_mlp, mlp, style_of
from shoal.rl.observations import own_and_mask
from shoal.rl.own_network import OwnNetwork
from shoal.rl.policy import Actor, distribution, init_actor
from shoal.rl.rollouts import Rollout, is_last
from shoal.rl.torso import Torso, embed, init_torso
from shoal.tracing.rowwise import map_rows, where_rarely


class ActorCritic(NamedTuple):
    """The parameters of both."""

    torso: Torso
    actor: Actor
    critic: Any  # layers; () in the part that acts
    memory: Memory = ()

    @property
    def acting(self) -> "ActorCritic":
        """The part that choosing actions needs."""
        return self._replace(critic=())


class Outputs(NamedTuple):
    """The networks' outputs on a rollout: [steps, envs, ...]."""

    features: Any  # with a mask beside them where there is one
    memory: Any  # before each step
    seen: jax.Array  # what the actor and the critic got
    value: jax.Array  # of what each step acted on
    next_value: jax.Array  # of what each step really led to


def init_actor_critic(
    keys: tuple[jax.Array, jax.Array],
    spaces: tuple[Observation, Action],
    hidden: tuple[int, ...],
    torso: Any = "auto",
    memory: tuple[str, int] = ("none", 0),
    style: Style = TANH,
) -> ActorCritic:
    """Networks with `hidden` layers of a style; behind torsos other than `mlp` there are none.

    `memory` is its kind and width.
    """
    actor_key, critic_key = keys
    seen, done = spaces
    check_mask(seen, done)
    own = parts(seen)[0]
    shared, (inputs, *others) = init_torso(jax.random.fold_in(actor_key, 0), own, torso, hidden)
    kind, width = memory
    remembers = init_memory(jax.random.fold_in(actor_key, 1), kind, inputs, width)
    sizes = (width_of(remembers, inputs), *others)
    actor = init_actor(actor_key, sizes, done, style)
    critic = init_mlp(critic_key, (*sizes, 1), style=style)
    return ActorCritic(shared, actor, critic, remembers)


def init(keys: tuple[jax.Array, jax.Array], env: Any, settings: Any) -> ActorCritic:
    """The parameters for `env` of an algorithm with these settings."""
    spaces, memory = (env.observation_space, env.action_space), settings.memory
    sizes = settings.hidden, settings.torso, (memory, settings.memory_width), style_of(settings)
    return computed_in(init_actor_critic(keys, spaces, *sizes), settings.compute_dtype)


def policy(params: ActorCritic, features: Any) -> Distribution:
    """π(·|s) for `features` at the start of an episode."""
    own, mask = own_and_mask(features)
    return _policy(params, embed(params.torso, own), mask)


def policy_of(params: ActorCritic, outputs: Outputs) -> Distribution:
    """π(·|s) at each step of a rollout, from the embeddings that `forward` computed."""
    return _policy(params, outputs.seen, own_and_mask(outputs.features)[1])


def act(params: ActorCritic, memory: Any, features: Any) -> tuple[Any, Distribution]:
    """The new memory, and the actor's distribution for `features`."""
    own, mask = own_and_mask(features)
    seen = embed(params.torso, own)
    memory, seen = remember(params.memory, memory, seen, _never(seen))
    return memory, _policy(params, seen, mask)


def play(
    params: ActorCritic, memory: Any, features: Any, key: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """The most likely action for `features`, and the new memory (None: none yet).

    With a key the action is sampled instead.
    """
    if memory is None:
        own, _ = own_and_mask(features)
        memory = start(params.memory, jax.eval_shape(embed, params.torso, own).shape[:-1])
    memory, now = act(params, memory, features)
    return now.mode() if key is None else now.sample(key), memory


def policy_and_value(
    params: ActorCritic, features: Any, memory: Any = (), is_first: Any = ()
) -> tuple[Distribution, jax.Array]:
    """π(·|s) and V(s) for `features`.

    With memory these are chunks, [samples, steps, ...]: `memory` is its state before each, and
    `is_first` says which steps are the first of an episode.
    """
    own, mask = own_and_mask(features)
    seen = embed(params.torso, own)
    if params.memory:
        seen_t, fresh_t = (jnp.swapaxes(x, 0, 1) for x in (seen, is_first))
        seen = jnp.swapaxes(unroll(params.memory, memory, seen_t, fresh_t)[1], 0, 1)
    return _policy(params, seen, mask), _value(params.critic, seen)


def forward(params: ActorCritic, features: Callable[[Any], Any], rollout: Rollout) -> Outputs:
    """Evaluate the networks on a rollout, without gradients through the next values."""
    if params.memory:
        return _recall(params, features, rollout)

    def look(obs: Any) -> tuple[Any, jax.Array, jax.Array]:
        seen = _embed_all(params.torso, own_and_mask(x := features(obs))[0])
        return x, seen, _value(params.critic, seen)

    features_t, seen_t, value_t = look(rollout.obs)
    # A step leads to what the next one acts on, save where the time was up: a fresh start.
    next_value_t = jnp.concatenate([value_t[1:], look(rollout.after)[2][None]])
    fixed, next_value_t = lax.stop_gradient((params, next_value_t))
    next_value_t = _where_late(rollout, fixed, features, next_value_t)
    return Outputs(features_t, (), seen_t, value_t, next_value_t)


def _where_late(
    rollout: Rollout,
    params: ActorCritic,
    features: Callable[[Any], Any],
    otherwise: jax.Array,
) -> jax.Array:
    """The values after truncated steps, from their last observations; others unchanged."""

    def look(params: ActorCritic, seen: Any) -> jax.Array:
        return _value(params.critic, embed(params.torso, seen))

    def row(late: jax.Array, seen: Any, other: jax.Array) -> jax.Array:
        return where_rarely(late, look, (params, seen), other)

    rows = (rollout.truncated, own_and_mask(features(rollout.last_obs))[0], otherwise)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return map_rows(row, flat).reshape(otherwise.shape)


def _recall(params: ActorCritic, features: Callable[[Any], Any], rollout: Rollout) -> Outputs:
    """The same with memory, step by step: each last observation is evaluated with its memory."""

    def along(memory: Any, at: tuple[jax.Array, ...]) -> tuple[Any, tuple]:
        now, last, ended = at
        after, seen = remember(params.memory, memory, now, _never(now))
        _, then = remember(params.memory, after, last, _never(last))
        return forget(after, ended), (memory, seen, then)

    features_t = features(rollout.obs)
    both = (own_and_mask(x)[0] for x in (features_t, features(rollout.last_obs)))
    now_t, last_t = (_embed_all(params.torso, x) for x in both)
    at_t = (now_t, last_t, is_last(rollout))
    _, (memory_t, seen_t, then_t) = lax.scan(along, rollout.memory, at_t)
    values = (_value(params.critic, x) for x in (seen_t, then_t))
    return Outputs(features_t, memory_t, seen_t, *values)


def value(params: ActorCritic, features: Any) -> jax.Array:
    """V(s) for `features` at the start of an episode."""
    return _value(params.critic, _embed_all(params.torso, features))


def _embed_all(torso: Torso, features: Any) -> jax.Array:
    """Of many images, no more at a time than a CPU's cache holds."""
    if not torso or isinstance(torso, OwnNetwork):
        return embed(torso, features)
    batch, image = features.shape[:-3], features.shape[-3:]
    seen = map_in_blocks(lambda x: embed(torso, x), features.reshape(-1, *image))
    return seen.reshape(*batch, -1)


def _policy(params: ActorCritic, seen: jax.Array, mask: Any) -> Distribution:
    pi = distribution(params.actor, seen)
    return pi if isinstance(mask, tuple) else masked(pi, mask)


def _value(critic: Layers, seen: jax.Array) -> jax.Array:
    return mlp(critic, seen)[..., 0]


def _never(seen: jax.Array) -> jax.Array:
    return jnp.zeros(seen.shape[:-1], bool)
