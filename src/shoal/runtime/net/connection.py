"""One connection to a worker of another host, which is made again if it breaks.

Frames have sequence numbers, and what was sent is kept until the other side acknowledges it;
what it lacks is sent again on the next connection, so that everything comes once and in order.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from shoal.errors import LostError
from shoal.runtime.net.codec import Outgoing
from shoal.runtime.net.sockets import (
    MOST_VIEWS,
    after,
    is_delivered,
    send_all,
    send_some,
    tuned,
    why_of,
)
from shoal.runtime.net.wire import BYE, HEAD, TAG, Frame, Incoming, ProtocolError, Signing

AHEAD = 16 * HEAD.size  # bytes that may be read before it is known where they belong
LARGE, PIECE = 256 << 10, 1 << 20  # of an array this large, this much is waited for at once
NOTHING = Outgoing()


class FrameHandler(Protocol):
    """Takes the frames that come on a connection."""

    def room(self, frame: Frame) -> Sequence[Any]:
        """Buffers for a frame's body."""
        ...

    def arrived(self, frame: Frame) -> None:
        """A frame has come whole."""
        ...

    def gone(self, other: int) -> None:
        """A worker that others can go on without is gone."""
        ...

    def replaced(self, other: int, let_in: Callable[[bytes], None]) -> Incoming:
        """Say where the worker was whose place another takes; what may come from the new one."""
        ...


class Inbox:
    """Reads frames; bodies go straight where they belong, together with the head that follows."""

    def __init__(self, incoming: Incoming, handler: FrameHandler) -> None:
        self.incoming, self._handler = incoming, handler
        self.signing: Signing | None = None
        self._ahead, self._tag = memoryview(bytearray(AHEAD)), memoryview(bytearray(TAG))
        self.restart()
        self.ended = False

    def restart(self) -> None:
        """Read from a new connection: what has come half comes again."""
        self._first = self._last = 0  # what is read ahead and not looked at yet
        self._frame: tuple[Frame, int, bytes] | None = None  # whose body is to come
        self._body: Sequence[Any] = ()
        self._views: Sequence[Any] = ()  # where the rest of it goes
        self._left = 0
        self._wide = AHEAD  # how much is read ahead: many heads at once where they have no bodies

    def read(self, sock: socket.socket) -> None:
        """Take what is there, without waiting for more.

        Of a large array that has begun to come the next piece is waited for, for a moment at most.
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
        some = min(count, self._left)
        self._last += count - some
        if some:
            self._filled(some)
        self._heads()

    def _filled(self, count: int) -> None:
        """`count` bytes of a body have come where they belong."""
        self._left -= count
        self._views = after(self._views, count) if self._left else ()
        if not self._left:
            self._whole()

    def _whole(self) -> None:
        assert self._frame is not None
        frame, sequence, head = self._frame
        if self.signing is not None:
            self.signing.check(head, self._body, bytes(self._tag))
        self._frame, self._body = None, ()
        self.ended = self.ended or frame.kind == BYE
        self.incoming.complete(frame, sequence)
        if frame.kind != BYE:
            self._handler.arrived(frame)

    def _heads(self) -> None:
        """Look at what was read ahead; what belongs to a body is moved there."""
        ahead = self._ahead
        while self._frame is None and self._last - self._first >= HEAD.size:
            head = bytes(ahead[self._first : self._first + HEAD.size])
            self._first += HEAD.size
            frame, sequence = self.incoming.begin(head)
            self._begin(frame, sequence, head)
        left = self._last - self._first
        if self._first:
            ahead[:left] = bytes(ahead[self._first : self._last])
            self._first, self._last = 0, left

    def _begin(self, frame: Frame, sequence: int, head: bytes) -> None:
        """A head has come: its body, if it has one, comes next."""
        self._frame = frame, sequence, head
        self._body = self._handler.room(frame) if frame.length else ()
        self._views, self._left = self._body, frame.length
        if self.signing is not None:
            self._views, self._left = [*self._body, self._tag], frame.length + TAG
        self._wide = HEAD.size if frame.length else AHEAD - HEAD.size
        if not self._left:
            self._whole()
        elif some := min(self._left, self._last - self._first):
            _spread(self._ahead[self._first : self._first + some], self._views)
            self._first += some
            self._filled(some)


def _spread(data: memoryview, views: Sequence[Any]) -> None:
    """Copy bytes into buffers, one after another."""
    for view in views:
        into = memoryview(view)
        some, data = data[: len(into)], data[len(into) :]
        into[: len(some)] = some
        if not data:
            return


class _Unacknowledged(NamedTuple):
    sequence: int
    frame: Frame
    body: Outgoing


class Connection:
    """A connection to one other worker, from when it first stands until one of them ends."""

    def __init__(
        self,
        name: str,
        check: Callable[[], None],
        wake: Callable[[], None] = lambda: None,
        *,
        loose: bool = False,
    ) -> None:
        self.name, self._check, self._wake = name, check, wake
        self.loose = loose  # others go on without it, and another may take its place
        self.sock: socket.socket | None = None
        self.inbox: Inbox | None = None
        self.broken, self.tried = "it isn't there yet", ""  # why it is broken, and not made again
        self.since, self.patience = 0.0, 0.0  # when it broke, and for how many seconds it may
        self.ended = self.refused = False  # by the other side, or by this one
        self.away = True  # given up, until another takes its place
        self._lock = threading.Lock()
        self._unacknowledged: dict[Hashable, _Unacknowledged] = {}
        self._sequence = self._sent = 0  # of the last frame, and of the last one that was sent
        self._direct = False  # whether a frame is sent by the thread that makes it
        self._rest: list[Any] = []  # what is left of a frame that is sent again
        self._signing: Signing | None = None

    def send(self, frame: Frame, body: Outgoing = NOTHING, *, newest: bool = True) -> None:
        """Send a frame, waiting for room on the way; without a connection, once there is one.

        Where only the `newest` of a key counts, it takes the place of those before.
        """
        with self._lock:
            self._forget()
            key = frame[:3] if newest else frame[:4]
            self._unacknowledged.pop(key, None)
            self._sequence += 1
            sending = _Unacknowledged(self._sequence, frame, body)
            self._unacknowledged[key] = sending
            if self._direct and self.sock is not None:
                try:
                    views, left = self._packed(sending)
                    send_all(self.sock, views, left, self._check)
                    self._sent = self._sequence
                except OSError as error:
                    self._fail(why_of(error))
        if self.broken:
            self.check()

    def kept(self) -> None:
        """A message that was sent has been kept, and may be sent again now."""
        if not self._direct:
            self._wake()

    def _forget(self) -> None:
        """Keep no longer what has come."""
        acknowledged = self.inbox.incoming.acknowledged if self.inbox is not None else 0
        while self._unacknowledged:
            key = next(iter(self._unacknowledged))
            if self._unacknowledged[key].sequence > acknowledged:
                return
            del self._unacknowledged[key]

    def _packed(self, sending: _Unacknowledged) -> tuple[list[Any], int]:
        """A frame's bytes, and how many they are."""
        received = self.inbox.incoming.received if self.inbox is not None else 0
        head, body = sending.frame.pack(sending.sequence, received), sending.body.views
        if self._signing is None:
            return [head, *body], HEAD.size + sending.frame.length
        tag = self._signing.tag(head, body)
        return [head, *body, tag], HEAD.size + sending.frame.length + TAG

    def send_again(self) -> bool:
        """Send what the other side lacks, without waiting; whether there is no room for more."""
        with self._lock:
            while self.sock is not None and not self._direct:
                if not self._rest:
                    every = self._unacknowledged.values()
                    following = next((x for x in every if x.sequence > self._sent), None)
                    if following is None:
                        self._direct = True
                        break
                    if not following.body.kept:
                        return False  # its maker is about to, and calls `kept`
                    self._rest, _ = self._packed(following)
                    self._sent = following.sequence
                try:
                    left = sum(map(len, self._rest))
                    done = send_some(self.sock, self._rest, left, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return True
                except OSError as error:
                    self._fail(why_of(error))
                    return False
                self._rest = after(self._rest, done)
        return False

    def _fail(self, why: str) -> None:
        """Let the reader notice that the connection is gone."""
        self.broken, self.since, self._direct = why, time.monotonic(), False
        self._cut()

    def _cut(self) -> None:
        if (sock := self.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def fall(self, why: str, patience: float) -> None:
        """Note that the connection is gone, and close it."""
        self._cut()  # a sender that waits gets an error
        with self._lock:
            if self.broken:
                why = self.broken
            else:
                self.since = time.monotonic()
            if self.sock is not None:
                self.sock.close()
            self.sock, self.broken, self.patience, self._direct = None, why, patience, False

    def stand(self, sock: socket.socket, signing: Signing | None, *, direct: bool = True) -> None:
        """Go on over a new connection."""
        self._rest, self._signing = [], signing
        if self.inbox is not None:
            self.inbox.restart()
            self.inbox.signing = signing
        self.sock, self.broken, self.tried = tuned(sock), "", ""
        self._direct = direct

    def open(self, inbox: Inbox) -> None:
        """Let frames be read by this inbox."""
        inbox.signing = self._signing
        self.inbox = inbox

    def renew(self, sock: socket.socket, signing: Signing | None) -> None:
        """Another worker takes the place of the one that was there: nothing of its counts."""
        with self._lock:
            if self.sock is not None:
                self.sock.close()
            self._unacknowledged.clear()
            self._sequence = self._sent = 0
            self.inbox = None
            self.ended = self.refused = self.away = False
            self.stand(sock, signing)

    def check_received(self, received: int) -> None:
        """Raise unless the other side can have got that far."""
        acknowledged = self.inbox.incoming.acknowledged if self.inbox is not None else 0
        if not acknowledged <= received <= self._sequence:
            raise ProtocolError(f"it has frame {received}, which can't be")

    def resume(self, sock: socket.socket, signing: Signing | None, received: int) -> None:
        """Go on over a new connection where the other side has all frames up to `received`."""
        with self._lock:
            self._sent = received
            self.stand(sock, signing, direct=False)

    @property
    def is_direct(self) -> bool:
        """Whether nothing is left to be sent again."""
        return self._direct

    @property
    def received(self) -> int:
        """The last frame that came."""
        return self.inbox.incoming.received if self.inbox is not None else 0

    @property
    def is_broken(self) -> bool:
        """Whether there is no connection, though both workers go on."""
        return bool(self.broken) and not self.ended

    @property
    def left(self) -> float:
        """Seconds in which a broken connection has yet to be made again."""
        return self.since + self.patience - time.monotonic()

    @property
    def is_wanted(self) -> bool:
        """Whether frames are left that can't be sent unless it is made again."""
        needed = self.is_broken and not (self.refused or self.loose)
        behind = bool(self.sock) and not self._direct and not self.ended
        return (needed and bool(self._unacknowledged) and self.left > 0) or behind

    def check(self) -> None:
        """Raise if the connection has been gone for so long that it counts as lost."""
        if self.is_broken and not self.loose and self.sock is None and self.left <= 0:
            raise LostError(
                f"the connection to worker {self.name} is lost: {self.broken}, and it was not made "
                f"again within {self.patience:g} s{f' ({self.tried})' if self.tried else ''}",
                "Its own output, marked with its name, may say why; or its host is gone.",
            )

    def close(self) -> None:
        """Say that this worker has ended, unless the other has."""
        with suppress(OSError), self._lock:
            if self.sock is None:
                return
            if self._direct and not (self.broken or self.ended):
                bye = _Unacknowledged(self._sequence + 1, Frame(BYE, 0, 0, 0), NOTHING)
                self.sock.settimeout(0.5)
                self.sock.sendall(b"".join(self._packed(bye)[0]))
            self.sock.shutdown(socket.SHUT_WR)

    def is_done(self) -> bool:
        """Whether nothing of what was sent is still on its way."""
        sock = self.sock
        if self.broken or self.ended or sock is None:
            return True
        try:
            return is_delivered(sock)
        except (OSError, ValueError):  # it broke, or was closed meanwhile
            return True
