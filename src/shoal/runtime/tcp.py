"""Channels between hosts: each worker has its own ring, and messages go straight into it.

A worker's ring is laid out as in shared memory, rows by reader, so what comes from many writers
lies as its reader wants it. Counts are kept by each worker and told to those they concern: what
was put comes with the message, what was taken makes room for the next.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.planning.policy import Latest, Packed, Queue, takes_some
from shoal.runtime import frames
from shoal.runtime.channels import Bell, Message, Receive, Taken, Turnstile
from shoal.runtime.frames import ASK, COUNT, DATA, GRANT, TAKEN, Frame, Key, Terms
from shoal.runtime.lines import Lines, View
from shoal.runtime.links import Link, Links
from shoal.runtime.memory import Memory
from shoal.runtime.packing import Parcel, Sent, raw, total
from shoal.runtime.shm import ShmChannel, Target, key_data


class TcpChannel:
    """A channel whose ends are in different workers, as one of them sees it."""

    def __init__(self, ring: ShmChannel, view: View, links: Links) -> None:
        self._ring, self._view, self._links = ring, view, links
        self.turnstile: Turnstile = ring.turnstile
        self._sheet, self._gate, me = view.sheet, view.sheet.gate, links.me
        self._is_news = isinstance(self._gate.flow, Latest)
        self._is_some = takes_some(self._gate.flow)
        # A long queue needn't hear of every message that was taken, as long as it has room left.
        is_long = isinstance(self._gate.flow, Queue) and not self._is_some
        self._together = max(1, self._gate.capacity // 2) if is_long else 1
        mine = [w for w, worker in enumerate(view.writers) if worker == me]
        self._ways = {w: list(self._ways_from(w)) for w in mine}
        self._is_near = {w: bool(view.taking(w, me)) for w in mine}
        self._rooms: dict[int, list[_Room]] = {}
        self._admission = self._make_admission(mine)

    def _ways_from(self, writer: int) -> Iterator[_Way]:
        view = self._view
        for other in sorted({view.readers[r] for r in self._gate.readers.get(writer, ())}):
            if other != self._links.me:
                parts = self._ring.rooms(writer, 0, view.taking(writer, other))
                link, name = self._links.links[other], (view.number, writer)
                yield _Way(link, name, parts, self._sheet.packing)

    def _make_admission(self, mine: Sequence[int]) -> _Asking | _Granting | None:
        if not (self._is_news and self._gate.admits):
            return None
        if mine:
            return _Granting(self)
        asking = _Asking(self)
        self.turnstile.admit = asking.may_begin
        return asking

    def tell(self, worker: int, frame: Frame) -> None:
        """Send a frame without a body to another worker."""
        self._links.links[worker].send(frame)

    @property
    def view(self) -> View:
        """Who holds which end."""
        return self._view

    def put(self, end: int, message: Message, version: int) -> None:
        """Send a message to those workers that have a reader of it."""
        number = self.turnstile.counts.puts[end]
        for way in self._ways[end]:
            way.send(message, number, version)
        if self._is_near[end]:
            self._ring.put(end, message, version)
        else:
            self.turnstile.did_put(end)
        if self._is_news:
            for other in self._view.beside(end) - {self._links.me}:
                self.tell(other, Frame(COUNT, self._view.number, end, number))
            if isinstance(self._admission, _Granting):
                self._admission.grant()

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """The next message, looked at where it came to lie; then there is room for another."""
        seen: list[tuple[int, int]] = []

        def look(message: Message, turns: list[tuple[int, int]]) -> Message:
            seen[:] = turns
            return receive(message, turns)

        taken = self._ring.take(end, tick, look)
        if not self._is_news:
            self._tell_taken(end, seen)
        return taken

    def _tell_taken(self, end: int, turns: list[tuple[int, int]]) -> None:
        number, writers, me = self._view.number, self._view.writers, self._links.me
        if self._is_some:
            for w, n in turns:
                if writers[w] != me:
                    self.tell(writers[w], Frame(TAKEN, number, w, n))
            return
        latest = turns[0][1]
        if (latest + 1) % self._together == 0:
            for other in {writers[w] for w, _ in turns} - {me}:
                self.tell(other, Frame(TAKEN, number, end, latest // self._together))

    @property
    def sent(self) -> Sent:
        """What this worker has sent on it."""
        ways = [way for ways in self._ways.values() for way in ways]
        return total(way.sent for way in ways)

    # What others send.

    def room(self, frame: Frame) -> list[Any]:
        """Where a message's arrays are to be read to."""
        slots = self._rooms.get(frame.end) or self._make_rooms(frame.end)
        if self._is_news:
            self._ring.begin_landing(frame.end, frame.number)
        return slots[frame.number % len(slots)].views(frame.length)

    def _make_rooms(self, writer: int) -> list[_Room]:
        readers = self._view.taking(writer, self._links.me)
        how = self._sheet.packing
        found = [_Room(self._ring.rooms(writer, s, readers), how) for s in range(self._ring.slots)]
        self._rooms[writer] = found
        return found

    def arrived(self, frame: Frame) -> None:
        """Count what another worker told, and wake who waited for it."""
        stile, end = self.turnstile, frame.end
        match frame.kind:
            case frames.DATA:
                slots = self._rooms[end]
                slots[frame.number % len(slots)].settle(frame.length)
                self._ring.end_landing(end, frame.number, frame.stamp)
            case frames.TAKEN:
                stile.counts.takes[end] = (frame.number + 1) * self._together
                for bell in stile.writers[0 if self._is_some else end] if stile.writers else ():
                    bell.ring()
            case frames.COUNT:
                # Where the message comes too, it is counted with that.
                if not self._view.taking(end, self._links.me):
                    stile.did_put(end)
            case _:
                assert self._admission is not None
                self._admission.hear(frame)

    def bodies(self, other: int) -> Iterator[tuple[Key, tuple[int, int]]]:
        """What another worker may send, and how long it is."""
        view, me = self._view, self._links.me
        for writer, worker in enumerate(view.writers):
            readers = view.taking(writer, me)
            if worker == other and readers:
                rooms = self._ring.rooms(writer, 0, readers)
                yield (DATA, view.number, writer), _parcel(rooms, self._sheet.packing).bounds
            if worker == other and me in view.beside(writer):
                yield (COUNT, view.number, writer), (0, 0)
            if worker == me:
                for reader in view.taking(writer, other):
                    end = writer if self._is_some else reader
                    yield (TAKEN, view.number, end), (0, 0)
        if self._admission is not None:
            kind, asks = (ASK, other) if isinstance(self._admission, _Granting) else (GRANT, me)
            ends = [end for end, worker in enumerate(view.readers) if worker == asks]
            yield from (((kind, view.number, end), (0, 0)) for end in ends)


class _Way:
    """The way of one end's messages to one other worker."""

    def __init__(self, link: Link, name: tuple[int, int], rooms: list[Target], how: Packed) -> None:
        self._link, self._name = link, name
        self._parts = [(name, is_key, rows) for _, name, is_key, rows in rooms]
        self._parcel = _parcel(rooms, how)
        self.sent = Sent()

    def send(self, message: Message, number: int, version: int) -> None:
        """Send arrays from where they lie, if they lie as they have to."""
        values = []
        for name, is_key, rows in self._parts:
            x = message[name]
            x = key_data(x) if is_key and type(x) is not np.ndarray else np.asarray(x)
            values.append(x if rows is None else x[rows])
        views, length = self._parcel.pack(values)
        self._link.send(Frame(DATA, *self._name, number, version, length), views)
        count, plain, packed = self.sent
        self.sent = Sent(count + 1, plain + self._parcel.plain, packed + length)


class _Room:
    """Where one message comes to lie; what lies otherwise on the way is read beside it."""

    def __init__(self, rooms: list[Target], how: Packed) -> None:
        self._rooms = [room for room, *_ in rooms]
        self._parcel = _parcel(rooms, how)
        parts = list(zip(self._rooms, self._parcel.arrays, strict=True))
        direct = [room.flags.c_contiguous and room.dtype == x.dtype for room, x in parts]
        self._moves = [pair for pair, is_direct in zip(parts, direct, strict=True) if not is_direct]
        pairs = zip(parts, direct, strict=True)
        self._views = [raw(room if is_direct else x) for (room, x), is_direct in pairs]

    def views(self, length: int) -> list[Any]:
        """Buffers for so many bytes."""
        return [self._parcel.room(length)] if self._parcel.is_squeezed else self._views

    def settle(self, length: int) -> None:
        """All has come: unpack it, and move what is to lie elsewhere."""
        if self._parcel.is_squeezed:
            self._parcel.unpack(length)
            for room, x in zip(self._rooms, self._parcel.arrays, strict=True):
                room[...] = x
            return
        for room, x in self._moves:
            room[...] = x


def _parcel(rooms: list[Target], how: Packed) -> Parcel:
    return Parcel([(room.shape, room.dtype) for room, *_ in rooms], how)


class _Asking:
    """A free reader, which begins a turn only when the writer has noted it."""

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        count = len(channel.view.readers)
        self._asked, self._granted, self._least = ([0] * count for _ in range(3))

    def may_begin(self, end: int) -> bool:
        """Whether a turn was granted, and what it is to be begun from has come; asks if not."""
        channel, stile = self._channel, self._channel.turnstile
        ledger = stile.counts.ledger
        assert ledger is not None
        begun = ledger.begun[end]
        if self._granted[end] > begun:
            return stile.newest(end) >= self._least[end]
        if self._asked[end] == begun:
            self._asked[end] += 1
            source = stile.sheet.gate.sources[end][0]
            asks = Frame(ASK, channel.view.number, end, begun)
            channel.tell(channel.view.writers[source], asks)
        return False

    def hear(self, frame: Frame) -> None:
        """A turn was granted, from a version."""
        self._least[frame.end] = frame.stamp
        self._granted[frame.end] += 1
        stile = self._channel.turnstile
        for source in stile.sheet.gate.sources[frame.end]:
            for bell in stile.readers[source] if stile.readers else ():
                bell.ring()


class _Granting:
    """The writer that free readers elsewhere take news from: it keeps the ledger for them."""

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        self._asks: dict[int, int] = {}
        self._lock = threading.Lock()

    def hear(self, frame: Frame) -> None:
        """A reader wants to begin its next turn."""
        with self._lock:
            self._asks[frame.end] = frame.number
        self.grant()

    def grant(self) -> None:
        """Let those begin that may."""
        channel, stile = self._channel, self._channel.turnstile
        granted: list[tuple[int, Frame]] = []
        with self._lock:
            for end, number in list(self._asks.items()):
                if stile.may_take(end, 0):
                    del self._asks[end]
                    version = stile.begin(end)
                    frame = Frame(GRANT, channel.view.number, end, number, version)
                    granted.append((channel.view.readers[end], frame))
        for worker, frame in granted:
            channel.tell(worker, frame)


class _Ears:
    """Hands what comes to the channel it is for."""

    def __init__(self, channels: Sequence[TcpChannel]) -> None:
        self._channels = channels

    def room(self, frame: Frame) -> list[Any]:
        """Buffers for a frame's body."""
        return self._channels[frame.channel].room(frame)

    def arrived(self, frame: Frame) -> None:
        """A frame has come whole."""
        self._channels[frame.channel].arrived(frame)


def join_lines(
    lines: Lines,
    me: int,
    listener: socket.socket,
    check: Callable[[], None],
    bells: Mapping[str, Sequence[Bell]],
) -> tuple[Links, dict[str, TcpChannel]]:
    """Connect worker `me` with the others, and open its channels: all that a worker has to do.

    Others reach it at `listener`, whose address `lines` has. `check` raises if all is to stop.
    `bells` are those of every end, by fragment; of ends elsewhere they are silent.
    """
    links = Links(me, lines.names, lines.known, check)
    links.join(listener, lines.others(me), lines.addresses)

    def wake() -> None:
        for one in {id(bell): bell for of in bells.values() for bell in of}.values():
            one.ring()

    channels = open_lines(lines, links, wake)
    for channel in channels.values():
        gate = channel.turnstile.sheet.gate
        channel.turnstile.hear(bells[gate.reader], bells[gate.writer])
    return links, channels


def open_lines(
    lines: Lines,
    links: Links,
    wake: Callable[[], None] = lambda: None,
    memory: Memory | None = None,
) -> dict[str, TcpChannel]:
    """The channels between hosts, as this worker sees them; its links stand already.

    `wake` is called when a connection is gone; `memory` is where messages are to lie.
    """
    rings = lines.rings.open(memory or Memory.make(lines.size))
    every = [
        TcpChannel(ring, view, links)
        for ring, view in zip(rings.values(), lines.views(), strict=True)
    ]
    terms = {
        other: Terms.of({k: b for channel in every for k, b in channel.bodies(other)})
        for other in links.links
    }
    links.read(terms, _Ears(every), wake)
    return dict(zip(rings, every, strict=True))
