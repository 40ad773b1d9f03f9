"""Channels between hosts: each worker has its own ring, and messages go straight into it.

A worker's ring is laid out as in shared memory, rows by reader, so what comes from many writers
lies as its reader wants it. Counts are kept by each worker and told to those they concern: what
was put comes with the message, what was taken makes room for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shoal.planning.policy import Latest, Packed, Queue, takes_some
from shoal.runtime import frames
from shoal.runtime.admission import Asking, Granting
from shoal.runtime.channels import Message, Receive, Taken, Turnstile
from shoal.runtime.frames import ASK, COUNT, DATA, GRANT, TAKEN, Frame, Key
from shoal.runtime.lines import View
from shoal.runtime.links import Link, Links
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
        # Who joins late is sent the newest again, so that is kept here too.
        loose = self._is_news and any(w.link.loose for ways in self._ways.values() for w in ways)
        self._is_near = {w: loose or bool(view.taking(w, me)) for w in mine}
        self.lock = threading.Lock()  # held while a message moves, and while somebody joins late
        self._rooms: dict[int, list[_Room]] = {}
        self._admission = self._make_admission(mine)

    def _ways_from(self, writer: int) -> Iterator[_Way]:
        view = self._view
        for other in sorted({view.readers[r] for r in self._gate.readers.get(writer, ())}):
            if other != self._links.me:
                parts = self._ring.rooms(writer, 0, view.taking(writer, other))
                name = view.number, writer, other
                yield _Way(self._links.links[other], name, parts, self._sheet.packing)

    def _make_admission(self, mine: Sequence[int]) -> Asking | Granting | None:
        if not (self._is_news and self._gate.admits):
            return None
        if mine:
            return Granting(self)
        asking = Asking(self)
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
        with self.lock:
            self._put(end, message, version)

    def _put(self, end: int, message: Message, version: int) -> None:
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
            if isinstance(self._admission, Granting):
                self._admission.grant()

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """The next message, looked at where it came to lie; then there is room for another."""
        seen: list[tuple[int, int]] = []

        def look(message: Message, turns: list[tuple[int, int]]) -> Message:
            seen[:] = turns
            return receive(message, turns)

        if self._is_news:
            return self._ring.take(end, tick, receive)
        with self.lock:
            taken = self._ring.take(end, tick, look)
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

    # Who joins late, in the place of one that is gone.

    def told(self, other: int) -> list[int]:
        """What a worker that joins late is told of this channel."""
        counts = self.turnstile.counts
        kinds: dict[str, Any] = {"puts": counts.puts, "takes": counts.takes, "news": counts.puts}
        if counts.ledger is not None:
            kinds["begun"] = counts.ledger.begun
        return [kinds[what][end] for what, end in self._view.told(self._links.me, other)]

    def adopt(self, other: int, words: Iterator[int]) -> None:
        """Go on where one that is gone had been, as another worker has told."""
        counts = self.turnstile.counts
        for what, end in self._view.told(other, self._links.me):
            word = next(words)
            match what:
                case "puts":
                    counts.puts[end] = word
                case "takes":
                    counts.takes[end] = word
                case "news":
                    counts.puts[end] = max(0, word - 1)  # the newest comes again
                case _:
                    assert counts.ledger is not None
                    assert isinstance(self._admission, Asking)
                    counts.ledger.begun[end] = word
                    self._admission.go_on(end, word)

    def send_newest(self, other: int) -> None:
        """Send the newest again, to a worker that joins late."""
        for writer, ways in self._ways.items() if self._is_news else ():
            number = self.turnstile.counts.puts[writer] - 1
            for way in ways if number >= 0 else ():
                if way.worker == other:
                    readers = self._view.taking(writer, other)
                    rooms = self._ring.rooms(writer, number % self._ring.slots, readers)
                    way.send_values([x for x, *_ in rooms], number, self._ring.version(writer))

    def due(self, other: int) -> Iterator[tuple[Key, int]]:
        """Of what another worker may send, the number of the next."""
        counts = self.turnstile.counts
        for (kind, channel, end), _ in self.bodies(other):
            if kind in (ASK, GRANT):
                assert counts.ledger is not None
                yield (kind, channel, end), counts.ledger.begun[end]
            elif kind in (DATA, TAKEN):
                yield (kind, channel, end), (counts.puts if kind == DATA else counts.takes)[end]

    def forget(self, other: int) -> None:
        """Grant nothing that a worker that is gone had asked for."""
        if isinstance(self._admission, Granting):
            self._admission.forget({r for r, w in enumerate(self._view.readers) if w == other})

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
            kind, asks = (ASK, other) if isinstance(self._admission, Granting) else (GRANT, me)
            ends = [end for end, worker in enumerate(view.readers) if worker == asks]
            yield from (((kind, view.number, end), (0, 0)) for end in ends)


class _Way:
    """The way of one end's messages to one other worker."""

    def __init__(
        self, link: Link, name: tuple[int, int, int], rooms: list[Target], how: Packed
    ) -> None:
        self.link = link
        self._channel, self._end, self.worker = name
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
        self.send_values(values, number, version)

    def send_values(self, values: list[np.ndarray], number: int, version: int) -> None:
        """Send arrays that are already as they have to be."""
        views, length = self._parcel.pack(values)
        self.link.send(Frame(DATA, self._channel, self._end, number, version, length), views)
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
