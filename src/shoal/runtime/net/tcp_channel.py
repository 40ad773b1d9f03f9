"""Channels between hosts over TCP: messages are received directly into the reader's slots.

Each worker has slots with the layout of shared memory, rows by reader, so that messages of many
writers are contiguous for their reader. Each worker keeps its own counts and sends changes to the
workers concerned: a put count travels with its message, a take count frees a slot.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from shoal.planning.policy import Latest, Queue, takes_some
from shoal.runtime.channels.channel import (
    ChannelState,
    Message,
    Receive,
    Taken,
    Waker,
    take_back,
)
from shoal.runtime.channels.flow_control import Words
from shoal.runtime.channels.shared_memory import Memory
from shoal.runtime.channels.shm import ShmChannel
from shoal.runtime.net.buffers import Landing, SendBuffer, size_of
from shoal.runtime.net.connections import Connections, Membership
from shoal.runtime.net.wire import (
    ASK,
    COUNT,
    DATA,
    GRANT,
    TAKEN,
    Frame,
    Incoming,
    Key,
    ProtocolError,
)
from shoal.runtime.net.wiring import RemoteChannels, View


class Outbound:
    """The outbound messages of one endpoint to one other worker."""

    def __init__(self, worker: int, key: Key, channel: TcpChannel, buffer: SendBuffer) -> None:
        self.worker, self._key, self._channel, self._buffer = worker, key, channel, buffer
        self.sent = 0  # bytes

    def send(self, message: Message, number: int, version: int) -> None:
        """Send a message."""
        self._buffer.put(message, number, version)
        self._send()
        self.sent += self._buffer.length

    def _send(self) -> None:
        found = self._buffer
        frame = Frame(*self._key, found.number, found.version, found.length)
        self._channel.links.links[self.worker].send(frame, found.views)

    def send_newest(self) -> None:
        """Send the newest message again, if any, to a replacement worker."""
        if self._buffer.number >= 0:
            self._send()


class TcpChannel:
    """One worker's side of a channel whose endpoints are in different workers."""

    def __init__(self, local: ShmChannel, view: View, links: Connections) -> None:
        self._local, self.view, self.links = local, view, links
        self.state: ChannelState = local.state
        self._spec, self._gate, me = view.spec, view.spec.gate, links.me
        self.is_latest = isinstance(self._gate.flow, Latest)
        self._is_some = takes_some(self._gate.flow)
        # A long queue acknowledges takes in batches: it has free slots meanwhile.
        is_long = isinstance(self._gate.flow, Queue) and not self._is_some
        self._together = max(1, self._gate.capacity // 2) if is_long else 1
        mine = [w for w, worker in enumerate(view.writers) if worker == me]
        self.lock = (
            threading.Lock()
        )  # held while a message is sent or taken, and while a worker joins late
        self._buffers: dict[Any, SendBuffer] = {}
        self._outbound = {w: list(self._outbound_of(w)) for w in mine}
        self._is_near = {w: bool(view.taking(w, me)) for w in mine}
        self._landings: dict[int, list[Landing]] = {}
        self._admission = self._make_admission(mine)

    def _outbound_of(self, writer: int) -> Iterator[Outbound]:
        for other in sorted({self.view.readers[r] for r in self._gate.readers.get(writer, ())}):
            if other != self.links.me:
                key = DATA, self.view.number, writer
                yield Outbound(other, key, self, self._buffer(writer, other))

    def _buffer(self, writer: int, other: int) -> SendBuffer:
        """The send buffer of an endpoint; shared by workers that receive the same rows."""
        parts = self._local.targets(writer, 0, self.view.taking(writer, other))
        same = writer, repr([(into.shape, name, rows) for into, name, _, rows in parts])
        if same not in self._buffers:
            self._buffers[same] = SendBuffer(parts, keeps=self.is_latest)
        return self._buffers[same]

    def _make_admission(self, mine: Sequence[int]) -> Asking | Granting | None:
        if not (self.is_latest and self._gate.admits):
            return None
        if mine:
            return Granting(self)
        asking = Asking(self)
        self.state.admit = asking.may_begin
        return asking

    def send(self, worker: int, frame: Frame) -> None:
        """Send a frame without a body to another worker."""
        self.links.links[worker].send(frame)

    def put(self, end: int, message: Message, version: int) -> None:
        """Send a message to the workers that have a reader of it."""
        with self.lock:
            number = self.state.counts.puts[end]
            for outbound in self._outbound[end]:
                outbound.send(message, number, version)
            if self._is_near[end]:
                self._local.put(end, message, version)
            else:
                self.state.did_put(end)
            if self.is_latest:
                for other in self.view.beside(end) - {self.links.me}:
                    self.send(other, Frame(COUNT, self.view.number, end, number))
                if isinstance(self._admission, Granting):
                    self._admission.grant()

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """Take the next message, read in place; then free its slot."""
        seen: list[tuple[int, int]] = []

        def look(message: Message, turns: list[tuple[int, int]]) -> Message:
            seen[:] = turns
            return receive(message, turns)

        if self.is_latest:
            return self._local.take(end, tick, receive)
        with self.lock:
            taken = self._local.take(end, tick, look)
            self._send_taken(end, seen)
        return taken

    def _send_taken(self, end: int, turns: list[tuple[int, int]]) -> None:
        number, writers, me = self.view.number, self.view.writers, self.links.me
        if self._is_some:
            for w, n in turns:
                if writers[w] != me:
                    self.send(writers[w], Frame(TAKEN, number, w, n))
            return
        latest = turns[0][1]
        if (latest + 1) % self._together == 0:
            for other in {writers[w] for w, _ in turns} - {me}:
                self.send(other, Frame(TAKEN, number, end, latest // self._together))

    @property
    def sent(self) -> int:
        """The bytes that this worker has sent on the channel."""
        return sum(out.sent for every in self._outbound.values() for out in every)

    # Incoming frames.

    def buffers(self, frame: Frame) -> list[Any]:
        """The buffers for a message's body."""
        slots = self._landings.get(frame.end) or self._make_landings(frame.end)
        if self.is_latest:
            self._local.begin_landing(frame.end, frame.number)
        return slots[frame.number % len(slots)].views

    def _make_landings(self, writer: int) -> list[Landing]:
        readers, slots = self.view.taking(writer, self.links.me), range(self._local.slots)
        found = [Landing(self._local.targets(writer, slot, readers)) for slot in slots]
        self._landings[writer] = found
        return found

    def arrived(self, frame: Frame) -> None:
        """Apply a frame to the counts, and wake the threads that wait for it."""
        state, end = self.state, frame.end
        if frame.kind == DATA:
            slots = self._landings[end]
            slots[frame.number % len(slots)].settle()
            state.counts.puts[end] = frame.number  # of `Latest`, some may have been skipped
            self._local.end_landing(end, frame.number, frame.stamp)
        elif frame.kind == TAKEN:
            taken = (frame.number + 1) * self._together
            sources = (end,) if self._is_some else self._gate.sources[end]
            # A message may be taken before its sender has counted it.
            if taken > max(state.counts.puts[w] for w in sources) + 1:
                raise ProtocolError(f"that {taken} messages were taken, more than were sent")
            state.counts.takes[end] = taken
            for waker in state.writers[0 if self._is_some else end] if state.writers else ():
                waker.notify()
        elif frame.kind == COUNT:
            # If the message itself arrives here, it is counted with that.
            if not self.view.taking(end, self.links.me):
                state.counts.puts[end] = frame.number
                state.did_put(end)
        else:
            assert self._admission is not None
            self._admission.arrived(frame)

    # Replacement workers, which join late.

    def handover(self, other: int) -> list[int]:
        """The counts of this channel for a worker that replaces another."""
        return [counts[end] for counts, end in self._handed_over(self.links.me, other)]

    def adopt(self, other: int, words: Iterator[int]) -> None:
        """Continue from the counts of the worker that this one replaces."""
        for counts, end in self._handed_over(other, self.links.me):
            counts[end] = next(words)
            if isinstance(self._admission, Asking):
                self._admission.resume(end, counts[end])

    def _handed_over(self, keeper: int, joiner: int) -> Iterator[tuple[Words, int]]:
        """The counts that `keeper` hands over to `joiner`, each with its endpoint."""
        counts, view = self.state.counts, self.view
        for writer in view.written_by.get(joiner, ()):
            if view.taking(writer, keeper):
                yield counts.puts, writer
                yield counts.takes, writer
        if isinstance(self._admission, Asking | Granting) and view.written_by.get(keeper):
            assert counts.ledger is not None
            yield from ((counts.ledger.begun, end) for end in view.read_by.get(joiner, ()))

    def send_newest(self, other: int) -> None:
        """Send the newest message again, to a worker that joins late."""
        for outbound in (out for every in self._outbound.values() for out in every):
            if self.is_latest and outbound.worker == other:
                outbound.send_newest()

    def due(self, other: int) -> Iterator[tuple[Key, int]]:
        """The next number of each key that another worker may send."""
        counts = self.state.counts
        for (kind, channel, end), _ in self.bodies(other):
            if kind in (ASK, GRANT):
                assert counts.ledger is not None
                yield (kind, channel, end), counts.ledger.begun[end]
            elif kind == DATA:
                yield (kind, channel, end), counts.puts[end]
            elif kind == TAKEN:
                yield (kind, channel, end), counts.takes[end] // self._together

    def forget(self, other: int) -> None:
        """Drop the pending requests of a lost worker."""
        if isinstance(self._admission, Granting):
            self._admission.forget(set(self.view.read_by.get(other, ())))

    def bodies(self, other: int) -> Iterator[tuple[Key, int]]:
        """The keys that another worker may send, with the lengths of their bodies."""
        view, me = self.view, self.links.me
        for writer in view.written_by.get(other, ()):
            if readers := view.taking(writer, me):
                yield (DATA, view.number, writer), size_of(self._local.targets(writer, 0, readers))
            if me in view.beside(writer):
                yield (COUNT, view.number, writer), 0
        for writer in view.written_by.get(me, ()):
            for reader in view.taking(writer, other):
                end = writer if self._is_some else reader
                yield (TAKEN, view.number, end), 0
        if self._admission is not None:
            kind, asks = (ASK, other) if isinstance(self._admission, Granting) else (GRANT, me)
            yield from (((kind, view.number, e), 0) for e in view.read_by.get(asks, ()))


class Asking:
    """Requests turns of asynchronous readers from the writer, which keeps the ledger."""

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        count = len(channel.view.readers)
        self._asked, self._granted, self._least = ([0] * count for _ in range(3))

    def may_begin(self, end: int) -> bool:
        """Whether a turn was granted and its message has arrived; sends a request if needed."""
        channel, state = self._channel, self._channel.state
        ledger = state.counts.ledger
        assert ledger is not None
        begun = ledger.begun[end]
        if self._granted[end] > begun:
            return state.newest(end) >= self._least[end]
        if self._asked[end] == begun:
            self._asked[end] += 1
            source = state.spec.gate.sources[end][0]
            ask = Frame(ASK, channel.view.number, end, begun)
            channel.send(channel.view.writers[source], ask)
        return False

    def resume(self, end: int, begun: int) -> None:
        """Resume after `begun` turns that were granted before."""
        self._asked[end] = self._granted[end] = begun

    def arrived(self, frame: Frame) -> None:
        """Handle a grant: a turn may begin from at least this version."""
        self._least[frame.end] = frame.stamp
        self._granted[frame.end] = frame.number + 1
        state = self._channel.state
        for source in state.spec.gate.sources[frame.end]:
            for waker in state.readers[source] if state.readers else ():
                waker.notify()


class Granting:
    """Grants turns to asynchronous readers in other workers, and keeps their ledger."""

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        self._asks: dict[int, int] = {}
        self._lock = threading.Lock()

    def forget(self, ends: set[int]) -> None:
        """Drop the pending requests of these endpoints."""
        with self._lock:
            for end in ends & self._asks.keys():
                del self._asks[end]

    def arrived(self, frame: Frame) -> None:
        """Handle a request: a reader wants to begin its next turn."""
        with self._lock:
            self._asks[frame.end] = frame.number
        self.grant()

    def grant(self) -> None:
        """Grant all pending requests that flow control allows."""
        channel, state = self._channel, self._channel.state
        with self._lock:
            for end, number in list(self._asks.items()):
                if state.may_take(end, 0):
                    del self._asks[end]
                    frame = Frame(GRANT, channel.view.number, end, number, state.begin(end))
                    channel.send(channel.view.readers[end], frame)


class _Handler:
    """Dispatches frames to their channels, and handles lost and replaced workers."""

    def __init__(self, channels: Sequence[TcpChannel], remote: RemoteChannels) -> None:
        self._channels, self._remote = channels, remote

    def buffers(self, frame: Frame) -> list[Any]:
        """The buffers for a frame's body."""
        return self._channels[frame.channel].buffers(frame)

    def arrived(self, frame: Frame) -> None:
        """Dispatch a frame that is complete."""
        self._channels[frame.channel].arrived(frame)

    def gone(self, other: int) -> None:
        """Roll back the turns in flight of a lost worker's restart group."""
        for channel in self._channels:
            channel.forget(other)
        group, ends = self._remote.group(other), defaultdict[int, set[str]](set)
        for fragment, at in self._remote.ends.items():
            for end, worker in enumerate(at):
                if worker in group:
                    ends[end].add(fragment)
        states = [channel.state for channel in self._channels]
        for end, found in ends.items():
            take_back(states, found, end)

    def replaced(self, other: int, let_in: Callable[[bytes], None]) -> Incoming:
        """Accept a replacement worker; returns the frames that are valid from it."""
        with ExitStack() as still:
            for channel in self._channels:
                still.enter_context(channel.lock)
            words = [word for channel in self._channels for word in channel.handover(other)]
            let_in(json.dumps(words).encode())
            for channel in self._channels:
                channel.send_newest(other)
            return incoming(self._channels, other)


def incoming(channels: Sequence[TcpChannel], other: int) -> Incoming:
    """The frames that are valid from a worker, from the current counts on."""
    bodies = {key: size for channel in channels for key, size in channel.bodies(other)}
    newest = [key for key in bodies if key[0] == DATA and channels[key[1]].is_latest]
    due = {key: n for channel in channels for key, n in channel.due(other)}
    return Incoming(bodies, newest, due)


def join_channels(
    remote: RemoteChannels,
    me: int,
    listener: socket.socket | None,
    check: Callable[[], None],
    wakers: Mapping[str, Sequence[Waker]],
) -> tuple[Connections, dict[str, TcpChannel]]:
    """Connect worker `me` with the others, and open its channels.

    Others connect to `listener`, whose address is in `remote`. A replacement worker connects to the
    others, and accepts connections only from its restart group. `check` raises if the run stops.
    `wakers` has the waker of every endpoint, by fragment; those in other workers do nothing.
    """
    membership = Membership(remote.groups, remote.incarnation)
    links = Connections(me, remote.names, remote.known, check, membership=membership)
    if listener is not None and not remote.incarnation:
        links.expect(remote.others(me) & remote.absent)
    links.join(listener, remote.others(me) - links.links.keys(), remote.addresses)

    def wake() -> None:
        for one in {id(waker): waker for of in wakers.values() for waker in of}.values():
            one.notify()

    channels = open_channels(remote, links, wake)
    for channel in channels.values():
        gate = channel.state.spec.gate
        channel.state.subscribe(wakers[gate.reader], wakers[gate.writer])
    return links, channels


def open_channels(
    remote: RemoteChannels,
    links: Connections,
    wake: Callable[[], None] = lambda: None,
    memory: Memory | None = None,
) -> dict[str, TcpChannel]:
    """Open this worker's side of the channels between hosts, after it has connected.

    `wake` is called when a connection is lost; `memory` holds the messages.
    """
    local = remote.layouts.open(memory or Memory.own(remote.size))
    every = [
        TcpChannel(one, view, links)
        for one, view in zip(local.values(), remote.views(), strict=True)
    ]
    for other, handover in links.handovers.items():
        words = iter(json.loads(handover))
        for channel in every:
            channel.adopt(other, words)
    links.read(
        {other: incoming(every, other) for other in links.links},
        _Handler(every, remote),
        wake,
    )
    return dict(zip(local, every, strict=True))
