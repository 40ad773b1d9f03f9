"""What was collected, as it is learnt from: whole, in pieces, as samples."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


class Rollout(NamedTuple):
    """What is learnt from: [steps, envs, ...], or [steps, envs, agents, ...]."""

    obs: Any
    action: jax.Array
    log_prob: Any  # of the action, where it is to be corrected for
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    last_obs: Any
    after: Any  # [envs, ...]: the observation that follows the last step
    memory: Any = ()  # [envs, ...]: what was remembered before the first step
    past: Any = ()  # discounted return of the episode so far, which gives rewards their scale


def ends(seen: Any) -> jax.Array:
    """Whether an episode ends with each step, terminated or truncated."""
    return seen.terminated | seen.truncated


def begins(rollout: Rollout) -> jax.Array:
    """Whether each step is the first of an episode; before the first step all is forgotten."""
    ended = ends(rollout)
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def cut(tree: Tree, length: int) -> Tree:
    """Pieces of `length` steps: [pieces, length, envs, ...]; with length 0, the steps they are.

    Pieces, not environments, are dealt out to minibatches: so each has some of all environments,
    and several learners make the minibatches of one.
    """
    if not length:
        return tree
    return jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), tree)


def as_samples(tree: Tree, length: int = 0) -> Tree:
    """Pieces of all environments along one axis: [pieces × envs, length, ...]; or steps of all."""
    # On one axis XLA's matrix products are twice as fast.
    if length:
        tree = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), tree)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
