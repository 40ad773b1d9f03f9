"""A connection to a worker on another host, which is re-established if it breaks.

Frames have sequence numbers, and are kept until the other side acknowledges them. Unacknowledged
frames are sent again after a reconnect, so that each arrives exactly once and in order.
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

AHEAD = 16 * HEAD.size  # bytes that may be read before their buffer is known
LARGE, PIECE = 256 << 10, 1 << 20  # an array this large is read in blocking pieces of this size
NOTHING = Outgoing()


class FrameHandler(Protocol):
    """Handles the frames that arrive on a connection."""

    def buffers(self, frame: Frame) -> Sequence[Any]:
        """The buffers for a frame's body."""
        ...

    def arrived(self, frame: Frame) -> None:
        """Handle a frame that is complete."""
        ...

    def gone(self, other: int) -> None:
        """Handle the loss of a worker that the others can run without."""
        ...

    def replaced(self, other: int, let_in: Callable[[bytes], None]) -> Incoming:
        """Accept the replacement of a worker; returns the frames that are valid from it.

        `let_in` sends it the counts of the worker that it replaces.
        """
        ...


class Inbox:
    """Reads frames: bodies go directly to their buffers, together with the header that follows."""

    def __init__(self, incoming: Incoming, handler: FrameHandler) -> None:
        self.incoming, self._handler = incoming, handler
        self.signing: Signing | None = None
        self._ahead, self._tag = memoryview(bytearray(AHEAD)), memoryview(bytearray(TAG))
        self.restart()
        self.ended = False

    def restart(self) -> None:
        """Reset for a new connection: an incomplete frame is sent again."""
        self._first = self._last = 0  # the range that is read ahead and not parsed yet
        self._frame: tuple[Frame, int, bytes] | None = None  # the frame whose body is being read
        self._body: Sequence[Any] = ()
        self._views: Sequence[Any] = ()  # the buffers of the rest of it
        self._left = 0
        self._wide = AHEAD  # bytes to read ahead: many headers at once if they have no bodies

    def read(self, sock: socket.socket) -> None:
        """Read the available bytes, without waiting for more.

        Within a large array it waits for the next piece, for the socket's timeout at most. Raises
        EOFError at the end of the stream, BlockingIOError if nothing is available.
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
        """Count `count` bytes of a body that were read to their buffers."""
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
        """Parse what was read ahead; bytes of a body are moved to its buffers."""
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
        """Prepare to read the body that follows a header, if there is one."""
        self._frame = frame, sequence, head
        self._body = self._handler.buffers(frame) if frame.length else ()
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
    """A connection to one other worker, across reconnects, until one of the two ends."""

    def __init__(self, name: str, check: Callable[[], None], *, loose: bool = False) -> None:
        self.name, self._check = name, check
        self.loose = loose  # others can run without this worker, and it may be replaced
        self.sock: socket.socket | None = None
        self.inbox: Inbox | None = None
        self.broken, self.tried = "it isn't there yet", ""  # why it broke, and why it isn't back
        self.since, self.grace_s = 0.0, 0.0  # when it broke, and the seconds to reconnect
        self.ended = self.refused = False  # closed by the other side; refused by this one
        self.away = True  # given up, until it is replaced
        self._lock = threading.Lock()
        self._unacknowledged: dict[Hashable, _Unacknowledged] = {}
        self._sequence = self._sent = 0  # of the last frame made, and of the last one sent
        self._direct = False  # whether the calling thread sends a frame itself
        self._rest: list[Any] = []  # the rest of a frame that is being resent
        self._signing: Signing | None = None

    def send(self, frame: Frame, body: Outgoing = NOTHING, *, newest: bool = True) -> None:
        """Send a frame, waiting for buffer space; if disconnected, queue it until the reconnect.

        If only the `newest` frame of a key counts, it replaces earlier ones in the queue.
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

    def _forget(self) -> None:
        """Drop the frames that were acknowledged."""
        acknowledged = self.inbox.incoming.acknowledged if self.inbox is not None else 0
        while self._unacknowledged:
            key = next(iter(self._unacknowledged))
            if self._unacknowledged[key].sequence > acknowledged:
                return
            del self._unacknowledged[key]

    def _packed(self, sending: _Unacknowledged) -> tuple[list[Any], int]:
        """A frame's buffers, and their total size in bytes."""
        received = self.inbox.incoming.received if self.inbox is not None else 0
        head, body = sending.frame.pack(sending.sequence, received), sending.body.views
        if self._signing is None:
            return [head, *body], HEAD.size + sending.frame.length
        tag = self._signing.tag(head, body)
        return [head, *body, tag], HEAD.size + sending.frame.length + TAG

    def send_again(self) -> bool:
        """Resend unacknowledged frames without blocking; returns whether the socket is full."""
        with self._lock:
            while self.sock is not None and not self._direct:
                if not self._rest:
                    every = self._unacknowledged.values()
                    following = next((x for x in every if x.sequence > self._sent), None)
                    if following is None:
                        self._direct = True
                        break
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
        """Mark the connection as broken, and shut it down so that its reader notices."""
        self.broken, self.since, self._direct = why, time.monotonic(), False
        self._cut()

    def _cut(self) -> None:
        if (sock := self.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def fall(self, why: str, grace_s: float) -> None:
        """Close the connection as broken; it may be re-established within `grace_s`."""
        self._cut()  # a blocked sender gets an error
        with self._lock:
            if self.broken:
                why = self.broken
            else:
                self.since = time.monotonic()
            if self.sock is not None:
                self.sock.close()
            self.sock, self.broken, self.grace_s, self._direct = None, why, grace_s, False

    def stand(self, sock: socket.socket, signing: Signing | None, *, direct: bool = True) -> None:
        """Use a new socket from now on."""
        self._rest, self._signing = [], signing
        if self.inbox is not None:
            self.inbox.restart()
            self.inbox.signing = signing
        self.sock, self.broken, self.tried = tuned(sock), "", ""
        self._direct = direct

    def open(self, inbox: Inbox) -> None:
        """Read frames with this inbox."""
        inbox.signing = self._signing
        self.inbox = inbox

    def renew(self, sock: socket.socket, signing: Signing | None) -> None:
        """Use a new socket for a worker that replaces the old one: all state is reset."""
        with self._lock:
            if self.sock is not None:
                self.sock.close()
            self._unacknowledged.clear()
            self._sequence = self._sent = 0
            self.inbox = None
            self.ended = self.refused = self.away = False
            self.stand(sock, signing)

    def check_received(self, received: int) -> None:
        """Raise unless the other side can have received that frame."""
        acknowledged = self.inbox.incoming.acknowledged if self.inbox is not None else 0
        if not acknowledged <= received <= self._sequence:
            raise ProtocolError(f"it claims to have frame {received}, which is impossible")

    def resume(self, sock: socket.socket, signing: Signing | None, received: int) -> None:
        """Use a new socket after a reconnect; the other side has all frames up to `received`."""
        with self._lock:
            self._sent = received
            self.stand(sock, signing, direct=False)

    @property
    def is_direct(self) -> bool:
        """Whether no frame is left to be resent."""
        return self._direct

    @property
    def received(self) -> int:
        """The sequence number of the last frame that arrived."""
        return self.inbox.incoming.received if self.inbox is not None else 0

    @property
    def is_broken(self) -> bool:
        """Whether the connection is down while both workers run."""
        return bool(self.broken) and not self.ended

    @property
    def left(self) -> float:
        """Seconds left to re-establish a broken connection."""
        return self.since + self.grace_s - time.monotonic()

    @property
    def is_wanted(self) -> bool:
        """Whether frames are left to be sent, now or after a reconnect."""
        needed = self.is_broken and not (self.refused or self.loose)
        behind = bool(self.sock) and not self._direct and not self.ended
        return (needed and bool(self._unacknowledged) and self.left > 0) or behind

    def check(self) -> None:
        """Raise if the connection was not re-established in time."""
        if self.is_broken and not self.loose and self.sock is None and self.left <= 0:
            raise LostError(
                f"the connection to worker {self.name} is lost: {self.broken}, and it was not made "
                f"again within {self.grace_s:g} s{f' ({self.tried})' if self.tried else ''}",
                "The worker's own output, marked with its name, may say why; or its host is down.",
            )

    def close(self) -> None:
        """Send BYE and shut down the connection, unless the other side has closed it."""
        with suppress(OSError), self._lock:
            if self.sock is None:
                return
            if self._direct and not (self.broken or self.ended):
                bye = _Unacknowledged(self._sequence + 1, Frame(BYE, 0, 0, 0), NOTHING)
                self.sock.settimeout(0.5)
                self.sock.sendall(b"".join(self._packed(bye)[0]))
            self.sock.shutdown(socket.SHUT_WR)

    def is_done(self) -> bool:
        """Whether everything that was sent has been delivered."""
        sock = self.sock
        if self.broken or self.ended or sock is None:
            return True
        try:
            return is_delivered(sock)
        except (OSError, ValueError):  # it broke or was closed meanwhile
            return True
