"""Off-policy learning: collects a tick's steps, and runs the updates of a tick."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.rl.replay import Replay, Ring, init_replay

Tree = Any
Carry = TypeVar("Carry")


class TrainState(NamedTuple):
    """What one update changes."""

    params: Any
    target: Any
    opt_state: Any
    updates: jax.Array


class Learner(NamedTuple):
    """The learner's state between ticks; no part of it has a row per environment."""

    params: Any
    target: Any
    opt_state: Any
    ticks: jax.Array
    updates: jax.Array

    @property
    def train_state(self) -> TrainState:
        """All but the number of ticks."""
        return TrainState(self.params, self.target, self.opt_state, self.updates)

    def after(self, state: TrainState) -> "Learner":
        """The learner one tick later, with what its updates made of the train state."""
        return Learner(**state._asdict(), ticks=self.ticks + 1)


class Buffer(NamedTuple):
    """One environment's replay without priorities, and the key of its sampling."""

    key: jax.Array
    ring: Ring


def init_learner(params: Any, opt_state: Any) -> Learner:
    """The learner before the first update, whose target network equals `params`."""
    return Learner(params, params, opt_state, jnp.int32(0), jnp.int32(0))


def init_replays(example: Tree, capacity: int, envs: int, exponent: float = 0.0) -> Replay:
    """An empty replay per environment for steps like `example`, prioritised by `exponent`."""
    replay = init_replay(example, capacity, exponent)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (envs, *x.shape)), replay)


def collect_steps(
    step: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, num_steps: int
) -> tuple[Carry, Tree, dict[str, jax.Array]]:
    """The carry after `num_steps` calls of `step`, the stored steps, and sums of the metrics.

    `step` returns its carry and (the stored step, metrics), each with a row per environment.
    Stored steps are returned in the layout of replay: [environments, steps, ...].
    """
    carry, (stored, metrics) = lax.scan(step, carry, length=num_steps)
    stored = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), stored)
    return carry, stored, jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)


def split_updates(sample: Tree, updates: int, batch_size: int) -> Tree:
    """One environment's sample of a tick, split into its updates: [updates, batch_size, ...]."""
    return jax.tree.map(lambda x: x.reshape(updates, batch_size, *x.shape[1:]), sample)


def run_updates(
    update: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, sample: Tree, ready: jax.Array
) -> tuple[Carry, dict[str, jax.Array], Tree]:
    """The carry after a tick's updates, the mean of their metrics, and their other outputs.

    `sample` is [environments, updates, ...]. `update` returns its carry and (metrics, others).
    Metrics are 0 until learning starts.
    """
    sample = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), sample)
    carry, (metrics, others) = lax.scan(update, carry, sample)
    return carry, jax.tree.map(lambda x: jnp.where(ready, jnp.mean(x), 0), metrics), others


def apply_gradients(
    optimiser: optax.GradientTransformation, params: Any, opt_state: Any, grads: Any, due: jax.Array
) -> tuple[Any, Any]:
    """The parameters and the optimiser's state after one update, or unchanged if it is not due."""
    updates, new_opt_state = optimiser.update(grads, opt_state)
    new = optax.apply_updates(params, updates), new_opt_state
    return where(due, new, (params, opt_state))


def update_target(params: Any, target: Any, due: jax.Array, tau: float) -> Any:
    """τ θ + (1 - τ) θ' where an update of the target network is due, else θ'."""
    return optax.incremental_update(params, target, jnp.where(due, tau, 0))


def where(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """`new` where the condition holds, else `old`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
