"""A channel as workers need it: its endpoints, and the memory layout of its messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoal.graph.ir import Value
from shoal.planning.plan import Plan
from shoal.planning.policy import Flow, Latest, Queue, lag_of, takes_some
from shoal.planning.program import Channel

MOST_IN_FLIGHT = 16  # turns that an endpoint may have in flight where nothing else bounds them
KEY_WORDS = 2  # a key's data, in 32-bit words


@dataclass(frozen=True, slots=True)
class Gate:
    """One channel: for each endpoint of its reader, the endpoints of the writer it takes from."""

    name: str
    writer: str
    reader: str
    sources: tuple[tuple[int, ...], ...]
    flow: Flow
    capacity: int
    admits: int = 0  # turns that an asynchronous reader may have in flight; 0: it is none
    bound: int | None = None  # the lag in ticks that a turn may be used with
    only_newer: bool = False  # its reader waits for a newer value than it has seen
    # By writer's endpoint: the endpoints that read from it, and all that these read from.
    readers: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    beside: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        readers: dict[int, list[int]] = {}
        for reader, sources in enumerate(self.sources):
            for writer in sources:
                readers.setdefault(writer, []).append(reader)
        together = {
            among: tuple(sorted({w for r in among for w in self.sources[r]}))
            for among in {tuple(found) for found in readers.values()}
        }
        object.__setattr__(self, "readers", {w: tuple(found) for w, found in readers.items()})
        object.__setattr__(self, "beside", {w: together[r] for w, r in self.readers.items()})

    @property
    def lag(self) -> int:
        """How many messages are there before the first is made."""
        return lag_of(self.flow)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of what one endpoint of the writer sends."""

    writer: int
    start: int
    stop: int


def pieces(rows: int, writers: int, readers: int) -> tuple[tuple[Piece, ...], ...]:
    """For each endpoint of the reader, the pieces of the writer's that make up its rows."""
    wide, narrow = rows // writers, rows // readers
    found = []
    for reader in range(readers):
        first, last = reader * narrow, (reader + 1) * narrow
        spans = [(w, max(first, w * wide), min(last, (w + 1) * wide)) for w in range(writers)]
        found.append(tuple(Piece(w, a - w * wide, b - w * wide) for w, a, b in spans if a < b))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A value as it lies in memory: `shape` is that of all environments."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int | None
    stacked: bool = False  # one from each endpoint of the writer
    is_key: bool = False

    def rows(self, count: int) -> tuple[int, ...]:
        """The shape with `count` rows."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], count, *self.shape[self.axis + 1 :])


def make_cell(value: Value) -> ArraySpec:
    """How a value lies in memory; a key lies there as its data."""
    if value.dtype.startswith("key<"):
        return ArraySpec(value.name, (*value.shape, KEY_WORDS), "uint32", value.axis, is_key=True)
    return ArraySpec(value.name, value.shape, value.dtype, value.axis)


@dataclass(frozen=True)
class ChannelSpec:
    """A channel's gate, the values of its messages, and how many endpoints and rows there are."""

    gate: Gate
    cells: tuple[ArraySpec, ...]
    writers: int
    rows: int

    @property
    def readers(self) -> int:
        """How many endpoints the reader has."""
        return len(self.gate.sources)

    def received(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each value of a message, as one of the reader's ends has it."""
        flow = self.gate.flow
        takes = flow.take if isinstance(flow, Queue) and isinstance(flow.take, int) else 0
        sources = takes or len(self.gate.sources[0])
        rows = self.rows * takes // self.writers if takes else self.rows // self.readers
        return {
            c.name: ((sources, *c.shape) if c.stacked else c.rows(rows), c.dtype)
            for c in self.cells
        }

    @cached_property
    def cut(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces that make up each reader's rows."""
        return pieces(self.rows, self.writers, self.readers)


def make_channel_specs(plan: Plan) -> dict[str, ChannelSpec]:
    """Every channel of a plan."""
    return {channel.name: _spec(plan, channel) for channel in plan.channels}


def _spec(plan: Plan, channel: Channel) -> ChannelSpec:
    cells = tuple(_cell(plan, channel.writer, v) for v in channel.values)
    gate, writers = _gate(plan, channel, cells), plan.ends(channel.writer)
    return ChannelSpec(gate, cells, writers, plan.graph.envs)


def _cell(plan: Plan, writer: str, value: str) -> ArraySpec:
    cell = make_cell(plan.graph.values[value])
    if not plan.is_stacked(writer, value):
        return cell
    if plan.ends(writer) > 1:
        return replace(cell, stacked=True)
    # One program makes them all, already one above the other.
    return replace(cell, shape=(plan.distribution.ends(writer), *cell.shape))


def _gate(plan: Plan, channel: Channel, cells: Iterable[ArraySpec]) -> Gate:
    writers, readers = plan.ends(channel.writer), plan.ends(channel.reader)
    cut = pieces(plan.graph.envs, writers, readers)
    everyone = any(c.stacked for c in cells) or takes_some(channel.flow)
    sources = []
    for reader in range(readers):
        rows = any(c.axis is not None for c in cells)
        wanted = {p.writer for p in cut[reader]} if rows else {reader % writers}
        sources.append(tuple(range(writers)) if everyone else tuple(sorted(wanted)))
    gate = Gate(channel.name, channel.writer, channel.reader, tuple(sources), channel.flow, 2)
    capacity = channel.flow.capacity if isinstance(channel.flow, Queue) else gate.lag + 2
    admits, bound = _admission(plan, channel)
    only_newer = channel.reader in plan.observers
    return replace(gate, capacity=capacity, admits=admits, bound=bound, only_newer=only_newer)


def _admission(plan: Plan, channel: Channel) -> tuple[int, int | None]:
    """How many turns each asynchronous endpoint may have in flight, and their largest lag."""
    queues = [c for c in plan.channels if takes_some(c.flow)]
    bounded = plan.asynchronous - plan.observers
    latest = [c for c in plan.channels if isinstance(c.flow, Latest) and c.reader in bounded]
    if channel not in (*queues, *latest):
        return 0, None
    bounds = [c.flow.max_lag for c in latest if isinstance(c.flow, Latest)]
    bound = min((b for b in bounds if b is not None), default=None)
    if bound is None:
        return MOST_IN_FLIGHT, None
    taken = plan.seen * plan.ends(queues[0].writer) // plan.graph.envs
    return min(MOST_IN_FLIGHT, taken * (bound + 1) // plan.ends(queues[0].writer)), bound
