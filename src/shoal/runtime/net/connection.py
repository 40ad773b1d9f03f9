"""One connection to a worker of another host, which is made again if it breaks.

Who sends keeps what was sent until it is known to be there, so that whatever was on its way when
a connection broke is sent again on the next: everything comes once, in order.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from shoal.errors import LostError
from shoal.runtime.net.framing import BYE, DATA, HEAD, Frame, Key
from shoal.runtime.net.inbox import Inbox
from shoal.runtime.net.reconnect import Kept, Newest, check_due, missing, opened, packed
from shoal.runtime.net.sockets import is_delivered, send_all, tuned, why_of, within

GREETING = 5.0  # seconds that who connects has to prove who it is, and to say what it has got
GRACE = 5.0  # seconds that somebody else has to say why a worker is gone


class Body(Kept, Protocol):
    """Messages of one end that may be sent again; news may not change meanwhile."""

    @property
    def lock(self) -> threading.Lock:
        """Held while a message moves."""
        ...


class Connection:
    """A connection to one other worker, from when it first stands until one of them ends."""

    def __init__(
        self,
        name: str,
        sock: socket.socket | None,
        check: Callable[[], None],
        *,
        loose: bool = False,
    ) -> None:
        self.name, self._check = name, check
        self.loose = loose  # it can be done without, and another may take its place
        self.sock: socket.socket | None = sock and tuned(sock)
        self.inbox: Inbox | None = None
        self.broken = "" if sock else "it isn't there yet"  # why there is no connection
        self.tried = ""  # why there is no other yet
        self.since = 0.0  # when it broke
        self.patience = 0.0  # seconds that it may stay so
        self.ended = self.refused = False  # by the other, or by this worker
        self.away = sock is None  # given up, until another takes its place
        self._lock = threading.Lock()
        self._mending = threading.Lock()
        self._word = threading.Lock()
        self._mends = False  # whether somebody makes it again
        self._coming: socket.socket | None = None  # the newest on which the other came back
        self._sent: dict[Key, Newest] = {}
        self._bodies: dict[Key, Body] = {}

    def keep(self, key: Key, body: Body) -> None:
        """Let messages be sent again from where they are kept."""
        self._bodies[key] = body

    def send(self, frame: Frame, body: Sequence[Any] = ()) -> None:
        """Send a frame, waiting for room on the way; if there is no connection, once there is."""
        with self._lock:
            if frame.kind != DATA:
                self._sent.setdefault(frame[:3], Newest()).frame = frame
            if self.sock is not None and not self.broken:
                try:
                    send_all(
                        self.sock, [frame.packed(), *body], HEAD.size + frame.length, self._check
                    )
                except OSError as error:
                    self._fail(why_of(error))
        if self.broken:
            self.check()

    def _fail(self, why: str) -> None:
        """Let who reads notice that the connection is gone."""
        self.broken, self.since = why, time.monotonic()
        self._cut()

    def _cut(self) -> None:
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def fall(self, why: str, patience: float) -> None:
        """Note that the connection is gone, and give it back."""
        self._cut()  # whoever sends doesn't wait any more
        with self._lock:
            if self.broken:
                why = self.broken
            else:
                self.since = time.monotonic()
            if self.sock is not None:
                self.sock.close()
            self.sock, self.broken, self.patience = None, why, patience

    @property
    def is_broken(self) -> bool:
        """Whether there is no connection, though both workers go on."""
        return bool(self.broken) and not self.ended

    @property
    def left(self) -> float:
        """Seconds that a broken connection has yet to be made again."""
        return self.since + self.patience - time.monotonic()

    @property
    def is_wanted(self) -> bool:
        """Whether it is yet to be made again, to send what the other may lack."""
        has_sent = self._sent or any(body.count for body in self._bodies.values())
        needed = self.is_broken and not (self.refused or self.loose)
        return needed and bool(has_sent) and self.left > 0

    def check(self) -> None:
        """Raise if the connection has been gone for so long that it counts as lost."""
        if self.is_broken and not self.loose and self.sock is None and self.left <= 0:
            raise LostError(
                f"the connection to worker {self.name} is lost: {self.broken}, and it was not made "
                f"again within {self.patience:g} s{f' ({self.tried})' if self.tried else ''}",
                "Its own output, marked with its name, may say why; or its host is gone.",
            )

    def resume(self, sock: socket.socket, ready: Callable[[], None]) -> None:
        """Go on over a new connection; nobody reads the old one. `ready` lets this be read.

        What the other lacks is sent first, then what comes later. Nobody waits for the other while
        it holds what its other connections need: each may be made again at the same time.
        """
        inbox = self.inbox
        assert inbox is not None
        sock.sendall(packed(inbox.due))
        with self._lock:
            most = len(self._kept)
        due = opened(lambda count: within(sock, count, GREETING), most)
        with self._lock:
            check_due(self._kept, due)
            inbox.resume()
            self.sock = tuned(sock)  # to be read; who sends leaves it to what follows
        ready()
        with ExitStack() as held:
            for lock in {id(body.lock): body.lock for body in self._bodies.values()}.values():
                held.enter_context(lock)
            held.enter_context(self._lock)
            if self.sock is not sock:
                raise ConnectionResetError
            self.broken = ""
            again, skips = missing(self._kept, due)
            try:
                for data, *body in ((packed(skips),), *((f.packed(), *body) for f, body in again)):
                    left = len(data) + sum(map(len, body))
                    send_all(sock, [data, *body], left, lambda: None)
            except OSError as error:
                self._fail(why_of(error))

    @property
    def _kept(self) -> dict[Key, Kept]:
        """All that was sent, as far as it may be wanted again."""
        return {**self._sent, **self._bodies}

    def renew(self, sock: socket.socket) -> None:
        """Another has taken the place of the one that was there: what that was told is over."""
        with self._lock:
            if self.sock is not None:
                self.sock.close()
            self._sent.clear()
            self.sock, self.broken = tuned(sock), ""
            self.ended = self.refused = self.away = False

    def begin_mending(self) -> bool:
        """Whether nobody makes it again so far; the caller does from now on."""
        with self._word:
            begins, self._mends = not self._mends, True
            return begins

    def end_mending(self, *, gives_up: bool) -> bool:
        """Whether the caller is done with making it again; not if it has broken meanwhile."""
        with self._word:
            self._mends = self.is_broken and self.left > 0 and not gives_up
            return not self._mends

    def come_back(self, sock: socket.socket) -> None:
        """The other comes over a new connection: on those before it, nobody is to wait."""
        with self._word:
            before, self._coming = self._coming, sock
        if before is not None:
            with suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)

    @property
    def mending(self) -> threading.Lock:
        """Held by who makes the connection again."""
        return self._mending

    def close(self) -> None:
        """Say that this worker has ended, unless the other has."""
        with suppress(OSError), self._lock:
            if self.sock is None:
                return
            if not (self.broken or self.ended):
                self.sock.settimeout(0.5)
                self.sock.sendall(Frame(BYE, 0, 0, 0).packed())
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


def broken_ones(links: Iterable[Connection]) -> str:
    """What is to be said of connections that are being made again; nothing if none is."""
    names = [f"{link.name} ({link.broken})" for link in links if link.is_broken and not link.away]
    return f"the connection is being made again to {', '.join(names)}" if names else ""
