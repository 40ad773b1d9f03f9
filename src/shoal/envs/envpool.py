"""Environments of EnvPool: batches of them stepped by threads of C++."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.caching import remembered
from shoal.envs.gym_spaces import Leaf, action_space, leaves_of, observation_space
from shoal.envs.host import Leaves, Moves
from shoal.envs.spaces import Action, Observation
from shoal.errors import RowError, SettingError

OWN = ("num_envs", "batch_size", "seed", "env_seed", "reward_clip")  # settings that Shoal makes
ADDED = ("clip_reward", "asynchronous")  # settings that EnvPool does not have
XLA = "envpool.python.lax"


@contextmanager
def _without_jax() -> Iterator[None]:
    """Keep EnvPool from importing JAX, for an XLA interface that isn't used here."""
    before = sys.modules.get(XLA, sys)
    sys.modules[XLA] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[XLA]
        if before is not sys:
            sys.modules[XLA] = before


with _without_jax():
    import envpool  # pyright: ignore[reportMissingImports]  developing needs no EnvPool
    from envpool.registration import registry  # pyright: ignore[reportMissingImports]


def names() -> list[str]:
    """The environments this family knows."""
    return envpool.list_all_envs()


@dataclass(frozen=True, slots=True)
class EnvPoolSimulator:
    """An EnvPool task, known by its id and what `envpool.make` is to be given.

    `num_threads` is a setting; without it, a thread an environment up to the cores at hand. Every
    environment has a seed of its own. Rewards of Atari games are clipped to their signs to learn
    from, unless `clip_reward=False`; episodes are counted with the true ones. With
    `asynchronous=True` each result is received as soon as its environment has stepped.
    """

    id: str
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if wrong := [name for name, _ in self.settings if name in OWN]:
            raise SettingError(
                f"`{wrong[0]}` can't be set for an EnvPool environment",
                "Environments and seeds are the loop's; `asynchronous=True` receives each result "
                "as it comes. Use `clip_reward` for rewards.",
            )

    @property
    def observation_space(self) -> Observation:
        """The task's own; a discrete observation is shown one-hot."""
        return _form(self).observation_space

    @property
    def action_space(self) -> Action:
        """The task's own, counted from 0."""
        return _form(self).action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """Empty: a single agent acts."""
        return ()

    def open(self, seeds: np.ndarray) -> EnvPoolVector | AsyncEnvPoolVector:
        """A pool of one environment a seed."""
        is_async = dict(self.settings).get("asynchronous", False)
        return AsyncEnvPoolVector(self, seeds) if is_async else EnvPoolVector(self, seeds)


class EnvPoolVector:
    """A pool that is stepped whole.

    EnvPool would begin an episode at the step after the last one's end; the finished ones are reset
    at once instead. Its inner `_send`, `_recv` and `_reset` are used, since what its `step` does
    around them takes longer than a small batch of environments.
    """

    def __init__(self, simulator: EnvPoolSimulator, seeds: np.ndarray) -> None:
        self._form = _form(simulator)
        self._pool = _pool(simulator, seeds, batch=len(seeds))
        self._ids = np.arange(len(seeds), dtype=np.int32)

    def reset(self) -> Leaves:
        """The first observations."""
        return self._reset(self._ids)

    def step(self, action: np.ndarray) -> Moves:
        """Steps every environment, and starts the next episodes of those that have ended."""
        form = self._form
        self._pool._send([self._ids, self._ids, _taken(form, action)])
        state = self._pool._recv()
        ended = np.flatnonzero(state[form.done]).astype(np.int32)
        first = self._reset(ended) if len(ended) else ()
        begun = {int(row): tuple(x[i : i + 1] for x in first) for i, row in enumerate(ended)}
        return _moves(form, state, begun)

    def close(self) -> None:
        """Ends the pool's threads."""
        self._pool.close()

    def _reset(self, ids: np.ndarray) -> Leaves:
        """The first observations of `ids`, in their order."""
        self._pool._reset(ids)
        state = self._pool._recv()
        obs = _shown(self._form, state)
        came = state[self._form.env_id]
        return obs if (came == ids).all() else tuple(x[np.argsort(came)] for x in obs)


class AsyncEnvPoolVector:
    """A pool whose results are received one by one, in the order in which they are done.

    One that has ended begins its next episode while the others still step; so a slow step or reset
    keeps no other thread waiting. The results are the same as from a pool stepped whole.
    """

    def __init__(self, simulator: EnvPoolSimulator, seeds: np.ndarray) -> None:
        self._form = _form(simulator)
        self._pool = _pool(simulator, seeds, batch=1)
        self._ids = np.arange(len(seeds), dtype=np.int32)

    def reset(self) -> Leaves:
        """The first observations."""
        self._pool._reset(self._ids)
        came = [self._pool._recv() for _ in self._ids]
        obs = [_shown(self._form, state) for state in _sorted(self._form, came)]
        return tuple(np.concatenate(leaf) for leaf in zip(*obs, strict=True))

    def step(self, action: np.ndarray) -> Moves:
        """Steps every environment, and starts the next episodes of those that have ended."""
        form, pool = self._form, self._pool
        pool._send([self._ids, self._ids, _taken(form, action)])
        came: dict[int, list[np.ndarray]] = {}
        begun: dict[int, list[np.ndarray]] = {}
        wanted = len(self._ids)
        while len(came) + len(begun) < wanted:
            state = pool._recv()
            row = int(state[form.env_id][0])
            if row in came:
                begun[row] = state
                continue
            came[row] = state
            if state[form.done][0]:
                pool._reset(state[form.env_id].astype(np.int32))
                wanted += 1
        whole = [np.concatenate(x) for x in zip(*_sorted(form, [*came.values()]), strict=True)]
        return _moves(form, whole, {row: _shown(form, state) for row, state in begun.items()})

    def close(self) -> None:
        """Ends the pool's threads."""
        self._pool.close()


class _Form(NamedTuple):
    """What is known of a task without a pool; numbers are places among what a pool returns."""

    observation_space: Observation
    action_space: Action
    leaves: tuple[tuple[int, Leaf], ...]
    reward: int
    done: int
    truncated: int
    env_id: int
    start: Any
    action_type: np.dtype
    clip_reward: bool


@remembered
def _form(simulator: EnvPoolSimulator) -> _Form:
    settings = _settings(simulator)
    try:
        with _without_jax():
            spec: Any = envpool.make_spec(simulator.id, num_envs=1, **settings)
    except Exception as error:
        raise SettingError(
            f"{simulator.id} can't be made with {', '.join(settings) or 'its defaults'}: {error}",
            f"Give it what envpool.make({simulator.id!r}) takes.",
        ) from error
    shown, taken = spec.gymnasium_observation_space, spec.gymnasium_action_space
    if spec.config.max_num_players > 1 or not hasattr(taken, "shape"):
        raise SettingError(
            f"{simulator.id} has several players or actions, which Shoal can't step yet",
            "Take a task of one player with one action.",
        )
    keys = list(spec._state_keys)
    place = {key: i for i, key in enumerate(keys)}
    observed = sorted(key for key in keys if key == "obs" or key.startswith("obs:"))
    return _Form(
        observation_space(shown),
        action_space(taken),
        tuple((place[key], leaf) for key, leaf in zip(observed, leaves_of(shown), strict=True)),
        place["reward"],
        place["done"],
        place["trunc"],
        place["info:env_id"],
        getattr(taken, "start", 0),
        np.dtype(spec._action_spec[-1][0]),
        "atari" in registry.specs[simulator.id][0]
        and dict(simulator.settings).get("clip_reward", True),
    )


def _settings(simulator: EnvPoolSimulator) -> dict[str, Any]:
    return {name: value for name, value in simulator.settings if name not in ADDED}


def _pool(simulator: EnvPoolSimulator, seeds: np.ndarray, batch: int) -> Any:
    """A pool that returns results in batches of `batch` environments."""
    n = len(seeds)
    settings = {"num_threads": min(n, len(os.sched_getaffinity(0))), **_settings(simulator)}
    own = (seeds >> 1).astype(int).tolist()  # EnvPool's seeds are signed
    try:
        with _without_jax():
            return envpool.make_gymnasium(
                simulator.id, num_envs=n, batch_size=batch, seed=own, **settings
            )
    except Exception as error:
        raise RowError(0, "can't be made", error) from error


def _taken(form: _Form, action: np.ndarray) -> np.ndarray:
    """Actions as EnvPool takes them."""
    return (action + form.start).astype(form.action_type, order="C")


def _moves(form: _Form, state: list[np.ndarray], begun: dict[int, Leaves]) -> Moves:
    """What a step of all environments led to; `begun` shows the next episodes' beginnings."""
    done, out_of_time = state[form.done], state[form.truncated]
    last_obs = _shown(form, state)
    score = state[form.reward].astype(np.float32, copy=False)
    obs = tuple(x.copy() for x in last_obs) if begun else last_obs
    for row, first in begun.items():
        for array, x in zip(obs, first, strict=True):
            array[row] = x[0]
    reward = np.sign(score) if form.clip_reward else score
    return Moves(obs, reward, done & ~out_of_time, done & out_of_time, last_obs, score)


def _sorted(form: _Form, came: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """What single environments sent, in their order."""
    return sorted(came, key=lambda state: int(state[form.env_id][0]))


def _shown(form: _Form, state: list[np.ndarray]) -> Leaves:
    return tuple(_leaf(leaf, state[place]) for place, leaf in form.leaves)


def _leaf(leaf: Leaf, x: np.ndarray) -> np.ndarray:
    if leaf.start is not None:
        return np.eye(leaf.shape[0], dtype=leaf.dtype)[x.ravel() - leaf.start]
    return x.astype(leaf.dtype, copy=False)
