"""Environments: a family brings a simulator; Shoal adds keys, auto-reset and statistics."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, assert_never

import jax
import jax.numpy as jnp

from shoal.envs.spaces import (
    WORLD,
    Action,
    Box,
    Discrete,
    Groups,
    MultiDiscrete,
    Observation,
    has_parts,
)
from shoal.errors import SettingError
from shoal.tracing.rowwise import where_rarely
from shoal.tracing.stage import stage

Tree = Any  # a pytree of arrays
Start = Callable[..., Tree]


class Transition(NamedTuple):
    """The result of one step of a simulator, before any reset.

    Where several agents act, all but the state is [agents, ...], or, where the agents differ, a
    dictionary from a group's name to that. What the row of an agent contains after it has ended,
    while others continue, has no effect.
    """

    state: Any
    obs: Tree
    reward: Tree
    terminated: Tree  # the task ended: the value afterwards is 0
    truncated: Tree  # the time was up: the state after it still has a value


class Simulator(Protocol):
    """The rules of ONE environment, without auto-reset; hashable, equal when the rules are.

    This is all that a family of environments has to offer. States are pytrees of arrays. One with
    several agents also has `agents`, their names in the order of the agents' axis, and, where they
    differ, `groups`: pairs of a group's name and its agents. One whose resets take long has
    `costly_reset = True`: then none is made until some environment ends.
    """

    @property
    def observation_space(self) -> Observation | Groups:
        """What the agent, or each of them, sees."""
        ...

    @property
    def action_space(self) -> Action | Groups:
        """What the agent, or each of them, may do."""
        ...

    def reset(self, key: jax.Array) -> tuple[Any, Tree]:
        """A first state and its observation."""
        ...

    def step(self, key: jax.Array, state: Any, action: Tree) -> Transition:
        """Step from `state` by `action`."""
        ...


class EnvState(NamedTuple):
    """Everything an environment carries from step to step, its randomness included."""

    key: jax.Array
    inner: Any  # the simulator's own state
    episode_return: jax.Array
    episode_length: jax.Array
    gone: Tree = ()  # of several agents: which have ended before the others


class Step(NamedTuple):
    """The result of a step of an environment.

    `episode_return` and `episode_length` count this step too: where an episode ends, its totals.
    Where several agents act, an episode ends when all of them have, its return is the mean of
    theirs, and the other fields have an axis of agents, in a dictionary of groups if they differ.
    An agent that has ended before the others is inactive until the episode ends: it sees zeros,
    earns nothing, and every step terminates it again. Losses and statistics leave it out.
    """

    obs: Tree  # to act on next: after an episode's end, the first of the next episode
    reward: Tree
    terminated: Tree
    truncated: Tree  # never where terminated
    last_obs: Tree  # what the step really led to
    episode_return: jax.Array
    episode_length: jax.Array
    active: Tree = ()  # of several agents: which had not ended before this step


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Environment:
    """A simulator that restarts itself, carries its own key, and counts its episodes.

    It is plain data: the same name and settings make equal environments, in any process.
    """

    name: str
    simulator: Simulator

    @property
    def observation_space(self) -> Any:
        """What the agent, or each of them, sees: an `Observation`, or `Groups` if they differ."""
        return self.simulator.observation_space

    @property
    def action_space(self) -> Any:
        """What it may do: an `Action`, or `Groups`; `step` clips to it."""
        return self.simulator.action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents' names, group after group; empty for a single agent without an axis."""
        return getattr(self.simulator, "agents", ())

    @property
    def groups(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each group's name and its agents; one without a name if the agents don't differ."""
        if not isinstance(self.action_space, Groups):
            return (("", self.agents),)
        groups = getattr(self.simulator, "groups", ())
        if sorted(name for name, _ in groups) != sorted(
            name for name, _ in self.action_space.spaces
        ):
            raise SettingError(
                f"the groups of {self.name} are not those of its spaces",
                "Give its simulator `groups`: the name and the agents of each group of its spaces.",
            )
        return groups

    def reset(self, keys: jax.Array) -> tuple[EnvState, Tree]:
        """The states and first observations of one environment a key."""
        return jax.vmap(lambda key: self._start(*jax.random.split(key)))(keys)

    @stage(per="env", name="env", role="env")
    def step(self, state: EnvState, action: Tree) -> tuple[EnvState, Step]:
        """Steps one environment, and starts its next episode where this one ends."""
        return self.advance(state, action)

    def advance(self, state: EnvState, action: Tree) -> tuple[EnvState, Step]:
        """As `step`, of one environment, for what isn't to be a stage of its own."""
        key, step_key, reset_key = jax.random.split(state.key, 3)
        inner, *seen = self.simulator.step(step_key, state.inner, clip(self.action_space, action))
        last_obs, reward, terminated, truncated = jax.tree.map(jnp.asarray, seen)
        if self.agents:
            reward, terminated = (
                _without(state.gone, reward, 0),
                _without(state.gone, terminated, 1),
            )
            last_obs = _unseen(state.gone, last_obs)
        truncated = jax.tree.map(lambda late, over: late & ~over, truncated, terminated)
        gone = jax.tree.map(jnp.logical_or, terminated, truncated) if self.agents else ()
        done = ended(terminated, truncated, axes=0)
        episode_return = state.episode_return + mean_of_agents(reward)
        episode_length = state.episode_length + 1
        after = EnvState(key, inner, episode_return, episode_length, gone)
        start = _start_rarely if getattr(self.simulator, "costly_reset", False) else _start_where
        next_obs = _unseen(gone, last_obs) if self.agents else last_obs
        next_state, obs = start(self._start, done, (key, reset_key), (after, next_obs))
        active = jax.tree.map(jnp.logical_not, state.gone)
        return next_state, Step(
            obs, reward, terminated, truncated, last_obs, episode_return, episode_length, active
        )

    def _start(self, key: jax.Array, reset_key: jax.Array) -> tuple[EnvState, Tree]:
        inner, obs = self.simulator.reset(reset_key)
        gone = {name: jnp.zeros(len(agents), bool) for name, agents in self.groups}
        if "" in gone:
            gone = gone[""] if self.agents else ()
        return EnvState(key, _typed(inner), jnp.float32(0), jnp.int32(0), gone), obs


def key_rows(key: jax.Array, envs: int) -> jax.Array:
    """A key an environment; the first ones are the same however many there are."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(envs))


def episode_totals(step: Step) -> dict[str, jax.Array]:
    """How many episodes end in `step`, and the sums of their returns and lengths; add them up."""
    done = ended(step.terminated, step.truncated, step.episode_length.ndim).astype(jnp.float32)
    return {
        "episodes": done,
        "episode_return": done * step.episode_return,
        "episode_length": done * step.episode_length,
    }


def ended(terminated: Tree, truncated: Tree, axes: int) -> jax.Array:
    """Whether an episode ended, which it does when all its agents have; its first axes remain."""
    done = jax.tree.leaves(jax.tree.map(jnp.logical_or, terminated, truncated))
    agents = tuple(jnp.all(x, axis=tuple(range(axes, x.ndim))) for x in done)
    return functools.reduce(jnp.logical_and, agents)


def clip(space: Action | Groups, x: Tree) -> Tree:
    """The element of `space` nearest to `x`."""
    match space:
        case Groups(spaces):
            return {name: clip(inner, x[name]) for name, inner in spaces}  # pyright: ignore[reportArgumentType]
        case Discrete(n):
            return jnp.clip(x, 0, n - 1)
        case MultiDiscrete(sizes):
            return jnp.clip(x, 0, jnp.asarray(sizes) - 1)
        case Box(low, high, shape):
            return jnp.clip(x, _bound(low, shape), _bound(high, shape))
    assert_never(space)


def mean_of_agents(reward: Tree) -> jax.Array:
    """The mean of the rewards of one step of one environment."""
    rewards = jax.tree.leaves(reward)
    if len(rewards) == 1 and not rewards[0].ndim:
        return rewards[0]
    return jnp.mean(jnp.concatenate([jnp.ravel(x) for x in rewards]))


def _unseen(gone: Tree, obs: Tree) -> Tree:
    """`obs` with zeros for agents that are gone, but for the world, which all agents share."""
    if isinstance(gone, dict):
        return {name: _unseen(gone[name], obs[name]) for name in obs}
    if isinstance(obs, dict) and has_parts(obs):
        return {k: x if k == WORLD else _without(gone, x, 0) for k, x in obs.items()}
    return _without(gone, obs, 0)


def _without(gone: Tree, tree: Tree, value: float) -> Tree:
    """`tree` with `value` in the rows of agents that are gone."""
    if isinstance(gone, dict):
        return {name: _without(gone[name], tree[name], value) for name in tree}

    def clear(x: jax.Array) -> jax.Array:
        return jnp.where(gone.reshape(-1, *[1] * (x.ndim - 1)), jnp.asarray(value, x.dtype), x)

    return jax.tree.map(clear, tree)


def _start_where(start: Start, done: jax.Array, keys: Tree, going: Tree) -> Tree:
    """A new start from `keys` where an episode is done, else the episode in progress."""
    return _where(done, start(*keys), going)


def _start_rarely(start: Start, done: jax.Array, keys: Tree, going: Tree) -> Tree:
    """The same numbers, but nothing is started while no row of a batch is done."""
    return where_rarely(done, start, keys, going)


def _bound(bound: float | tuple[float, ...], shape: tuple[int, ...]) -> float | jax.Array:
    return jnp.asarray(bound).reshape(shape) if isinstance(bound, tuple) else bound


def _typed(tree: Tree) -> Tree:
    """`tree` with every leaf an array of a definite dtype, as what a loop carries must be."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def _where(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """`yes` where the condition holds, else `no`, in the dtypes of `yes`."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, _like(yes, no))


def _like(wanted: Tree, tree: Tree) -> Tree:
    """`tree` in the dtypes of `wanted`."""
    return jax.tree.map(lambda x, y: jnp.asarray(y, x.dtype), wanted, tree)
