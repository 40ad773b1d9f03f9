"""Environments that are stepped in Python, many at a time; nothing here needs JAX.

A simulator is plain data that is sent to the process that steps it. The environments it opens
there stay there: only arrays come and go.
"""

from __future__ import annotations

import atexit
import traceback
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple, Protocol, assert_never

import cloudpickle
import numpy as np

from shoal.envs.spaces import Action, Box, Discrete, MultiDiscrete, Observation
from shoal.errors import RowError, RunError, SettingError

FEW = 16  # environments that are opened at a time only to see how they begin
Leaves = tuple[np.ndarray, ...]  # an observation's arrays, in the order of its sorted names


class Moves(NamedTuple):
    """What one step of n environments led to: [n, ...] each, or [n, agents, ...] with agents.

    An episode's end and the next one's beginning belong to the same step, as in `Step`.
    """

    obs: Leaves  # to act on next: after an episode's end, the first of the next episode
    reward: np.ndarray  # float32, to learn from
    terminated: np.ndarray
    truncated: np.ndarray  # never where terminated
    last_obs: Leaves  # what the step really led to; the same arrays as `obs` if no episode ended
    score: np.ndarray  # float32 [n], to count episodes by


class Vector(Protocol):
    """Environments that are open, one a seed; what one of them raises becomes a `RowError`.

    What it returns is never written to again.
    """

    def reset(self) -> Leaves:
        """The first observations; to be called once, before the first step."""
        ...

    def step(self, action: np.ndarray) -> Moves:
        """Steps every environment, and starts its next episode where this one ends."""
        ...

    def close(self) -> None:
        """Gives back what the environments hold."""
        ...


@dataclass(frozen=True)
class Copies:
    """Makes copies of an environment that was given as an object."""

    pickled: bytes

    @staticmethod
    def of(env: Any) -> Copies:
        """What makes copies of `env`."""
        try:
            return Copies(cloudpickle.dumps(env))
        except Exception as error:
            kind = type(env).__name__
            raise SettingError(
                f"the environment, a {kind}, can't be copied, and each row needs one: {error}",
                f"Give the class, or a function that makes one, such as env={kind}.",
            ) from error

    def __call__(self) -> Any:
        """Another copy."""
        return cloudpickle.loads(self.pickled)


class HostSimulator(Protocol):
    """How to make environments of a kind: hashable, picklable, equal when they are alike."""

    @property
    def observation_space(self) -> Observation:
        """What one agent sees."""
        ...

    @property
    def action_space(self) -> Action:
        """What one agent may do."""
        ...

    @property
    def agents(self) -> tuple[str, ...]:
        """Who acts, each with a place on the axis after the environments'; none: one, no axis."""
        ...

    def open(self, seeds: np.ndarray) -> Vector:
        """One environment a seed, whose course depends on that seed and the actions alone."""
        ...


def step_rows(
    simulator: HostSimulator, seeds: np.ndarray, steps: np.ndarray, action: np.ndarray
) -> Leaves:
    """Steps the environments of `seeds`, which this process keeps open between calls.

    `steps` counts their steps so far; where it is 0 they are opened afresh. Returns, flat: the
    steps now, the leaves of `obs`, the reward, terminated, truncated, the leaves of `last_obs`, the
    episodes' returns and lengths, and of several agents, which were active: had not ended before.
    """
    key = (id(simulator), seeds.tobytes())
    rows = _find(key, steps) or _open_afresh(key, simulator, seeds)
    with rows.lock:
        try:
            return rows.step(check_action(rows.action_space, action))
        except BaseException:
            _close(key)  # some environments have made the step and some have not
            raise


def first_rows(simulator: HostSimulator, seeds: np.ndarray) -> Leaves:
    """What the environments of `seeds` show first; those of `step_rows` show the same."""
    parts = []
    for start in range(0, len(seeds), FEW):
        vector = simulator.open(seeds[start : start + FEW])
        try:
            parts.append(check_obs(vector.reset(), "when it was reset"))
        finally:
            vector.close()
    return tuple(np.concatenate(leaf) for leaf in zip(*parts, strict=True))


def close_all() -> None:
    """Closes every environment that this process keeps open."""
    for key in [*_open]:
        try:
            _close(key)
        except Exception:
            traceback.print_exc()  # one that fails to close must not keep the others open


@dataclass(slots=True)
class _Rows:
    """Open environments and what is counted of them."""

    simulator: HostSimulator  # compared by identity, not by equality
    vector: Vector
    action_space: Action
    steps: int
    episode_return: np.ndarray
    episode_length: np.ndarray
    gone: np.ndarray | None = None  # which of several agents have ended before the others
    lock: Lock = field(default_factory=Lock)

    def step(self, action: np.ndarray) -> Leaves:
        moves = self.vector.step(action)
        obs, reward, terminated, truncated, last_obs, score = moves
        check_obs(last_obs, "after a step")
        if obs is not last_obs:
            check_obs(obs, "when it was reset")
        if not np.isfinite(reward).all():
            row = np.argwhere(~np.isfinite(reward))[0]
            raise RowError(int(row[0]), f"gave the reward {reward[tuple(row)]}")
        self.steps += 1
        returns, lengths = self.episode_return + score, self.episode_length + 1
        active: Leaves = ()
        continues = ~(terminated | truncated)
        if continues.ndim > 1:
            gone = np.zeros_like(continues) if self.gone is None else self.gone
            reward, last_obs = np.where(gone, 0, reward), cleared(last_obs, gone)
            terminated, truncated, active = terminated | gone, truncated & ~gone, (~gone,)
            ended = ~continues | gone
            continues = ~np.all(ended, axis=1)
            self.gone = gone = ended & continues.reshape(-1, 1)
            obs = cleared(obs, gone)
        self.episode_return, self.episode_length = returns * continues, lengths * continues
        steps = np.full(len(lengths), self.steps, np.int32)
        return (steps, *obs, reward, terminated, truncated, *last_obs, returns, lengths, *active)


Key = tuple[int, bytes]
_open: dict[Key, _Rows] = {}  # no lock: a key is used by one caller at a time
atexit.register(close_all)


def _find(key: Key, steps: np.ndarray) -> _Rows | None:
    """The environments that have made `steps` steps; None where they have yet to be opened."""
    found = _open.get(key)
    if not steps.any():
        return None
    at = found.steps if found else 0
    if found and (steps == at).all():
        return found
    several = f" to {steps.max()}" if np.ptp(steps) else ""
    raise RunError(
        f"the environments here have made {at} steps, but the loop counts {steps.min()}{several}",
        "Their state can't be moved or saved: start the run from its beginning, and step each "
        "group of environments in one place only.",
    )


def _open_afresh(key: Key, simulator: HostSimulator, seeds: np.ndarray) -> _Rows:
    _close(key)
    vector, n = simulator.open(seeds), len(seeds)
    zeros = np.zeros(n, np.float32), np.zeros(n, np.int32)
    rows = _Rows(simulator, vector, simulator.action_space, 0, *zeros)
    _open[key] = rows
    check_obs(vector.reset(), "when it was reset")
    return rows


def _close(key: Key) -> None:
    if rows := _open.pop(key, None):
        rows.vector.close()


def cleared(leaves: Leaves, gone: np.ndarray) -> Leaves:
    """Observations with zeros in the rows of agents that are gone."""
    if not gone.any():
        return leaves
    return tuple(
        np.where(gone.reshape(*gone.shape, *[1] * (x.ndim - 2)), np.zeros((), x.dtype), x)
        for x in leaves
    )


def check_obs(leaves: Leaves, when: str) -> Leaves:
    """Check that observations are finite."""
    for x in leaves:
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            row = np.argwhere(~np.isfinite(x))[0]
            where = f" at {row[1:].tolist()}" if len(row) > 1 else ""
            raise RowError(int(row[0]), f"showed {x[tuple(row)]}{where} {when}")
    return leaves


def check_action(space: Action, action: np.ndarray) -> np.ndarray:
    """Check that actions are finite and choices exist; what lies outside a box is clipped."""
    match space:
        case Box():
            low, high = _bounds(space)
            action = np.minimum(np.maximum(action, low), high)
            wrong = None if np.isfinite(action).all() else ~np.isfinite(action)
        case Discrete(n):
            wrong = (action < 0) | (action >= n)
        case MultiDiscrete(sizes):
            wrong = (action < 0) | (action >= sizes)
        case _:
            assert_never(space)
    if wrong is not None and wrong.any():
        row = int(np.argwhere(wrong)[0, 0])
        raise RowError(row, f"was given the action {action[row].tolist()}, but takes {space}")
    return action


@lru_cache
def _bounds(space: Box) -> tuple[Any, Any]:
    dtype = np.dtype(space.dtype)
    return tuple(
        np.broadcast_to(np.asarray(bound, dtype).reshape(space.shape), space.shape)
        if isinstance(bound, tuple)
        else np.asarray(bound, dtype)
        for bound in (space.low, space.high)
    )  # pyright: ignore[reportReturnType]
