"""Environments: the protocol, and one adapter a family."""

from shoal.envs.environment import (
    Environment,
    EnvState,
    Simulator,
    Step,
    Transition,
    episode_totals,
    key_rows,
)
from shoal.envs.registry import make
from shoal.envs.spaces import Box, Discrete, Space

__all__ = [
    "Box",
    "Discrete",
    "EnvState",
    "Environment",
    "Simulator",
    "Space",
    "Step",
    "Transition",
    "episode_totals",
    "key_rows",
    "make",
]
