"""An environment with a fixed CPU time per step, to measure the overhead around it."""

import time
from dataclasses import dataclass

import numpy as np

from shoal.envs.host import Leaves, Moves
from shoal.envs.spaces import Box, Discrete

LENGTH = 200  # steps of an episode


@dataclass(frozen=True)
class Busy:
    """Numbers that drift; a step keeps its core busy for a fixed time per environment."""

    seconds: float = 5e-4
    size: int = 16
    agents: tuple[str, ...] = ()

    @property
    def observation_space(self) -> Box:
        """The observation space."""
        return Box(-10.0, 10.0, (self.size,))

    @property
    def action_space(self) -> Discrete:
        """The action space: up or down."""
        return Discrete(2)

    def open(self, seeds: np.ndarray) -> "BusyRows":
        """Open environments, one per seed."""
        return BusyRows(self, seeds)


class BusyRows:
    """A batch of open environments."""

    def __init__(self, busy: Busy, seeds: np.ndarray) -> None:
        self._busy, self._count = busy, len(seeds)
        self._at = (seeds[:, None] % 7 + np.arange(busy.size) / busy.size).astype(np.float32)
        self._steps = 0

    def reset(self) -> Leaves:
        """The first observations."""
        return (self._at,)

    def step(self, action: np.ndarray) -> Moves:
        """Step: work for the set time, and drift."""
        until = time.perf_counter() + self._busy.seconds * self._count
        self._steps += 1
        drift = np.where(action[:, None] == 1, 0.1, -0.1).astype(np.float32)
        self._at = np.clip(self._at + drift, -10, 10)
        reward = -np.abs(self._at[:, 0])
        no = np.zeros(self._count, bool)
        over = np.full(self._count, self._steps % LENGTH == 0)
        while time.perf_counter() < until:
            pass
        return Moves((self._at,), reward, no, over, (self._at,), reward)

    def close(self) -> None:
        """Do nothing: no resources are held."""
