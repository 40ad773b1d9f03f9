"""Channels between hosts: each worker has its own ring, and messages go straight into it.

A worker's ring is laid out as in shared memory, rows by reader, so what comes from many writers
lies as its reader wants it. Counts are kept by each worker and told to those they concern: what
was put comes with the message, what was taken makes room for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.planning.policy import Latest, Queue, takes_some
from shoal.runtime.channels.channel import ChannelState, Message, Receive, Taken
from shoal.runtime.channels.shm import ShmChannel, Target
from shoal.runtime.net import framing as frames
from shoal.runtime.net.admission import Asking, Granting
from shoal.runtime.net.codec import Sent, total
from shoal.runtime.net.connections import Connections
from shoal.runtime.net.framing import ASK, COUNT, DATA, GRANT, TAKEN, Frame, Key
from shoal.runtime.net.outbound import Outbound, Room, SendBuffer, parcel_of
from shoal.runtime.net.remote_channels import View


class TcpChannel:
    """A channel whose ends are in different workers, as one of them sees it."""

    def __init__(self, ring: ShmChannel, view: View, links: Connections) -> None:
        self._ring, self._view, self._links = ring, view, links
        self.turnstile: ChannelState = ring.turnstile
        self._sheet, self._gate, me = view.sheet, view.sheet.gate, links.me
        self._is_news = isinstance(self._gate.flow, Latest)
        self._is_some = takes_some(self._gate.flow)
        # A long queue needn't hear of every message that was taken, as long as it has room left.
        is_long = isinstance(self._gate.flow, Queue) and not self._is_some
        self._together = max(1, self._gate.capacity // 2) if is_long else 1
        mine = [w for w, worker in enumerate(view.writers) if worker == me]
        self.lock = threading.Lock()  # held while a message moves, and while somebody joins late
        self._shelves: dict[Any, SendBuffer] = {}
        self._ways = {w: list(self._ways_from(w)) for w in mine}
        self._held = {w: [s for (e, _), s in self._shelves.items() if e == w] for w in mine}
        self._is_near = {w: bool(view.taking(w, me)) for w in mine}
        self._rooms: dict[int, list[Room]] = {}
        self._admission = self._make_admission(mine)

    def _ways_from(self, writer: int) -> Iterator[Outbound]:
        view = self._view
        for other in sorted({view.readers[r] for r in self._gate.readers.get(writer, ())}):
            if other != self._links.me:
                parts = self._ring.rooms(writer, 0, view.taking(writer, other))
                link, key = self._links.links[other], (DATA, view.number, writer)
                way = Outbound(other, key, link.send, self._shelf(writer, parts))
                link.keep(key, way)
                yield way

    def _shelf(self, writer: int, parts: list[Target]) -> SendBuffer:
        """Where an end's messages are packed; once for all workers that get the same of them."""
        same = writer, repr([(room.shape, name, rows) for room, name, _, rows in parts])
        if same not in self._shelves:
            slots = 1 if self._is_news else self._ring.slots
            self._shelves[same] = SendBuffer(parts, self._sheet.packing, slots, self.lock)
        return self._shelves[same]

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
    def is_news(self) -> bool:
        """Whether only the newest message counts."""
        return self._is_news

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
        for shelf in self._held[end]:
            shelf.keep()
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

    def _make_rooms(self, writer: int) -> list[Room]:
        readers = self._view.taking(writer, self._links.me)
        how = self._sheet.packing
        found = [Room(self._ring.rooms(writer, s, readers), how) for s in range(self._ring.slots)]
        self._rooms[writer] = found
        return found

    def arrived(self, frame: Frame) -> None:
        """Count what another worker told, and wake who waited for it."""
        stile, end = self.turnstile, frame.end
        match frame.kind:
            case frames.DATA:
                slots = self._rooms[end]
                slots[frame.number % len(slots)].settle(frame.length)
                stile.counts.puts[end] = frame.number  # news may have been left out
                self._ring.end_landing(end, frame.number, frame.stamp)
            case frames.TAKEN:
                stile.counts.takes[end] = (frame.number + 1) * self._together
                for bell in stile.writers[0 if self._is_some else end] if stile.writers else ():
                    bell.ring()
            case frames.COUNT:
                # Where the message comes too, it is counted with that.
                if not self._view.taking(end, self._links.me):
                    stile.counts.puts[end] = frame.number
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
                    for way in self._ways[end]:
                        way.count = word
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
        for way in (way for ways in self._ways.values() for way in ways):
            if self._is_news and way.worker == other:
                way.send_newest()

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
                yield (DATA, view.number, writer), parcel_of(rooms, self._sheet.packing).bounds
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
