"""Channels inside a process: messages go by reference, gathered or scattered on arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from shoal.planning.plan import Plan
from shoal.planning.program import Channel as PlannedChannel
from shoal.runtime.fire import Gate
from shoal.runtime.lower import Lowering, is_stacked

Message = dict[str, Any]


class Channel(Protocol):
    """One way from a fragment to another; moves come in the order the gate allows."""

    def put(self, writer: int, message: Message) -> None:
        """Hand over what one end of the writer has made."""
        ...

    def take(self, reader: int) -> Message:
        """The next message as one end of the reader sees it."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of what one writer's end sends."""

    writer: int
    start: int
    stop: int


def pieces(rows: int, writers: int, readers: int) -> tuple[tuple[Piece, ...], ...]:
    """For each reader's end, the pieces of the writers' ends that make up its rows."""
    wide, narrow = rows // writers, rows // readers
    found = []
    for reader in range(readers):
        first, last = reader * narrow, (reader + 1) * narrow
        spans = [(w, max(first, w * wide), min(last, (w + 1) * wide)) for w in range(writers)]
        found.append(tuple(Piece(w, a - w * wide, b - w * wide) for w, a, b in spans if a < b))
    return tuple(found)


def make_gate(plan: Plan, channel: PlannedChannel) -> Gate:
    """What the firing machine has to know of a channel."""
    writers, readers = plan.endpoints(channel.writer), plan.endpoints(channel.reader)
    cut = pieces(plan.graph.envs, writers, readers)
    rows = any(plan.graph.values[v].axis is not None for v in channel.values)
    stacked = any(is_stacked(plan, channel.writer, v) for v in channel.values)
    sources = []
    for reader in range(readers):
        wanted = {p.writer for p in cut[reader]} if rows else {reader % writers}
        sources.append(tuple(range(writers)) if stacked else tuple(sorted(wanted)))
    lag = channel.flow.lag
    return Gate(channel.name, channel.writer, channel.reader, tuple(sources), lag, lag + 2)


class InProcessChannel:
    """Messages kept until every reader's end that takes from the writer's end has had them."""

    def __init__(self, plan: Plan, channel: PlannedChannel, reader: Lowering) -> None:
        self._plan, self._channel, self._reader = plan, channel, reader
        self._gate = make_gate(plan, channel)
        writers = plan.endpoints(channel.writer)
        self._kept: list[dict[int, Message]] = [{} for _ in range(writers)]
        self._puts = [0] * writers
        self._takes = [0] * len(self._gate.sources)

    def put(self, writer: int, message: Message) -> None:
        """Keep a message for its readers."""
        self._kept[writer][self._puts[writer]] = message
        self._puts[writer] += 1

    def take(self, reader: int) -> Message:
        """Hand over the next message, in the reader's rows and on its device."""
        number = self._takes[reader]
        self._takes[reader] += 1
        sources = self._gate.sources[reader]
        sent = {w: self._kept[w][number] for w in sources}
        for writer in sources:
            readers = [
                t for t, s in zip(self._takes, self._gate.sources, strict=True) if writer in s
            ]
            if all(taken > number for taken in readers):
                del self._kept[writer][number]
        moved = {w: self._move(message, reader) for w, message in sent.items()}
        if self._is_plain:
            return moved[sources[0]]
        return dict(zip(self._channel.values, self._join[reader](moved), strict=True))

    @cached_property
    def _is_plain(self) -> bool:
        return len(self._gate.sources) == 1 and self._plan.endpoints(self._channel.writer) == 1

    def _move(self, message: Message, reader: int) -> Message:
        """A message on the reader's device; on its first one if it is yet to be put together."""
        mesh = self._reader.mesh
        if mesh is not None and self._is_plain:
            return {
                k: jax.device_put(x, self._reader.sharding(k, reader)) for k, x in message.items()
            }
        where = (
            self._reader.sharding("", reader)
            if mesh is None
            else SingleDeviceSharding(mesh.devices.flat[0])
        )
        return {
            k: x if _is_there(x, where) else jax.device_put(x, where) for k, x in message.items()
        }

    @cached_property
    def _join(self) -> list[Callable[[Mapping[int, Message]], tuple[Any, ...]]]:
        """For each reader's end, how its message is put together."""
        plan, channel = self._plan, self._channel
        cut = pieces(plan.graph.envs, plan.endpoints(channel.writer), len(self._gate.sources))

        def part(name: str, reader: int, sent: Mapping[int, Message]) -> Any:
            axis = plan.graph.values[name].axis
            if is_stacked(plan, channel.writer, name) and not plan.one_program(channel.writer):
                return jnp.stack([sent[w][name] for w in sorted(sent)])
            if axis is None:
                return sent[self._gate.sources[reader][0]][name]
            rows = [
                jax.lax.slice_in_dim(sent[p.writer][name], p.start, p.stop, axis=axis)
                for p in cut[reader]
            ]
            return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis)

        def join(reader: int) -> Callable[[Mapping[int, Message]], tuple[Any, ...]]:
            together = jax.jit(lambda sent: tuple(part(v, reader, sent) for v in channel.values))
            if self._reader.mesh is None:
                return together
            where = tuple(self._reader.sharding(v, reader) for v in channel.values)
            return lambda sent: tuple(map(jax.device_put, together(sent), where))

        return [join(reader) for reader in range(len(self._gate.sources))]


def _is_there(x: Any, where: Any) -> bool:
    return isinstance(x, jax.Array) and x.sharding == where
