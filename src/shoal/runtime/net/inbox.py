"""What comes on a connection, read without waiting into memory that is there before."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.runtime.net.framing import (
    BYE,
    HEAD,
    Begun,
    Frame,
    Reading,
    Refused,
    Terms,
    on_body,
    on_head,
)
from shoal.runtime.net.handshake import ProtocolError
from shoal.runtime.net.reconnect import Opening, Table, skipped
from shoal.runtime.net.sockets import MOST_VIEWS, after

AHEAD = 16 * HEAD.size  # bytes that may be read before it is known where they belong
LARGE, PIECE = 256 << 10, 1 << 20  # of an array this large, so much is waited for at once


class FrameHandler(Protocol):
    """Who hears what comes on a connection."""

    def room(self, frame: Frame) -> Sequence[Any]:
        """Buffers for a frame's body."""
        ...

    def arrived(self, frame: Frame) -> None:
        """A frame has come whole."""
        ...

    def gone(self, other: int) -> None:
        """A worker that can be done without is gone."""
        ...

    def again(self, other: int, let_in: Callable[[bytes], None]) -> Table:
        """Tell another that takes its place where it had been; what is due from it."""
        ...


class Inbox:
    """Reads frames; bodies go straight where they belong, together with the head that follows."""

    def __init__(self, terms: Terms, ears: FrameHandler, due: Table | None = None) -> None:
        self._state, self._ears = Reading.start(terms, due), ears
        self._ahead = memoryview(bytearray(AHEAD))
        self._first = self._last = 0  # what is read ahead and not looked at yet
        self._views: Sequence[Any] = ()  # where the rest of a body is to go
        self._skips: Opening | None = None  # a table that comes before all else
        self._wide = AHEAD  # how much is read ahead: many heads at once where they have no bodies
        self.ended = False

    def read(self, sock: socket.socket) -> int:
        """Take what is there, without waiting for more; how many frames have come whole with it.

        Of a large array that has begun to come, the next piece is waited for, for a moment at most.
        Raises EOFError where nothing will come any more, BlockingIOError where nothing is there.
        """
        if self._views and len(self._views[0]) >= LARGE:
            count = sock.recv_into(self._views[0][:PIECE], 0, socket.MSG_WAITALL)
        else:
            views = [*self._views, self._ahead[self._last : self._last + self._wide]]
            if len(views) > MOST_VIEWS:
                views = views[:MOST_VIEWS]
            count = sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
        if count == 0:
            raise EOFError
        some = min(count, self._state.left)
        self._last += count - some
        return (self._filled(some) if some else 0) + self._heads()

    def _filled(self, count: int) -> int:
        """So many bytes of a body have come to lie where they belong."""
        frame = self._state.frame
        assert frame is not None
        self._views = after(self._views, count) if count < self._state.left else ()
        self._state, events = on_body(self._state, count)
        if events:
            self._ears.arrived(frame)
        return len(events)

    def _heads(self) -> int:
        """Look at what was read ahead; whatever of it belongs to a body is moved there."""
        found, ahead = 0, self._ahead
        self._open_table()
        while self._takes_head and self._last - self._first >= HEAD.size:
            first = self._first
            self._first += HEAD.size
            self._state, events = on_head(self._state, bytes(ahead[first : self._first]))
            event = events[0]
            if isinstance(event, Refused):
                raise ProtocolError(event.why)
            assert isinstance(event, Begun)
            found += self._begun(event.frame)
        left = self._last - self._first
        if self._first:
            ahead[:left] = bytes(ahead[self._first : self._last])
            self._first, self._last = 0, left
        return found

    @property
    def _takes_head(self) -> bool:
        return self._skips is None and self._state.frame is None

    def _open_table(self) -> None:
        """Read what has come of the table that a new connection begins with."""
        while self._skips is not None and self._last - self._first >= self._skips.wants:
            first = self._first
            self._first += self._skips.wants
            self._skips = self._skips.on(bytes(self._ahead[first : self._first]))
            if not self._skips.wants:
                self._state = skipped(self._state, dict(self._skips.found))
                self._skips = None

    def _begun(self, frame: Frame) -> int:
        """A head has come: its body, if it has one, comes next."""
        self._wide = HEAD.size if frame.length else AHEAD - HEAD.size
        if not frame.length:
            self.ended = self.ended or frame.kind == BYE
            if frame.kind != BYE:
                self._ears.arrived(frame)
            return 1
        self._views = self._ears.room(frame)
        some = min(frame.length, self._last - self._first)
        if not some:
            return 0
        _spread(self._ahead[self._first : self._first + some], self._views)
        self._first += some
        return self._filled(some)

    @property
    def due(self) -> Table:
        """How many of each kind of frame have come whole."""
        return self._state.due

    @property
    def most(self) -> int:
        """How many kinds of frame there are."""
        return len(self._state.terms.known)

    def resume(self) -> None:
        """Go on with a new connection; which numbers come next of some kinds, is told on it."""
        self._state, self._skips = self._state.anew(), Opening(self.most)
        self._first = self._last = 0
        self._views, self._wide = (), AHEAD


def _spread(data: memoryview, views: Sequence[Any]) -> None:
    """Copy bytes into buffers, one after another."""
    for view in views:
        room = memoryview(view)
        some, data = data[: len(room)], data[len(room) :]
        room[: len(some)] = some
        if not data:
            return
