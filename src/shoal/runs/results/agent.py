"""A trained agent: acts on observations, and is evaluated by playing whole episodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import Any

import jax
import numpy as np

from shoal.algorithms.evaluated import OWN, Evaluated, play_episodes
from shoal.algorithms.evaluated_host import play_rows
from shoal.envs import Environment, HostEnvironment, key_rows
from shoal.envs.environment import clip
from shoal.envs.host import FEW
from shoal.envs.spaces import Box, Discrete, Groups, MultiDiscrete, leaves
from shoal.errors import SettingError
from shoal.runs.results.evaluating import EPISODE, Evaluation, Protocol

AT_ONCE = 256  # episodes that are played together where environments are compiled


@dataclass(frozen=True)
class Agent:
    """An algorithm with its trained state, as it was before `tick`."""

    algorithm: Any
    env: Any
    state: Any
    tick: int

    @staticmethod
    def of(algorithm: Any, env: Any, state: Any, tick: int) -> Agent:
        """The agent of what a run trained, which may have been evaluated while it did."""
        if isinstance(algorithm, Evaluated):
            return Agent(algorithm.algorithm, env, state.training, tick)
        return Agent(algorithm, env, state, tick)

    def __repr__(self) -> str:
        """In a line, without the parameters."""
        name = getattr(self.env, "name", "") or type(self.env).__name__
        where = f" on {name}" if self.env is not None else ""
        return f"Agent({type(self.algorithm).__name__}{where}, tick {self.tick:,})"

    def act(self, obs: Any, key: Any = None) -> np.ndarray:
        """The action on one observation, or one for each of many; without memory.

        Without a key it is the greedy action; with one (or an integer), sampled as in training.
        """
        return self.play(obs, None, key)[0]

    def play(self, obs: Any, memory: Any = None, key: Any = None) -> tuple[np.ndarray, Any]:
        """As `act`, with memory: also returns the memory to pass with the next observation."""
        self._check(key)
        rows, is_many = self._rows(obs)
        if not is_many:
            memory = jax.tree.map(lambda x: x[None], memory)
        keys = None if key is None else jax.random.split(_as_key(key), _count(rows))
        action, memory = self._play(self.state, rows, memory, keys)
        if not is_many:
            action, memory = jax.tree.map(lambda x: x[0], (action, memory))
        return jax.tree.map(np.asarray, action), memory

    def acting(self) -> Callable[[Any], Any]:
        """A pure function from many observations to the greedy action on each."""
        self._check(None)

        def act(rows: Any) -> Any:
            action, memory = self._play(self.state, rows, None, None)
            if jax.tree.leaves(memory):
                raise SettingError(
                    f"{type(self.algorithm).__name__} remembers what it saw, and a function of one "
                    "observation can't",
                    "Act with shoal.load(run).play(obs, memory).",
                )
            return action

        return act

    def evaluate(
        self, episodes: int = 100, *, sampled: bool = False, seed: int = 0, steps: int = EPISODE
    ) -> Evaluation:
        """Play whole episodes, each in an environment of its own.

        With the greedy action, or sampled as in training. An episode of more than `steps` steps
        counts with its return so far. The same seed plays the same episodes.
        """
        return self.played(Protocol(episodes, sampled=sampled, seed=seed, steps=steps))

    def played(self, protocol: Protocol) -> Evaluation:
        """As `evaluate`, by a protocol."""
        self._check(protocol.seed if protocol.sampled else None)
        match self.env:
            case Environment() as env:
                found = self._played_compiled(env, protocol)
            case HostEnvironment() as env:
                found = self._played_in_python(env, protocol)
            case _:
                raise SettingError(
                    f"{type(self.algorithm).__name__} was trained in no environment of Shoal's, so "
                    "there is nothing to play",
                    "Give it a shoal.envs.Environment or a shoal.envs.HostEnvironment.",
                )
        return Evaluation(protocol, self.tick, *(tuple(x.tolist()) for x in found))

    def _played_compiled(self, env: Environment, protocol: Protocol) -> tuple[np.ndarray, ...]:
        """Returns, lengths and whether they ended of episodes that XLA plays, many at a time."""
        parts = -(-protocol.episodes // AT_ONCE)
        rows = -(-protocol.episodes // parts)
        keys = key_rows(jax.random.fold_in(jax.random.key(protocol.seed), OWN), rows * parts)
        how = {"sampled": protocol.sampled, "steps": protocol.steps}
        play = jax.jit(partial(self._episodes, env, **how))
        found = [play(self.state, keys[i : i + rows]) for i in range(0, rows * parts, rows)]
        joined = (np.concatenate(each)[: protocol.episodes] for each in zip(*found, strict=True))
        return tuple(joined)

    def _episodes(
        self, env: Environment, state: Any, keys: jax.Array, *, sampled: bool, steps: int
    ) -> tuple[jax.Array, ...]:
        def choose(turn: jax.Array, obs: Any, memory: Any) -> tuple[Any, Any]:
            def one(obs: Any, memory: Any, key: jax.Array) -> tuple[Any, Any]:
                more = {"key": jax.random.fold_in(key, turn)} if sampled else {}
                return self.algorithm.play(env, state, obs, memory, **more)

            return jax.vmap(one)(obs, memory, keys)

        played = play_episodes(env, choose, keys, steps)
        return played.score, played.length, played.over

    def _played_in_python(self, env: HostEnvironment, protocol: Protocol) -> tuple[Any, ...]:
        """The same of environments in Python."""
        draw = np.random.default_rng([protocol.seed, OWN])
        seeds = draw.integers(0, 2**32, protocol.episodes, np.uint32)
        keys = _endless(jax.random.key(protocol.seed) if protocol.sampled else None)

        def choose(obs: Any, memory: Any) -> tuple[Any, Any]:
            return self.play(obs, memory, next(keys))

        blocks = [seeds[i : i + FEW] for i in range(0, len(seeds), FEW)]
        found = [play_rows(env, choose, block, protocol.steps) for block in blocks]
        return tuple(np.concatenate(each) for each in zip(*found, strict=True))

    def _check(self, key: Any) -> None:
        """Refuse to act by an algorithm that can't, or can't with a key."""
        title = type(self.algorithm).__name__
        if not hasattr(self.algorithm, "play"):
            raise SettingError(
                f"{title} has no method `play`, so it can't act by itself",
                "Give it play(env, state, obs, memory), which returns the best action in one "
                "environment, and what to remember.",
            )
        takes_key = "key" in inspect.signature(self.algorithm.play).parameters
        if key is not None and not takes_key:
            raise SettingError(
                f"{title}'s play takes no key: it only knows the best", "Act without a key."
            )

    @cached_property
    def _play(self) -> Any:
        def one(state: Any, obs: Any, memory: Any, key: Any) -> tuple[Any, Any]:
            more = {} if key is None else {"key": key}
            action, memory = self.algorithm.play(self.env, state, obs, memory, **more)
            space = getattr(self.env, "action_space", None)
            # As environments do in training: what is drawn from a normal may leave its box.
            known = isinstance(space, Groups | Discrete | MultiDiscrete | Box)
            return clip(space, action) if known else action, memory

        return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0)))

    def _rows(self, obs: Any) -> tuple[Any, bool]:
        """Observations with a batch axis, and whether they came with it.

        Without an environment, `obs` is taken for one observation.
        """
        if self.env is None:
            return jax.tree.map(lambda x: np.asarray(x)[None], obs), False
        space = self.env.observation_space
        each: list[Any] = [s for _, s in space.spaces] if isinstance(space, Groups) else [space]
        known = [box for of in each for box in leaves(of)]
        axes = len(known[0].shape) + bool(self.env.agents)
        # A list of numbers is an array, as NumPy takes it.
        given, tree = jax.tree.flatten(obs, is_leaf=lambda x: isinstance(x, list))
        given = [np.asarray(x) for x in given]
        spare = given[0].ndim - axes if len(given) == len(known) else -1
        pairs = zip(given, known, strict=len(given) == len(known))
        fits = all(x.shape[x.ndim - len(k.shape) :] == k.shape for x, k in pairs)
        if spare not in (0, 1) or not fits:
            shapes = " and ".join(str(list(x.shape)) for x in given)
            raise SettingError(
                f"an observation of {self.env.name} is {space}, not {shapes}",
                "Give one, or many along a first axis.",
            )
        rows = [np.asarray(x, k.dtype) for x, k in zip(given, known, strict=True)]
        rows = rows if spare else [x[None] for x in rows]
        return jax.tree.unflatten(tree, rows), spare == 1


def _count(rows: Any) -> int:
    return len(jax.tree.leaves(rows)[0])


def _as_key(key: Any) -> jax.Array:
    return jax.random.key(key) if isinstance(key, int) else key


def _endless(key: jax.Array | None) -> Iterator[jax.Array | None]:
    """A key for each step; None for each without one."""
    for step in count():
        yield None if key is None else jax.random.fold_in(key, step)
