"""The spec that all endpoints of a fragment share, and an executor that needs no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.planning.channel_specs import ArraySpec
from shoal.planning.policy import Serve
from shoal.planning.segments import Program, Segment
from shoal.runtime.channels.channel import Message
from shoal.runtime.channels.flow_control import Turn
from shoal.tracing.hosting import Task


@dataclass(frozen=True)
class FragmentSpec:
    """A fragment as plain data: its program, its host stages and the specs of its values.

    `cells` has the array spec of each value in one endpoint. `batch_axes` are the axes along which
    a server concatenates the values of several endpoints.
    """

    program: Program
    tasks: Mapping[str, Task]
    cells: Mapping[str, ArraySpec]
    batch_axes: Mapping[str, int]
    ends: int
    ends_per_worker: int
    rows: int  # environments per endpoint
    is_free: bool
    serve: Serve | None  # how it serves the endpoints of another fragment, if it does
    is_copied: bool
    alone: frozenset[str] = frozenset()  # carried values that no other fragment holds

    @property
    def is_served(self) -> bool:
        """Whether its endpoints run in batches, as requests of another fragment arrive."""
        return self.serve is not None

    @property
    def name(self) -> str:
        """The fragment's name."""
        return self.program.fragment

    def rows_of(self, name: str, x: Any, end: int) -> Any:
        """An endpoint's rows of a value that holds the rows of all environments."""
        axis = self.cells[name].axis
        if axis is None or self.ends == 1:
            return x
        rows = x.shape[axis] // self.ends
        return x[(slice(None),) * axis + (slice(end * rows, (end + 1) * rows),)]

    def empty(self, name: str) -> np.ndarray:
        """An empty array for a stacked value, filled turn by turn."""
        cell = self.cells[name]
        return np.empty(cell.shape, cell.dtype)


@dataclass(frozen=True)
class HostExecutor:
    """Runs a fragment that has only host stages, in NumPy and without JAX."""

    spec: FragmentSpec

    def run(self, segment: Segment, end: int, args: list[Any]) -> Sequence[Any]:
        """Never called: the fragment has no compiled segment."""
        raise AssertionError(f"{self.spec.name} has a segment")

    def share(self, name: str, x: Any, end: int, *, is_owned: bool) -> Any:
        """A copy of an endpoint's rows of a carried value."""
        return np.array(self.spec.rows_of(name, x, end))

    def receive(self, channel: str, message: Message, turns: list[Turn]) -> Message:
        """A copy of a message."""
        return {name: np.array(x) for name, x in message.items()}

    def copy(self, x: Any) -> Any:
        """A copy that shares no memory with `x`."""
        return np.array(x)
