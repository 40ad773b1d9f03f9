"""An actor and a critic: two networks that share nothing, unless they look at images."""

from typing import Any, NamedTuple

import jax

from shoal.envs.spaces import Action, Observation
from shoal.rl.blocks import map_in_blocks
from shoal.rl.distributions import Distribution
from shoal.rl.nets import Layers, init_mlp, mlp
from shoal.rl.policy import Actor, init_actor, policy
from shoal.rl.torso import Torso, embed, init_torso


class ActorCritic(NamedTuple):
    """The parameters of both."""

    torso: Torso
    actor: Actor
    critic: Any  # layers; () in the part that acts

    @property
    def acting(self) -> "ActorCritic":
        """The part that choosing actions needs."""
        return self._replace(critic=())


def init_actor_critic(
    actor_key: jax.Array,
    critic_key: jax.Array,
    spaces: tuple[Observation, Action],
    hidden: tuple[int, ...],
    torso: str = "auto",
) -> ActorCritic:
    """Networks with `hidden` layers; behind the torso that images go through there are none."""
    seen, done = spaces
    shared, sizes = init_torso(jax.random.fold_in(actor_key, 0), seen, torso, hidden)
    actor = init_actor(actor_key, sizes, done)
    return ActorCritic(shared, actor, init_mlp(critic_key, (*sizes, 1)))


def chances(params: ActorCritic, features: jax.Array) -> Distribution:
    """What the actor does on seeing `features`."""
    return policy(params.actor, embed(params.torso, features))


def chances_and_value(params: ActorCritic, features: jax.Array) -> tuple[Distribution, jax.Array]:
    """What the actor does and what the critic expects on seeing `features`."""
    seen = embed(params.torso, features)
    return policy(params.actor, seen), _value(params.critic, seen)


def value(params: ActorCritic, features: jax.Array) -> jax.Array:
    """What the critic expects; of many images, with no more at a time than a CPU's cache holds."""
    if not params.torso:
        return _value(params.critic, features)
    batch, image = features.shape[:-3], features.shape[-3:]
    seen = map_in_blocks(lambda x: embed(params.torso, x), features.reshape(-1, *image))
    return _value(params.critic, seen).reshape(batch)


def _value(critic: Layers, seen: jax.Array) -> jax.Array:
    return mlp(critic, seen)[..., 0]
