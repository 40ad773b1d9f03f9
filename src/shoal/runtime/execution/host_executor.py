"""What all ends of a fragment share when nothing of it is compiled: NumPy, and no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.planning.channel_specs import ArraySpec
from shoal.planning.segments import Program, Segment
from shoal.runtime.channels.channel import Message
from shoal.runtime.channels.flow_control import Turn
from shoal.tracing.hosting import Task


@dataclass(frozen=True)
class HostExecutor:
    """A fragment of host stages alone; plain data, which another process can be sent."""

    program: Program
    tasks: Mapping[str, Task]
    cells: Mapping[str, ArraySpec]
    ends: int
    rows: int
    is_free: bool
    is_served: bool = False
    is_copied: bool = True

    def run(self, segment: Segment, end: int, args: list[Any]) -> Sequence[Any]:
        """Nothing of it is compiled."""
        raise AssertionError(f"{self.program.fragment} has a segment")

    def share(self, name: str, x: Any, end: int) -> Any:
        """An end's own rows of a carried value."""
        axis = self.cells[name].axis
        if axis is None or self.ends == 1:
            return np.array(x)
        rows = x.shape[axis] // self.ends
        return np.array(x[(slice(None),) * axis + (slice(end * rows, (end + 1) * rows),)])

    def is_alone(self, name: str) -> bool:
        """NumPy has memory of its own."""
        return False

    def receive(self, channel: str, message: Message, turns: list[Turn]) -> Message:
        """A message in memory of the crew's own."""
        return {name: np.array(x) for name, x in message.items()}

    def copy(self, x: Any) -> Any:
        """A copy that nothing else changes."""
        return np.array(x)

    def room(self, name: str) -> np.ndarray:
        """An array to be filled, turn by turn."""
        cell = self.cells[name]
        return np.empty(cell.rows(self.rows), cell.dtype)
