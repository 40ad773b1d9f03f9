"""Channels in shared memory: slots that writers fill and readers read in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from shoal.planning.channel_specs import ArraySpec, ChannelSpec
from shoal.planning.policy import Latest, takes_some
from shoal.runtime.channels.channel import (
    DEPTH,
    Bundle,
    ChannelState,
    Message,
    Receive,
    Taken,
    make_bundles,
)
from shoal.runtime.channels.flow_control import AHEAD, Counts, Ledger, Turn
from shoal.runtime.channels.shared_memory import LINE, ORDERED, Allocator, Memory, fence

Target = tuple[
    np.ndarray, str, bool, Any
]  # an array, its value's name, whether that is a key, its rows
NEWEST = AHEAD + 1  # slots for `Latest`: writers never wait, readers retry


@dataclass(frozen=True)
class ChannelLayout:
    """The offsets of a channel's counts and slots in shared memory."""

    spec: ChannelSpec
    puts: int
    takes: int
    versions: int
    numbers: int
    slots: tuple[tuple[int, ...], ...]  # for each slot, the offset of each array

    @staticmethod
    def plan(spec: ChannelSpec, memory: Allocator) -> ChannelLayout:
        """Allocate the channel's memory."""
        slots = slots_of(spec)
        ends = max(spec.readers, spec.writers)
        puts, takes = memory.take(spec.writers * LINE), memory.take(ends * LINE)
        versions, numbers = (memory.take(spec.writers * slots * 8) for _ in range(2))
        sizes = [prod(shape) * np.dtype(cell.dtype).itemsize for cell, shape, _ in arrays(spec)]
        places = tuple(tuple(memory.take(size) for size in sizes) for _ in range(slots))
        return ChannelLayout(spec, puts, takes, versions, numbers, places)


def slots_of(spec: ChannelSpec) -> int:
    """The number of messages per endpoint that a channel holds."""
    return NEWEST if isinstance(spec.gate.flow, Latest) else spec.gate.capacity


def arrays(spec: ChannelSpec) -> list[tuple[ArraySpec, tuple[int, ...], int]]:
    """The arrays of a slot: spec, shape and owning endpoint of each.

    Rows are stored by reader, so that a reader's rows are contiguous. Values that all readers
    share, and values of queues that take some, are stored by writer.
    """
    found = []
    for cell in spec.cells:
        if cell.stacked:
            found.append((cell, (spec.writers, *cell.shape), 0))
        elif cell.axis is None or takes_some(spec.gate.flow):
            shape = cell.rows(spec.rows // spec.writers)
            found += [(cell, shape, writer) for writer in range(spec.writers)]
        else:
            shape = cell.rows(spec.rows // spec.readers)
            found += [(cell, shape, reader) for reader in range(spec.readers)]
    return found


class ShmChannel:
    """A channel between processes on one host."""

    def __init__(
        self,
        memory: Memory,
        layout: ChannelLayout,
        bundle: Bundle | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        spec = layout.spec
        ends = max(spec.readers, spec.writers)
        counts = Counts(
            memory.words(layout.puts, spec.writers), memory.words(layout.takes, ends), ledger
        )
        self.state = ChannelState(spec, counts, bundle, fence)
        self._memory, self._layout, self._spec = memory, layout, spec
        self._slots = slots_of(spec)
        marks = spec.writers * self._slots
        self._versions = memory.packed(layout.versions, marks)
        self._numbers = memory.packed(layout.numbers, marks)
        self._is_latest = isinstance(spec.gate.flow, Latest)
        self._filling: dict[int, list[list[Target]]] = {}
        self._looking: dict[int, list[Message]] = {}

    def put(self, end: int, message: Message, version: int) -> None:
        """Write a message to the next slot."""
        number = self.state.counts.puts[end]
        slot = number % self._slots
        if end not in self._filling:
            readers = range(self._spec.readers)
            self._filling[end] = [self.targets(end, s, readers) for s in range(self._slots)]
        self.begin_landing(end, number)
        for target, name, is_key, rows in self._filling[end][slot]:
            x = message[name]
            if is_key and type(x) is not np.ndarray:
                x = key_data(x)
            target[...] = x if rows is None else np.asarray(x)[rows]
        self.end_landing(end, number, version)

    def begin_landing(self, end: int, number: int) -> None:
        """Mark a message's slot as being written: its readers retry."""
        if self._is_latest:
            self._numbers[self._mark((end, number))] = -1

    def end_landing(self, end: int, number: int, version: int) -> None:
        """Publish a message whose slot is complete."""
        mark = self._mark((end, number))
        self._versions[mark] = version
        self._numbers[mark] = number
        if not ORDERED:
            fence()
        self.state.did_put(end)

    @property
    def slots(self) -> int:
        """The number of messages per endpoint that it holds."""
        return self._slots

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """Take the next message, read in place; its slot is free again on return."""
        if self._is_latest:
            return self._newest(end, tick, receive)
        turns = self.state.turns(end, tick)
        if not ORDERED:
            fence()
        message = receive(self._look(end, turns), turns)
        slots = self._slots
        versions = tuple([self._versions[w * slots + n % slots] for w, n in turns])
        self.state.let_go(end, turns)
        return Taken(message, versions)

    def _newest(self, end: int, tick: int, receive: Receive) -> Taken:
        """The newest message; if it was overwritten meanwhile, a copy of the next newest."""
        turns = self.state.turns(end, tick)
        if not ORDERED:
            fence()
        message = receive(self._look(end, turns), turns)
        while (versions := self._untouched(turns)) is None:
            turns = self.state.again(end)
            copy = {name: x.copy() for name, x in self._look(end, turns).items()}
            if (versions := self._untouched(turns)) is not None:
                message = receive(copy, turns)
                break
        self.state.let_go(end, turns)
        return Taken(message, versions)

    def _untouched(self, turns: list[Turn]) -> tuple[int, ...] | None:
        """The versions of messages, or None if one of them was overwritten."""
        marks = [self._mark(turn) for turn in turns]
        versions = tuple(self._versions[mark] for mark in marks)
        whole = all(self._numbers[m] == n for m, (_, n) in zip(marks, turns, strict=True))
        return versions if whole else None

    def _mark(self, turn: Turn) -> int:
        return turn[0] * self._slots + turn[1] % self._slots

    def _look(self, end: int, turns: list[Turn]) -> Message:
        if self.state.bundle is not None:
            return self._gathered(turns)
        if end not in self._looking:
            self._looking[end] = [self._views(end, s) for s in range(self._slots)]
        return self._looking[end][turns[0][1] % self._slots]

    def _gathered(self, turns: list[Turn]) -> Message:
        """The rows of these turns' writers, concatenated."""
        found: Message = {}
        for cell in self._spec.cells:
            held = [self._arrays[n % self._slots] for _, n in turns]
            if cell.stacked:
                found[cell.name] = np.stack(
                    [x[cell.name, 0][w] for x, (w, _) in zip(held, turns, strict=True)]
                )
                continue
            xs = [x[cell.name, w] for x, (w, _) in zip(held, turns, strict=True)]
            rows = cell.axis is not None
            found[cell.name] = np.concatenate(xs, cell.axis) if rows and len(xs) > 1 else xs[0]
        return found

    @cached_property
    def _arrays(self) -> list[dict[tuple[str, int], np.ndarray]]:
        """All arrays of all slots, by value and owner."""
        return [
            {
                (cell.name, owner): self._memory.array(first, shape, cell.dtype)
                for first, (cell, shape, owner) in zip(places, arrays(self._spec), strict=True)
            }
            for places in self._layout.slots
        ]

    def targets(self, end: int, slot: int, readers: Collection[int]) -> list[Target]:
        """The arrays that an endpoint writes for these readers, with their rows (None: all)."""
        found: list[Target] = []
        for cell in self._spec.cells:
            held = self._arrays[slot]
            if cell.stacked:
                found.append((held[cell.name, 0][end, ...], cell.name, cell.is_key, None))
            elif cell.axis is None or takes_some(self._spec.gate.flow):
                found.append((held[cell.name, end], cell.name, cell.is_key, None))
            else:
                found += self._rows(cell, end, held, readers)
        return found

    def _rows(
        self, cell: ArraySpec, end: int, held: Mapping[tuple[str, int], np.ndarray], readers: Any
    ) -> list[Target]:
        assert cell.axis is not None
        before, wide = (slice(None),) * cell.axis, self._spec.rows // self._spec.writers
        found = []
        for reader, cut in enumerate(self._spec.cut):
            first = 0
            for piece in cut:
                count = piece.stop - piece.start
                if piece.writer == end and reader in readers:
                    target = held[cell.name, reader][(*before, slice(first, first + count))]
                    rows = None if count == wide else (*before, slice(piece.start, piece.stop))
                    found.append((target, cell.name, cell.is_key, rows))
                first += count
        return found

    def _views(self, end: int, slot: int) -> Message:
        held, source = self._arrays[slot], self._spec.gate.sources[end][0]
        return {
            c.name: held[c.name, 0 if c.stacked else source if c.axis is None else end]
            for c in self._spec.cells
        }


def key_data(x: Any) -> np.ndarray:
    """The key data of a PRNG key; imports JAX only when called."""
    from jax.random import key_data

    return np.asarray(key_data(x))


@dataclass(frozen=True)
class ChannelLayouts:
    """The layouts of all channels in shared memory, and the ledger of asynchronous endpoints."""

    layouts: Mapping[str, ChannelLayout]
    ledger: int
    ends: int

    @staticmethod
    def plan(specs: Mapping[str, ChannelSpec], memory: Allocator) -> ChannelLayouts:
        """Allocate the memory of all channels."""
        queues = [s.writers for s in specs.values() if takes_some(s.gate.flow)]
        ends = max(queues, default=0)
        ledger = memory.take(ends * (3 * LINE + DEPTH * 8))
        return ChannelLayouts(
            {name: ChannelLayout.plan(s, memory) for name, s in specs.items()}, ledger, ends
        )

    def open(self, memory: Memory) -> dict[str, ShmChannel]:
        """Open the channels in this process."""
        ends, first = self.ends, self.ledger
        ledger = None
        if ends:
            begun, used, settled = (memory.words(first + i * ends * LINE, ends) for i in range(3))
            versions = memory.packed(first + 3 * ends * LINE, ends * DEPTH)
            ledger = Ledger(begun, used, settled, versions, DEPTH)
        bundles = make_bundles({name: layout.spec for name, layout in self.layouts.items()})
        if memory.is_shared:
            for bundle in bundles.values():
                own = [
                    layout for name, layout in self.layouts.items() if bundles.get(name) is bundle
                ]
                bundle.changed = _Changes(
                    [(layout.puts, layout.spec.writers) for layout in own], memory
                )
        return {
            name: ShmChannel(memory, layout, bundles.get(name), ledger)
            for name, layout in self.layouts.items()
        }


class _Changes:
    """Finds the endpoints that have put since the last call, by comparing all their counts."""

    def __init__(self, places: Sequence[tuple[int, int]], memory: Memory) -> None:
        step = LINE // 8
        self._counts = [memory.array(at, (n, step), np.int64)[:, 0] for at, n in places]
        self._seen = [np.zeros(n, np.int64) for _, n in places]
        self._first = 0  # the endpoint that is returned first; rotates with each call

    def __call__(self) -> list[int]:
        found: set[int] = set()
        for i, counts in enumerate(self._counts):
            now = counts.copy()
            found.update((now != self._seen[i]).nonzero()[0].tolist())
            self._seen[i] = now
        count = len(self._seen[0])
        self._first = (self._first + 1) % count
        return sorted(found, key=lambda end: (end - self._first) % count)
