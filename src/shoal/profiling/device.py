"""Which stages a device is busy with inside one program, from a trace of XLA's operations.

XLA keeps for each operation the path of calls that it comes from, and a stage is such a call. So
the time of an operation belongs to the outermost stage of its path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

_NAMED = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?\bop_name="([^"]*)"', re.MULTILINE)
_CALL = re.compile(r"jit\(([^/()]+)")
BETWEEN = ""  # the stage of operations between stages, and of loops themselves
HOST_PLANE, DEVICE_PLANE = "/host:CPU", "/device:"


class Event(Protocol):
    """An event of `jax.profiler.ProfileData`."""

    @property
    def start_ns(self) -> float:
        """When it began."""
        ...

    @property
    def duration_ns(self) -> float:
        """How long it took."""
        ...

    @property
    def stats(self) -> Iterable[tuple[str, Any]]:
        """Names and values."""
        ...


class Operation(NamedTuple):
    """An operation that ran: its name in a program, when it began, and how long it took."""

    name: str
    start: float
    duration: float


def stage_of(path: str, stages: Collection[str]) -> str:
    """The outermost stage in an operation's path of calls; empty if there is none."""
    return next((name for name in _CALL.findall(path) if name in stages), BETWEEN)


def stages_of_operations(program: str, stages: Collection[str]) -> dict[str, str]:
    """The stage of each operation of a compiled program, which is given as text."""
    return {name: stage_of(path, stages) for name, path in _NAMED.findall(program)}


def busy_nanoseconds(profile: Any, stage_by_name: Mapping[str, str]) -> dict[str, float]:
    """How long devices were busy with each stage, from `jax.profiler.ProfileData`.

    Operations of other programs are left out. Threads of a CPU that work at the same time add up.
    """
    found: dict[str, float] = {}
    for events in _lines(profile):
        for name, duration in own_durations(_operations(events, stage_by_name)):
            stage = stage_by_name[name]
            found[stage] = found.get(stage, 0.0) + duration
    return found


def _lines(profile: Any) -> Iterator[Iterable[Event]]:
    """The lines of events of the devices; of CPUs if there are no others."""
    planes = {plane.name: plane for plane in profile.planes}
    devices = [plane for name, plane in planes.items() if name.startswith(DEVICE_PLANE)]
    for plane in devices or [planes[name] for name in planes if name == HOST_PLANE]:
        lines = list(plane.lines)
        # Lines beside a GPU's streams show the same operations again.
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in streams or lines:
            yield line.events


def _operations(events: Iterable[Event], known: Collection[str]) -> Iterator[Operation]:
    for event in events:
        name = next((str(value) for key, value in event.stats if key == "hlo_op"), "")
        if name in known:
            yield Operation(name, event.start_ns, event.duration_ns)


def own_durations(operations: Iterable[Operation]) -> Iterator[tuple[str, float]]:
    """The time of each operation of one thread without those inside it, such as a loop's turns."""
    opened: list[tuple[Operation, list[float]]] = []
    for operation in sorted(operations, key=lambda one: (one.start, -one.duration)):
        while opened and opened[-1][0].start + opened[-1][0].duration <= operation.start:
            yield _own(*opened.pop())
        if opened:
            opened[-1][1].append(operation.duration)
        opened.append((operation, []))
    while opened:
        yield _own(*opened.pop())


def _own(operation: Operation, inside: list[float]) -> tuple[str, float]:
    return operation.name, max(0.0, operation.duration - sum(inside))
