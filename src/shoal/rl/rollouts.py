"""What was collected, as it is learnt from: whole, in pieces, as samples."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shoal.envs import episode_totals
from shoal.errors import SettingError
from shoal.rl.memory import forget

Nets = TypeVar("Nets")
State = TypeVar("State", bound=Any)


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
    running_return: Any = ()  # discounted rewards of the episode so far, for their scale
    active: Any = ()  # of several agents: which had not ended before this step


class Batch(NamedTuple):
    """What PPO's loss sees: [steps, envs, ...], or [chunks, steps, envs, ...] with memory."""

    features: Any
    action: jax.Array
    log_prob: jax.Array  # of the policy that ratios are taken to
    value: jax.Array
    target: jax.Array
    advantage: jax.Array
    weight: Any  # 0 for agents that had ended before; () for a single agent
    is_first: Any = ()  # whether a step is the first of an episode; () without memory
    importance: Any = ()  # that policy's probability over the acting one's; () if they are the same
    memory: Any = ()  # [chunks, envs, ...]: at the start of each chunk


def collect(
    act: Callable[..., Any], env: Any, state: State, num_steps: int
) -> tuple[State, Rollout, dict[str, jax.Array]]:
    """The state after `num_steps` steps of every environment, the rollout, and episode totals.

    `state` has `keys`, `env_states`, `obs` and `memory`. `act` maps keys, observations and memory
    to keys, memory, the action, and optionally its log-probability.
    """

    def step_all(carry: tuple, _: None) -> tuple:
        keys, env_states, obs, memory = carry
        keys, memory, action, *log_prob = act(keys, obs, memory)
        env_states, step = env.step(env_states, action)
        carry = keys, env_states, step.obs, forget(memory, is_last(step))
        return carry, (obs, action, log_prob, step._replace(obs=()))

    start = state.keys, state.env_states, state.obs, state.memory
    after, (obs, action, log_prob, steps) = lax.scan(step_all, start, length=num_steps)
    keys, env_states, next_obs, memory = after
    rollout = Rollout(
        obs=obs,
        action=action,
        log_prob=log_prob[0] if log_prob else (),
        reward=steps.reward,
        terminated=steps.terminated,
        truncated=steps.truncated,
        last_obs=steps.last_obs,
        after=next_obs,
        memory=state.memory,
        active=steps.active,
    )
    state = state._replace(keys=keys, env_states=env_states, obs=next_obs, memory=memory)
    return state, rollout, jax.tree.map(lambda x: jnp.sum(x, axis=0), episode_totals(steps))


def run_epochs(
    update: Callable[[Nets, Any], tuple[Nets, Any]], nets: Nets, key: jax.Array, settings: Any
) -> tuple[Nets, jax.Array, Any]:
    """The networks after `update_epochs` epochs, the next key, and the mean of all metrics.

    An epoch deals the chunks, or steps, out to `num_minibatches` minibatches in a random order.
    `update` gets the networks and the indices of a minibatch's chunks.
    """
    chunks = settings.num_steps // (chunk_length(settings) or 1)

    def epoch(nets: Any, key: jax.Array) -> tuple[Any, Any]:
        order = jax.random.permutation(key, chunks)
        return lax.scan(update, nets, order.reshape(settings.num_minibatches, -1))

    keys = jax.random.split(key, settings.update_epochs + 1)
    nets, metrics = lax.scan(epoch, nets, keys[1:])
    return nets, keys[0], jax.tree.map(jnp.mean, metrics)


def check_minibatches(settings: Any) -> None:
    """Check that the steps of a rollout divide into minibatches of whole chunks."""
    steps, length = settings.num_steps, chunk_length(settings)
    if steps % (settings.num_minibatches * (length or 1)):
        each = f" of sequences of {length}" if length else ""
        raise SettingError(
            f"{type(settings).__name__} can't divide {steps} steps into "
            f"{settings.num_minibatches} minibatches{each}",
            "Make num_steps a multiple of num_minibatches, and of sequence_length times that.",
        )


def chunk_length(settings: Any) -> int:
    """How many steps memory is learnt through at a time; 0 without memory."""
    if settings.memory == "none":
        return 0
    return settings.sequence_length or settings.num_steps // settings.num_minibatches


def is_last(step: Any) -> jax.Array:
    """Whether an episode ends with each step, terminated or truncated."""
    return step.terminated | step.truncated


def is_first(rollout: Rollout) -> jax.Array:
    """Whether each step is the first of an episode; before the first step all is forgotten."""
    ended = is_last(rollout)
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def chunk(batch: Batch, length: int) -> Batch:
    """Chunks of `length` steps, [chunks, length, envs, ...], with the memory before each.

    With length 0 the steps stay as they are. Chunks, not environments, are dealt out to
    minibatches, so that each minibatch has some of all environments on any number of replicas.
    """
    if not length:
        return batch
    memory = jax.tree.map(lambda x: x[::length], batch.memory)
    batch = batch._replace(memory=())
    batch = jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), batch)
    return batch._replace(memory=memory)


def as_samples(batch: Batch, length: int = 0) -> Batch:
    """Steps of all environments along one axis; or chunks, [chunks × envs, length, ...]."""
    # On one axis XLA's matrix products are twice as fast.
    memory = jax.tree.map(_merge, batch.memory)
    batch = batch._replace(memory=())
    if length:
        batch = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), batch)
    return jax.tree.map(_merge, batch)._replace(memory=memory)


def _merge(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])
