"""A worker's operations in a tick, as plain data that can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.graph.ir import Carry
from shoal.planning.program import Call, Do, Put, Repeat, Take


@dataclass(frozen=True, slots=True)
class Slice:
    """Take this turn's slice of a looped-over array."""

    outer: str
    inner: str
    index: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Make the array that a loop's turns are stacked into."""

    outer: str


@dataclass(frozen=True, slots=True)
class Stack:
    """Write this turn's value into its buffer."""

    inner: str
    outer: str
    index: str


@dataclass(frozen=True, slots=True)
class Alias:
    """Give a value another name."""

    value: str
    name: str


Work = Do | Repeat | Slice | Buffer | Stack | Alias
NumpyOp = Slice | Buffer | Stack | Alias


@dataclass(frozen=True, slots=True)
class Segment:
    """Work that compiles to one XLA program."""

    work: tuple[Work, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    donates: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NumpyWork:
    """Slices and stacks in NumPy, which is fastest where Python runs the loop."""

    work: tuple[NumpyOp, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostLoop:
    """A loop that waits on channels, run by Python, in this order of turns."""

    order: range
    index: str
    renames: tuple[tuple[str, str], ...]
    carries: tuple[Carry, ...]
    body: tuple[Operation, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """What it reads itself; what its body reads is the body's."""
        firsts = [name for c in self.carries for name in (c.first, c.after)]
        return (*firsts, *(first for first, _ in self.renames))

    @property
    def writes(self) -> tuple[str, ...]:
        """What it makes itself."""
        made = [name for c in self.carries for name in (c.before, c.final)]
        return (*made, *(name for _, name in self.renames), self.index)


Operation = Segment | NumpyWork | HostLoop | Take | Put | Call


@dataclass(frozen=True, slots=True)
class Program:
    """A fragment's operations in a tick, the values it carries, and the metrics it reports."""

    fragment: str
    operations: tuple[Operation, ...]
    carry: tuple[tuple[str, str], ...]
    constants: tuple[str, ...]
    metrics: tuple[tuple[str, str], ...]

    @property
    def compiles(self) -> bool:
        """Whether any of it is compiled."""
        return any(isinstance(op, Segment) for op in walk(self.operations))

    @property
    def compiles_whole(self) -> bool:
        """Whether the tick is a single segment, so that many ticks can run in one call."""
        return len(self.operations) == 1 and isinstance(self.operations[0], Segment)


def walk(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Every operation, those inside host loops included."""
    for operation in operations:
        yield operation
        if isinstance(operation, HostLoop):
            yield from walk(operation.body)
