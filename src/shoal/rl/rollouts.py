"""What was collected, as it is learnt from: whole, in pieces, as samples."""

from collections.abc import Callable
from math import gcd
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shoal.envs import episode_totals
from shoal.errors import SettingError
from shoal.rl.memory import forget
from shoal.tracing.stage import gather

OWN = 0x5A3B1E
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
    keys: Any = ()  # [envs]: after the last step; each deals out its environment's samples


class Batch(NamedTuple):
    """What PPO's loss sees: [steps, envs, ...], or [chunks, envs, steps, ...] with memory."""

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
        keys=keys,
    )
    state = state._replace(keys=keys, env_states=env_states, obs=next_obs, memory=memory)
    return state, rollout, jax.tree.map(lambda x: jnp.sum(x, axis=0), episode_totals(steps))


def run_epochs(
    update: Callable[[Nets, Any], tuple[Nets, Any]],
    nets: Nets,
    batch: Any,
    keys: jax.Array,
    settings: Any,
) -> tuple[Nets, Any]:
    """The networks after `update_epochs` epochs over `batch`, and the mean of all metrics.

    In an epoch each environment deals its samples (steps, or chunks of them) out to the
    `num_minibatches` minibatches, in a random order that its key draws. So each minibatch has
    equally many of every environment, from any time, and replicas need not know of each other. If
    the minibatches do not divide the samples, groups of environments deal together; every replica
    then learns from all of them.
    """
    samples, parts = jax.tree.leaves(batch)[0].shape[0], settings.num_minibatches
    together = parts // gcd(samples, parts)
    if together > 1:
        batch, keys = gather(batch, axis=1), gather(keys)[::together]
        batch = jax.tree.map(lambda x: _group(x, together, settings), batch)

    def draw(key: jax.Array) -> jax.Array:
        # Apart from what the same key draws in the next rollout.
        return jax.random.split(jax.random.fold_in(key, OWN), settings.update_epochs)

    def epoch(nets: Nets, keys: jax.Array) -> tuple[Nets, Any]:
        order = deal(keys, samples * together)
        return lax.scan(one, nets, order.reshape(parts, -1, order.shape[1]))

    def one(nets: Nets, chosen: jax.Array) -> tuple[Nets, Any]:
        take = jax.vmap(lambda x, i: x[i], in_axes=1, out_axes=1)
        return update(nets, jax.tree.map(lambda x: take(x, chosen), batch))

    nets, metrics = lax.scan(epoch, nets, jax.vmap(draw, out_axes=1)(keys))
    return nets, jax.tree.map(jnp.mean, metrics)


def deal(keys: jax.Array, count: int) -> jax.Array:
    """The numbers 0 to `count` - 1 in a random order for each of `keys`: [count, keys]."""
    low = (count - 1).bit_length()
    bits = jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32), out_axes=1)(keys)
    # A number in the low bits of a random one is sorted along with it: on CPUs four times as fast
    # as jax.random.permutation, which sorts the two side by side.
    drawn = bits >> low << low | jnp.arange(count, dtype=jnp.uint32)[:, None]
    return (jnp.sort(drawn, axis=0) & ((1 << low) - 1)).astype(jnp.int32)


def _group(x: jax.Array, together: int, settings: Any) -> jax.Array:
    """[samples, envs, ...] as [samples × together, envs / together, ...]."""
    samples, envs, *rest = x.shape
    if envs % together:
        raise SettingError(
            f"{type(settings).__name__} can't divide the {samples} samples of each of {envs} "
            f"environments into {settings.num_minibatches} minibatches",
            f"Let the environments be a multiple of {together}, or take fewer minibatches.",
        )
    x = jnp.swapaxes(x.reshape(samples, -1, together, *rest), 1, 2)
    return x.reshape(samples * together, -1, *rest)


def check_chunks(settings: Any) -> None:
    """Check that a rollout consists of whole chunks."""
    length = chunk_length(settings)
    if length and settings.num_steps % length:
        raise SettingError(
            f"{type(settings).__name__} can't divide {settings.num_steps} steps into sequences of "
            f"{length}",
            "Make num_steps a multiple of sequence_length.",
        )


def chunk_length(settings: Any) -> int:
    """How many steps memory is learnt through at a time; 0 without memory."""
    if settings.memory == "none":
        return 0
    return settings.sequence_length or settings.num_steps


def is_last(step: Any) -> jax.Array:
    """Whether an episode ends with each step, terminated or truncated."""
    return step.terminated | step.truncated


def is_first(rollout: Rollout) -> jax.Array:
    """Whether each step is the first of an episode; before the first step all is forgotten."""
    ended = is_last(rollout)
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def chunk(batch: Batch, length: int) -> Batch:
    """Chunks of `length` steps, [chunks, envs, length, ...], with the memory before each.

    With length 0 the steps stay as they are.
    """
    if not length:
        return batch
    memory = jax.tree.map(lambda x: x[::length], batch.memory)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(-1, length, *x.shape[1:]), 1, 2)

    return jax.tree.map(cut, batch._replace(memory=()))._replace(memory=memory)


def as_samples(batch: Batch) -> Batch:
    """The samples of all environments along one axis."""
    # On one axis XLA's matrix products are twice as fast.
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
