"""Evaluation where environments are stepped in Python: whole episodes, played by a host stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.caching import remembered
from shoal.envs import HostEnvironment
from shoal.envs.host import check_action, check_obs
from shoal.envs.spaces import leaves, unflatten
from shoal.tracing.equations import which_are_read
from shoal.tracing.stage import Stage, host

COUNTS = ("episodes", "return", "length", "unfinished")


@dataclass(frozen=True, slots=True)
class Playing:
    """The algorithm, environment and settings of an evaluation, as plain data for any process."""

    algorithm: Any
    env: HostEnvironment
    episodes: int
    steps: int
    every: int


def evaluated(
    playing: Playing, name: str, training: Any, seed: jax.Array, occasions: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """The occasions so far, and `COUNTS` of the episodes that were played on this one, if any.

    It is a stage that reads of `training` only what playing needs.
    """
    flat = jax.tree.leaves(training)
    used = _used(playing, training)
    occasions, *counts = _stage(playing, name, used)(occasions, seed, *(flat[i] for i in used))
    return occasions, counts


def played_once(playing: Playing, training: Any, seed: Any, occasions: Any) -> tuple[Any, ...]:
    """`COUNTS` of the episodes that are played here and now, in no stage."""
    flat, used = jax.tree.leaves(training), _used(playing, training)
    at = np.asarray(occasions), np.asarray(seed)
    return _evaluate(playing, used, *at, *(flat[i] for i in used))[1:]


def _used(playing: Playing, training: Any) -> tuple[int, ...]:
    """Which leaves of what training carries are played by."""
    flat, tree = jax.tree.flatten(training)

    def two_moves(flat: list[Any]) -> tuple[Any, Any]:
        state, obs = jax.tree.unflatten(tree, flat), _nothing_seen(playing.env)
        _, memory = playing.algorithm.play(playing.env, state, obs, None)
        return playing.algorithm.play(playing.env, state, obs, memory)

    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    return tuple(i for i, is_read in enumerate(which_are_read(two_moves, specs)) if is_read)


def _nothing_seen(env: HostEnvironment) -> Any:
    agents = (len(env.agents),) if env.agents else ()
    boxes = leaves(env.observation_space)
    zeros = (jnp.zeros((*agents, *box.shape), box.dtype) for box in boxes)
    return unflatten(env.observation_space, tuple(zeros))


@remembered
def _stage(playing: Playing, name: str, used: tuple[int, ...]) -> Stage:
    def returns(*_: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        numbers = (jax.ShapeDtypeStruct((), jnp.float32) for _ in COUNTS)
        return (jax.ShapeDtypeStruct((), jnp.int32), *numbers)

    return host(returns, name=name)(partial(_evaluate, playing, used))


def _evaluate(
    playing: Playing, used: tuple[int, ...], occasions: np.ndarray, seed: np.ndarray, *read: Any
) -> tuple[Any, ...]:
    """One occasion: nothing, or one episode in each of some environments of its own."""
    if occasions % playing.every:
        return (occasions + 1, *np.zeros(len(COUNTS), np.float32))
    draw = np.random.default_rng([int(seed), int(occasions)])
    seeds = draw.integers(0, 2**32, playing.episodes, np.uint32)
    choose = partial(_chooser(playing, used), read)
    score, length, over = play_rows(playing.env, choose, seeds, playing.steps)
    counts = len(seeds), score.sum(), length.sum(), (~over).sum()
    return (occasions + 1, *np.array(counts, np.float32))


def play_rows(
    env: HostEnvironment, choose: Callable[..., Any], seeds: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The return and length of one episode a seed, and whether it ended within so many steps.

    `choose(obs, memory)` returns the actions of all environments and their memories.
    """
    space, boxes = env.action_space, env.observation_space
    over = np.zeros(len(seeds), bool)
    score, length = np.zeros(len(seeds), np.float32), np.zeros(len(seeds), np.int32)
    vector = env.simulator.open(seeds)
    try:
        obs, memory = check_obs(vector.reset(), "when it was reset"), None
        for _ in range(steps):
            action, memory = choose(unflatten(boxes, obs), memory)
            moves = vector.step(check_action(space, np.asarray(action)))
            score, length = score + moves.score * ~over, length + ~over
            ended = moves.terminated | moves.truncated
            over |= ended.all(axis=1) if ended.ndim > 1 else ended
            obs = check_obs(moves.obs, "after a step")
            if over.all():
                break
    finally:
        vector.close()
    return score, length, over


@remembered
def _chooser(playing: Playing, used: tuple[int, ...]) -> Callable[..., Any]:
    """The best action in each of many environments, compiled once in a process."""
    key = jax.random.key(0)
    carried = jax.eval_shape(lambda: playing.algorithm.init(key, playing.env, 1))
    rest, tree = jax.tree.flatten(carried)

    @jax.jit
    def choose(read: tuple[Any, ...], obs: Any, memory: Any) -> tuple[Any, Any]:
        flat: list[Any] = [*rest]
        for i, x in zip(used, read, strict=True):
            flat[i] = x
        state = jax.tree.unflatten(tree, flat)
        one = partial(playing.algorithm.play, playing.env, state)
        return jax.vmap(one)(obs, memory)

    return choose
