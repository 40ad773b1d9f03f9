"""What was collected, as it is learnt from: whole, in pieces, as samples."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shoal.envs import episode_totals
from shoal.errors import SettingError
from shoal.rl.memory import forget

Tree = TypeVar("Tree")
Nets = TypeVar("Nets")
Rows = TypeVar("Rows", bound=tuple)


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


def roll_out(
    act: Callable[..., Any], env: Any, rows: Rows, steps: int
) -> tuple[Rows, Rollout, dict[str, jax.Array]]:
    """What `steps` steps of every environment leave, what is learnt from, and what is counted.

    `rows` are keys, the environments' states, observations and memory. `act` takes all but the
    states, and gives keys, memory, the action, and its log-probability where that is wanted.
    """

    def turn(carry: tuple, _: None) -> tuple:
        keys, env_states, obs, memory = carry
        keys, memory, action, *log_prob = act(keys, obs, memory)
        env_states, step = env.step(env_states, action)
        rows = keys, env_states, step.obs, forget(memory, ends(step))
        return rows, (obs, action, log_prob, step._replace(obs=()))

    after, (obs, action, log_prob, made) = lax.scan(turn, rows, length=steps)
    led_to = (made.reward, made.terminated, made.truncated, made.last_obs)
    chances = log_prob[0] if log_prob else ()
    rollout = Rollout(obs, action, chances, *led_to, after[2], rows[3])
    return after, rollout, jax.tree.map(lambda x: jnp.sum(x, axis=0), episode_totals(made))


def in_epochs(
    update: Callable[[Nets, Any], tuple[Nets, Any]], start: Nets, key: jax.Array, epochs: int,
    minibatches: tuple[int, int],
) -> tuple[Nets, jax.Array, Any]:  # fmt: skip
    """What passes over all pieces, each in an order of its own, make of `start`.

    `minibatches` are how many, and of how many pieces each. Also the next key, and mean parts.
    """
    many, each = minibatches

    def epoch(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        pieces = jax.random.permutation(key, many * each)
        return lax.scan(update, carry, pieces.reshape(many, -1))

    keys = jax.random.split(key, epochs + 1)
    after, parts = lax.scan(epoch, start, keys[1:])
    return after, keys[0], jax.tree.map(jnp.mean, parts)


def check_pieces(title: str, steps: int, minibatches: int, length: int) -> int:
    """`steps` if they are whole minibatches of pieces of `length` steps, 0 being single steps."""
    if steps % (minibatches * (length or 1)):
        each = f" of sequences of {length}" if length else ""
        raise SettingError(
            f"{title} can't divide {steps} steps into {minibatches} minibatches{each}",
            "Make num_steps a multiple of num_minibatches, and of sequence_length times that.",
        )
    return steps


def steps_of_piece(settings: Any) -> int:
    """How many steps memory is learnt through at a time; 0 without memory."""
    if settings.memory == "none":
        return 0
    return settings.sequence_length or settings.num_steps // settings.num_minibatches


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
