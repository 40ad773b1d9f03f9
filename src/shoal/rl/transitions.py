"""The steps that replay stores, and transitions over several of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.rl.replay import Ring, read
from shoal.rl.returns import n_step
from shoal.tracing.stage import gather


class Seen(NamedTuple):
    """A stored step; `next_obs` is what it truly led to, also where an episode ended."""

    obs: Any
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: Any


class Transition(NamedTuple):
    """From an observation to a later one, whose value is multiplied by `discount`: 0 at the end."""

    obs: Any
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    next_obs: Any


class Drawn(NamedTuple):
    """A sample of one environment's replay for a tick: [updates, windows] of each."""

    batch: Any
    first: jax.Array  # the number of a window's first step
    ratio: jax.Array  # how often the window is drawn against uniformly


class PriorityUpdate(NamedTuple):
    """New priorities of windows, named by their first steps."""

    first: jax.Array  # -1: none
    priority: jax.Array


def example(obs: Any, action: jax.Array) -> Seen:
    """A stored step with observations like `obs`, to allocate replay by."""
    return Seen(obs, action, jnp.float32(0), jnp.bool(0), jnp.bool(0), obs)


def no_priorities(shape: tuple[int, ...]) -> PriorityUpdate:
    """An update of no priorities, before anything is learnt."""
    return PriorityUpdate(jnp.full(shape, -1, jnp.int32), jnp.ones(shape))


def new_priorities(
    first: jax.Array, td_error: jax.Array, exponent: float, ready: jax.Array
) -> PriorityUpdate:
    """The new priorities |δ|^ω of windows; none before learning is ready.

    `td_error` is [updates, environments, windows], as a tick's updates give it.
    """
    priority = (jnp.swapaxes(td_error, 0, 1) + 1e-3) ** exponent
    return PriorityUpdate(jnp.where(ready, first, -1), jnp.where(ready, priority, 1))


def read_transitions(ring: Ring, first: jax.Array, steps: int, discount: float) -> Transition:
    """The transitions over up to `steps` steps that begin at the steps of numbers `first`.

    One ends early where its episode does. Only what is needed of each window is read.
    """
    seen: Seen = ring.steps
    window = read(ring._replace(steps=(seen.reward, seen.terminated, seen.truncated)), first, steps)
    reward_t, terminated_t, truncated_t = (jnp.moveaxis(x, -1, 0) for x in window)
    reward, follow, last = n_step(reward_t, terminated_t, truncated_t, discount)
    start = read(ring._replace(steps=(seen.obs, seen.action)), first, 1)
    end = read(ring._replace(steps=seen.next_obs), first + last, 1)
    (obs, action), next_obs = jax.tree.map(lambda x: jnp.squeeze(x, first.ndim), (start, end))
    return Transition(obs, action, reward, follow, next_obs)


def importance(ratio: jax.Array, exponent: jax.Array | float) -> jax.Array:
    """(n P)^-β of each window, over the largest of its update: [environments, updates, windows].

    The largest is that of all replicas' environments (Schaul et al., 2016).
    """
    weight = jnp.maximum(ratio, 1e-6) ** -exponent
    largest = jnp.max(gather(jnp.max(weight, axis=2)), axis=0)
    return weight / largest[:, None]
