"""What replay keeps of a step, and several kept steps as one transition."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.rl.replay import Ring, read
from shoal.rl.returns import n_step
from shoal.tracing.stage import gather


class Seen(NamedTuple):
    """A step as it is kept; `next_obs` is what it truly led to, also where an episode ended."""

    obs: Any
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: Any


class Transition(NamedTuple):
    """From an observation to a later one, whose worth counts times `discount`: 0 at the end."""

    obs: Any
    action: jax.Array
    reward: jax.Array
    discount: jax.Array
    next_obs: Any


class Drawn(NamedTuple):
    """What replay gives to a tick's learning: [updates, windows] of each, from one environment."""

    batch: Any
    first: jax.Array  # the number of a window's first step
    ratio: jax.Array  # how often the window is drawn against uniformly


class Told(NamedTuple):
    """What learning tells replay: the windows it saw, by number, and their new priorities."""

    first: jax.Array  # -1: none
    priority: jax.Array


def example(obs: Any, action: jax.Array) -> Seen:
    """What is kept of a step that shows `obs`, or the like: for replay to make room."""
    return Seen(obs, action, jnp.float32(0), jnp.bool(0), jnp.bool(0), obs)


def nothing_told(shape: tuple[int, ...]) -> Told:
    """What learning tells before it has seen anything."""
    return Told(jnp.full(shape, -1, jnp.int32), jnp.ones(shape))


def tell(first: jax.Array, surprise: jax.Array, exponent: float, ready: jax.Array) -> Told:
    """That each window is worth |δ|^ω to replay; nothing before it is time to learn.

    `surprise` is [updates, environments, windows], as a tick's updates give it.
    """
    priority = (jnp.swapaxes(surprise, 0, 1) + 1e-3) ** exponent
    return Told(jnp.where(ready, first, -1), jnp.where(ready, priority, 1))


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
