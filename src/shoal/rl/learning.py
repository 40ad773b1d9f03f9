"""Learning from replay: a tick's steps, and the number of updates of its rate contract."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.rl.replay import Replay, init_replay

Tree = Any
Rows = TypeVar("Rows")
Nets = TypeVar("Nets")


class Learner(NamedTuple):
    """What learning carries from tick to tick; nothing of it has a row an environment."""

    params: Any
    target: Any
    opt_state: Any
    ticks: jax.Array
    updates: jax.Array


def init_learner(params: Any, opt_state: Any) -> Learner:
    """The initial learner: the target is a copy of the parameters."""
    return Learner(params, params, opt_state, jnp.int32(0), jnp.int32(0))


def init_rings(example: Tree, capacity: int, envs: int, exponent: float = 0.0) -> Replay:
    """An empty replay an environment for steps like `example`; with priorities by an exponent."""
    ring = init_replay(example, capacity, exponent)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (envs, *x.shape)), ring)


def collected(
    turn: Callable[[Rows, Any], tuple[Rows, Any]], rows: Rows, steps: int
) -> tuple[Rows, Tree, dict[str, jax.Array]]:
    """What `steps` turns leave, what is kept of them, and what is counted of them.

    A turn gives what it leaves, and (what is to be kept, counts), a row an environment of each.
    Kept things come as replay takes them: [environments, steps, ...].
    """
    rows, (kept, counts) = lax.scan(turn, rows, length=steps)
    kept = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), kept)
    return rows, kept, jax.tree.map(lambda x: jnp.sum(x, axis=0), counts)


def for_updates(drawn: Tree, updates: int, windows: int) -> Tree:
    """What one environment's replay gives to a tick: [updates, windows, ...]."""
    return jax.tree.map(lambda x: x.reshape(updates, windows, *x.shape[1:]), drawn)


def update_often(
    update: Callable[[Nets, Any], tuple[Nets, Any]], nets: Nets, given: Tree, ready: jax.Array
) -> tuple[Nets, dict[str, jax.Array], Tree]:
    """What a tick's updates in turn make of `nets`, the mean parts of the loss, and the rest.

    `given` is [environments, updates, ...]. An update gives (parts, the rest) beside its nets. The
    parts are 0 before it is time to learn.
    """
    given = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), given)
    nets, (parts, rest) = lax.scan(update, nets, given)
    return nets, jax.tree.map(lambda x: jnp.where(ready, jnp.mean(x), 0), parts), rest


def moved(
    rule: optax.GradientTransformation, params: Any, opt_state: Any, grads: Any, due: jax.Array
) -> tuple[Any, Any]:
    """The parameters and the optimiser's state after one update, if it is due."""
    updates, after = rule.update(grads, opt_state)
    new = optax.apply_updates(params, updates), after
    return where(due, new, (params, opt_state))


def update_target(params: Any, target: Any, due: jax.Array, tau: float) -> Any:
    """The target network, moved towards `params` by a share of `tau` where that is due."""
    return optax.incremental_update(params, target, jnp.where(due, tau, 0))


def where(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """`new` where the condition holds, else `old`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
