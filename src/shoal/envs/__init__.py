"""Environments: the protocol, and one adapter a family.

Names are loaded when first used, so that a process that only steps environments needs no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.envs.environment import (
        Environment,
        EnvState,
        Simulator,
        Step,
        Transition,
        episode_totals,
        key_rows,
    )
    from shoal.envs.given import adapted
    from shoal.envs.host import HostSimulator, Moves, Vector
    from shoal.envs.hosted import HostEnvironment, HostState
    from shoal.envs.previous import with_previous
    from shoal.envs.registry import make
    from shoal.envs.spaces import Box, Dict, Discrete, Groups, MultiDiscrete, Space

_HOMES = {
    "adapted": "given",
    "Box": "spaces",
    "Dict": "spaces",
    "Discrete": "spaces",
    "EnvState": "environment",
    "Environment": "environment",
    "Groups": "spaces",
    "HostEnvironment": "hosted",
    "HostSimulator": "host",
    "HostState": "hosted",
    "Moves": "host",
    "MultiDiscrete": "spaces",
    "Simulator": "environment",
    "Space": "spaces",
    "Step": "environment",
    "Transition": "environment",
    "Vector": "host",
    "episode_totals": "environment",
    "key_rows": "environment",
    "make": "registry",
    "with_previous": "previous",
}

__all__ = [
    "Box",
    "Dict",
    "Discrete",
    "EnvState",
    "Environment",
    "Groups",
    "HostEnvironment",
    "HostSimulator",
    "HostState",
    "Moves",
    "MultiDiscrete",
    "Simulator",
    "Space",
    "Step",
    "Transition",
    "Vector",
    "adapted",
    "episode_totals",
    "key_rows",
    "make",
    "with_previous",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.envs' has no attribute '{name}'")
    return getattr(import_module(f"shoal.envs.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
