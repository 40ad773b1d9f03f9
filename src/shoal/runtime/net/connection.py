"""A connection to a worker on another host. If it breaks, that worker counts as lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from shoal.errors import LostError
from shoal.runtime.net.sockets import MOST_VIEWS, after, is_delivered, send_all, tuned, why_of
from shoal.runtime.net.wire import BYE, HEAD, TAG, Frame, Incoming, Signing

AHEAD = 16 * HEAD.size  # bytes that may be read before their buffer is known
LARGE, PIECE = 256 << 10, 1 << 20  # an array this large is read in blocking pieces of this size
ERROR_GRACE_S = 5.0  # for the driver to learn why a worker was lost


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

        `let_in` sends it the handover: the counts of the worker that it replaces.
        """
        ...


class Inbox:
    """Reads frames: bodies go directly to their buffers, together with the header that follows."""

    def __init__(
        self, incoming: Incoming, handler: FrameHandler, signing: Signing | None = None
    ) -> None:
        self._incoming, self._handler, self._signing = incoming, handler, signing
        self._ahead, self._tag = memoryview(bytearray(AHEAD)), memoryview(bytearray(TAG))
        self._first = self._last = 0  # the range that is read ahead and not parsed yet
        self._frame: tuple[Frame, bytes] | None = None  # the frame whose body is being read
        self._body: Sequence[Any] = ()
        self._views: Sequence[Any] = ()  # the buffers of the rest of it
        self._left = 0
        self._wide = AHEAD  # bytes to read ahead: many headers at once if they have no bodies
        self.ended = False

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
        frame, head = self._frame
        if self._signing is not None:
            self._signing.check(head, self._body, bytes(self._tag))
        self._frame, self._body = None, ()
        self.ended = self.ended or frame.kind == BYE
        self._incoming.complete(frame)
        if frame.kind != BYE:
            self._handler.arrived(frame)

    def _heads(self) -> None:
        """Parse what was read ahead; bytes of a body are moved to its buffers."""
        ahead = self._ahead
        while self._frame is None and self._last - self._first >= HEAD.size:
            head = bytes(ahead[self._first : self._first + HEAD.size])
            self._first += HEAD.size
            self._begin(self._incoming.begin(head), head)
        left = self._last - self._first
        if self._first:
            ahead[:left] = bytes(ahead[self._first : self._last])
            self._first, self._last = 0, left

    def _begin(self, frame: Frame, head: bytes) -> None:
        """Prepare to read the body that follows a header, if there is one."""
        self._frame = frame, head
        self._body = self._handler.buffers(frame) if frame.length else ()
        self._views, self._left = self._body, frame.length
        if self._signing is not None:
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


class Connection:
    """A connection to one other worker, and to those that replace it."""

    def __init__(self, name: str, check: Callable[[], None], *, loose: bool = False) -> None:
        self.name, self._check = name, check
        self.loose = loose  # others can run without this worker, and it may be replaced
        self.sock: socket.socket | None = None  # none while it is broken
        self.inbox: Inbox | None = None
        self.broken, self._since = "it isn't there yet", 0.0  # why it broke, and when
        self.ended = False  # closed by the other side
        self._lock = threading.Lock()
        self._signing: Signing | None = None

    def open(self, sock: socket.socket, signing: Signing | None) -> None:
        """Use this socket from now on, instead of that to an earlier worker."""
        with self._lock:
            if self.sock is not None:
                self.sock.close()
            self.sock, self._signing, self.inbox = tuned(sock), signing, None
            self.broken, self._since, self.ended = "", 0.0, False

    def receive(self, incoming: Incoming, handler: FrameHandler) -> None:
        """Read frames from now on."""
        self.inbox = Inbox(incoming, handler, self._signing)

    def send(self, frame: Frame, body: Sequence[Any] = ()) -> None:
        """Send a frame, waiting for buffer space; it is dropped if the connection is broken."""
        with self._lock:
            if self.sock is not None:
                try:
                    self._send(frame, body)
                except OSError as error:
                    self._break(why_of(error))
        if self.broken:
            self.check()

    def _send(self, frame: Frame, body: Sequence[Any] = ()) -> None:
        assert self.sock is not None
        head, length = frame.pack(), HEAD.size + frame.length
        views = [head, *body]
        if self._signing is not None:
            views.append(self._signing.tag(head, body))
            length += TAG
        send_all(self.sock, views, length, self._check)

    def _break(self, why: str) -> None:
        """Mark the connection as broken, and shut it down so that its reader notices."""
        self.broken, self._since = self.broken or why, self._since or time.monotonic()
        self._shut_down()

    def _shut_down(self) -> None:
        if (sock := self.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def fall(self, why: str) -> None:
        """Close the connection as broken."""
        self._shut_down()  # a blocked sender gets an error
        with self._lock:
            self._break(why)
            if self.sock is not None:
                self.sock.close()
            self.sock = None

    def check(self) -> None:
        """Raise if the connection broke, a while after it did; the driver may know why."""
        if self.loose or self.ended or not self.broken:
            return
        if time.monotonic() - self._since >= ERROR_GRACE_S:
            raise LostError(
                f"the connection to worker {self.name} is lost: {self.broken}",
                "The worker's own output, marked with its name, may say why; or its host is down.",
            )

    def close(self) -> None:
        """Send BYE and shut down the connection, unless the other side has closed it."""
        with suppress(OSError), self._lock:
            if self.sock is None:
                return
            if not (self.broken or self.ended):
                self.sock.settimeout(0.5)
                self._send(Frame(BYE, 0, 0, 0))
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
