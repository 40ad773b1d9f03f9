"""Steps as replay stores them, and the n-step transitions that are read from them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.rl.replay import Ring, read
from shoal.rl.returns import n_step
from shoal.tracing.stage import gather


class StoredStep(NamedTuple):
    """A step as replay stores it; at an episode's end `next_obs` is its last observation."""

    obs: Any
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: Any


class Transition(NamedTuple):
    """An n-step transition; `discount` is that of the value at `next_obs`, 0 at a termination."""

    obs: Any
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    next_obs: Any


class Sample(NamedTuple):
    """What a tick's updates draw from one environment's replay: [updates, windows] of each."""

    batch: Any
    first: jax.Array  # the index of a window's first step
    ratio: jax.Array  # a window's probability over that of uniform sampling


class PriorityUpdate(NamedTuple):
    """New priorities for the windows that were learnt from, sent from the learner to replay."""

    first: jax.Array  # the index of a window's first step, or -1: none
    priority: jax.Array


def example(obs: Any, action: jax.Array) -> StoredStep:
    """A stored step with the shapes and dtypes of `obs` and `action`, for replay to allocate."""
    return StoredStep(obs, action, jnp.float32(0), jnp.bool(0), jnp.bool(0), obs)


def no_priorities(shape: tuple[int, ...]) -> PriorityUpdate:
    """The priority update before the first update of the learner: none."""
    return PriorityUpdate(jnp.full(shape, -1, jnp.int32), jnp.ones(shape))


def new_priorities(
    first: jax.Array, td_error: jax.Array, exponent: float, ready: jax.Array
) -> PriorityUpdate:
    """The new priority |δ|^ω of each window; none until learning starts.

    `td_error` is |δ| of [updates, environments, windows], as a tick's updates return it.
    """
    priority = (jnp.swapaxes(td_error, 0, 1) + 1e-3) ** exponent
    return PriorityUpdate(jnp.where(ready, first, -1), jnp.where(ready, priority, 1))


def read_transitions(ring: Ring, first: jax.Array, steps: int, discount: float) -> Transition:
    """The transitions over up to `steps` steps from the steps with indices `first`.

    A transition is shorter where its episode ends. Of each window's observations only the first
    and the last are read.
    """
    stored: StoredStep = ring.steps
    window = (stored.reward, stored.terminated, stored.truncated)
    window = read(ring._replace(steps=window), first, steps)
    reward_t, terminated_t, truncated_t = (jnp.moveaxis(x, -1, 0) for x in window)
    reward, next_discount, last = n_step(reward_t, terminated_t, truncated_t, discount)
    start = read(ring._replace(steps=(stored.obs, stored.action)), first, 1)
    end = read(ring._replace(steps=stored.next_obs), first + last, 1)
    (obs, action), next_obs = jax.tree.map(lambda x: jnp.squeeze(x, first.ndim), (start, end))
    return Transition(obs, action, reward, next_discount, next_obs)


def importance(ratio: jax.Array, exponent: jax.Array | float) -> jax.Array:
    """Importance weights (n P)^-β, over the largest of each update (Schaul et al., 2016).

    They are [environments, updates, windows]; the largest is over all replicas' environments.
    """
    weight = jnp.maximum(ratio, 1e-6) ** -exponent
    largest = jnp.max(gather(jnp.max(weight, axis=2)), axis=0)
    return weight / largest[:, None]
