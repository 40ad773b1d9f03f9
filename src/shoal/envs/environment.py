"""Environments: a family brings a simulator; Shoal adds keys, auto-reset and statistics."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, assert_never

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Action, Box, Discrete, MultiDiscrete, Observation
from shoal.tracing.stage import stage

Tree = Any  # a pytree of arrays


class Transition(NamedTuple):
    """What one step of a simulator led to, before any reset."""

    state: Any
    obs: jax.Array
    reward: jax.Array
    terminated: jax.Array  # the task ended: nothing is worth anything afterwards
    truncated: jax.Array  # the time was up: the state after it still has a value


class Simulator(Protocol):
    """The rules of ONE environment, without auto-reset; hashable, equal when the rules are.

    This is all that a family of environments has to offer. States are pytrees of arrays.
    """

    @property
    def observation_space(self) -> Observation:
        """What the agent sees."""
        ...

    @property
    def action_space(self) -> Action:
        """What the agent may do."""
        ...

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """A first state and its observation."""
        ...

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        """What `action` leads to from `state`."""
        ...


class EnvState(NamedTuple):
    """Everything an environment carries from step to step, its randomness included."""

    key: jax.Array
    inner: Any  # the simulator's own state
    episode_return: jax.Array
    episode_length: jax.Array


class Step(NamedTuple):
    """What a step of an environment shows.

    `episode_return` and `episode_length` count this step too: where an episode ends, its totals.
    """

    obs: jax.Array  # to act on next: after an episode's end, the first of the next episode
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array  # never where terminated
    last_obs: jax.Array  # what the step really led to
    episode_return: jax.Array
    episode_length: jax.Array


@dataclass(frozen=True, slots=True)
class Environment:
    """A simulator that restarts itself, carries its own key, and counts its episodes.

    It is plain data: the same name and settings make equal environments, in any process.
    """

    name: str
    simulator: Simulator

    @property
    def observation_space(self) -> Observation:
        """What the agent sees."""
        return self.simulator.observation_space

    @property
    def action_space(self) -> Action:
        """What the agent may do; `step` clips to it."""
        return self.simulator.action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """None by name: one agent acts, and no axis counts it."""
        return ()

    def reset(self, keys: jax.Array) -> tuple[EnvState, jax.Array]:
        """The states and first observations of one environment a key."""
        return jax.vmap(lambda key: self._start(*jax.random.split(key)))(keys)

    @stage(per="env", name="env")
    def step(self, state: EnvState, action: jax.Array) -> tuple[EnvState, Step]:
        """Steps one environment, and starts its next episode where this one ends."""
        key, step_key, reset_key = jax.random.split(state.key, 3)
        inner, last_obs, reward, terminated, truncated = self.simulator.step(
            step_key, state.inner, clip(self.action_space, action)
        )
        truncated = truncated & ~terminated
        done = terminated | truncated
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        after = EnvState(key, inner, episode_return, episode_length)
        fresh, first_obs = self._start(key, reset_key)
        next_state, obs = _where(done, (fresh, first_obs), (after, last_obs))
        return next_state, Step(
            obs, reward, terminated, truncated, last_obs, episode_return, episode_length
        )

    def _start(self, key: jax.Array, reset_key: jax.Array) -> tuple[EnvState, jax.Array]:
        inner, obs = self.simulator.reset(reset_key)
        return EnvState(key, _typed(inner), jnp.float32(0), jnp.int32(0)), obs


def key_rows(key: jax.Array, envs: int) -> jax.Array:
    """A key an environment; the first ones are the same however many there are."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(envs))


def episode_totals(step: Step) -> dict[str, jax.Array]:
    """How many episodes end in `step`, and the sums of their returns and lengths; add them up.

    Where several agents act, an episode ends when all of them have ended.
    """
    done = step.terminated | step.truncated
    done = jnp.all(done, axis=-1) if done.ndim > step.episode_length.ndim else done
    done = done.astype(jnp.float32)
    return {
        "episodes": done,
        "episode_return": done * step.episode_return,
        "episode_length": done * step.episode_length,
    }


def clip(space: Action, x: jax.Array) -> jax.Array:
    """The element of `space` nearest to `x`."""
    match space:
        case Discrete(n):
            return jnp.clip(x, 0, n - 1)
        case MultiDiscrete(sizes):
            return jnp.clip(x, 0, jnp.asarray(sizes) - 1)
        case Box(low, high, shape):
            return jnp.clip(x, _bound(low, shape), _bound(high, shape))
    assert_never(space)


def _bound(bound: float | tuple[float, ...], shape: tuple[int, ...]) -> float | jax.Array:
    return jnp.asarray(bound).reshape(shape) if isinstance(bound, tuple) else bound


def _typed(tree: Tree) -> Tree:
    """`tree` with every leaf an array of a definite dtype, as what a loop carries must be."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def _where(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """`yes` where the condition holds, else `no`, in the dtypes of `yes`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, jnp.asarray(y, x.dtype)), yes, no)
