"""Channels inside a process: messages are passed by reference, gathered or scattered in `take`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from shoal.planning.channel_specs import ChannelSpec
from shoal.planning.policy import Latest
from shoal.runtime.channels.channel import (
    DEPTH,
    Bundle,
    ChannelState,
    Message,
    Receive,
    Taken,
    make_bundles,
)
from shoal.runtime.channels.flow_control import Counts, Ledger, Turn

KEPT = 4  # newest messages, which a `Latest` reader may still be reading


class Placement(Protocol):
    """The devices of a reader, and the sharding of its values."""

    @property
    def mesh(self) -> Any:
        """The device mesh, or None if there is one device."""
        ...

    def sharding(self, name: str, end: int, /) -> Any:
        """The sharding of the value `name` for the reader's endpoint."""
        ...


class InProcessChannel:
    """A channel that keeps messages until all of their readers' endpoints have taken them."""

    def __init__(
        self, spec: ChannelSpec, reader: Placement | None, bundle: Bundle | None = None
    ) -> None:
        self._spec, self._reader = spec, reader
        self._is_latest = isinstance(spec.gate.flow, Latest)
        counts = Counts([0] * spec.writers, [0] * max(spec.readers, spec.writers))
        self.state = ChannelState(spec, counts, bundle)
        self._kept: dict[Turn, tuple[Message, int]] = {}
        self._left: dict[
            Turn, int
        ] = {}  # the number of readers' endpoints that have yet to take it
        self._lock = threading.Lock()

    def put(self, end: int, message: Message, version: int) -> None:
        """Store a message for its readers."""
        puts = self.state.counts.puts
        if readers := self._spec.gate.readers.get(end):
            if not self._is_latest:
                left = len(readers) if self.state.bundle is None else 1
                self._left[end, puts[end]] = left
            self._kept[end, puts[end]] = message, version
        if self._is_latest:
            self._kept.pop((end, puts[end] - KEPT), None)
        self.state.did_put(end)

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """Take the next message, with the reader's rows and on its device."""
        turns = self.state.turns(end, tick)
        while not all(turn in (kept := dict(self._kept)) for turn in turns):
            turns = self.state.again(end)  # a newer one arrived meanwhile: only `Latest` drops any
        sent = {turn: kept[turn] for turn in turns}
        self.state.let_go(end, turns)
        self._forget(turns)
        message = self._joined(end, [(turn, m) for turn, (m, _) in sent.items()])
        return Taken(receive(message, turns), tuple(version for _, version in sent.values()))

    def _forget(self, turns: list[Turn]) -> None:
        if self._is_latest:
            return
        with self._lock:
            for turn in turns:
                self._left[turn] -= 1
                if not self._left[turn]:
                    del self._left[turn], self._kept[turn]

    def _joined(self, end: int, sent: list[tuple[Turn, Message]]) -> Message:
        moved = [(w, self._moved(message, end)) for (w, _), message in sent]
        if self._is_plain:
            return moved[0][1]
        if self._reader is None:
            return {c.name: self._part(c.name, end, moved, np) for c in self._spec.cells}
        # The sources of the turns may change; how they are joined doesn't.
        order = [w for w, _ in moved]
        key = tuple(order) if self.state.bundle is None else ()
        joined = self._join[end](key, [m for _, m in moved])
        return dict(zip([c.name for c in self._spec.cells], joined, strict=True))

    @cached_property
    def _is_plain(self) -> bool:
        return self._spec.readers == 1 and self._spec.writers == 1

    def _moved(self, message: Message, end: int) -> Message:
        """A message on the reader's device; on its first device if it has yet to be joined."""
        if self._reader is None:
            return {k: np.asarray(x) for k, x in message.items()}
        places = self._places[end]
        return {
            k: x if _is_there(x, places[k]) else jax.device_put(x, places[k])
            for k, x in message.items()
        }

    @cached_property
    def _places(self) -> list[dict[str, Any]]:
        """For each of the reader's endpoints, the sharding of each value before it is joined."""
        assert self._reader is not None
        mesh, names = self._reader.mesh, [c.name for c in self._spec.cells]
        if mesh is not None and not self._is_plain:
            first = SingleDeviceSharding(mesh.devices.flat[0])
            return [dict.fromkeys(names, first)] * self._spec.readers
        return [
            {name: self._reader.sharding(name, end) for name in names}
            for end in range(self._spec.readers)
        ]

    def _part(self, name: str, end: int, sent: list[tuple[int, Message]], xp: Any) -> Any:
        """One value of a reader's message, from the messages of its sources."""
        cell = next(c for c in self._spec.cells if c.name == name)
        if cell.stacked:
            return xp.stack([m[name] for _, m in sent])
        if cell.axis is None:
            return sent[0][1][name]
        if self.state.bundle is not None:
            rows = [m[name] for _, m in sent]
        else:
            of = dict(sent)
            rows = [
                of[p.writer][name][(slice(None),) * cell.axis + (slice(p.start, p.stop),)]
                for p in self._spec.cut[end]
            ]
        return rows[0] if len(rows) == 1 else xp.concatenate(rows, cell.axis)

    @cached_property
    def _join(self) -> list[Callable[[tuple[int, ...], list[Message]], tuple[Any, ...]]]:
        """For each reader's endpoint, the function that joins its message."""
        names = [c.name for c in self._spec.cells]

        def join(end: int) -> Callable[[tuple[int, ...], list[Message]], tuple[Any, ...]]:
            def parts(order: tuple[int, ...], sent: list[Message]) -> tuple[Any, ...]:
                known = list(zip(order or range(len(sent)), sent, strict=True))
                return tuple(self._part(name, end, known, jnp) for name in names)

            together = jax.jit(parts, static_argnums=0)
            assert self._reader is not None
            if self._reader.mesh is None:
                return together
            where = tuple(self._reader.sharding(name, end) for name in names)
            return lambda order, sent: tuple(map(jax.device_put, together(order, sent), where))

        return [join(end) for end in range(self._spec.readers)]


def _is_there(x: Any, where: Any) -> bool:
    return isinstance(x, jax.Array) and x.sharding == where


def make_channels(
    specs: Mapping[str, ChannelSpec], readers: Mapping[str, Placement | None]
) -> dict[str, InProcessChannel]:
    """Make all channels of a plan inside this process; `readers` has each fragment's placement."""
    bundles = make_bundles(specs)
    channels = {
        name: InProcessChannel(s, readers[s.gate.reader], bundles.get(name))
        for name, s in specs.items()
    }
    admitting = [c for name, c in channels.items() if specs[name].gate.admits]
    if admitting:
        ends = max(specs[c].writers for c in bundles)
        ledger = Ledger([0] * ends, [0] * ends, [0] * ends, [0] * (ends * DEPTH), DEPTH)
        for channel in admitting:
            channel.state.counts.ledger = ledger
    return channels
