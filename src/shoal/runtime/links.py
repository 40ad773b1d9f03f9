"""Connections between workers of different hosts: how they are made, and what becomes of them.

A thread for each connection reads it, into memory that is there before; who has something to send
sends it itself. There is always room for what may come (channels see to that), so readers never
wait for anybody, and nobody who sends can wait for ever on a worker that lives.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.errors import RunError
from shoal.runtime import greeting
from shoal.runtime.frames import (
    BYE,
    HEAD,
    Begun,
    Frame,
    Key,
    Reading,
    Refused,
    Terms,
    on_body,
    on_head,
)
from shoal.runtime.greeting import Guest, NotAdmitted, Pass
from shoal.runtime.logs import Say, to_stderr
from shoal.runtime.sockets import fill, is_delivered, send_all, some, tuned, why_of, within

Address = tuple[str, int]
GREETING = 5.0  # seconds that who connects has to prove who it is
PENDING = 32  # connections that may be proving it at once; more are turned away
PATIENCE = 120.0  # seconds that workers wait for each other to start
LINGER = 2.0  # seconds that what was sent has to arrive when a worker ends
GRACE = 5.0  # seconds that somebody else has to say why a worker is gone
AHEAD = 16 * HEAD.size  # bytes that may be read before it is known where they belong


class Ears(Protocol):
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

    def again(self, other: int, let_in: Callable[[bytes], None]) -> dict[Key, int]:
        """Tell another that takes its place where it had been; what is due from it."""
        ...


@dataclass
class Link:
    """A connection to one other worker, from when it stands until one of them ends."""

    name: str
    sock: socket.socket
    check: Callable[[], None]
    lost: str = ""  # why it is gone, if it didn't end well
    since: float = 0.0
    ended: bool = False
    loose: bool = False  # it can be done without: what it is sent while it is gone is dropped
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, frame: Frame, body: Iterable[Any] = ()) -> None:
        """Send a frame, waiting for room on the way; dropped if the other has ended."""
        views = [frame.packed(), *body]
        with self._lock:
            if self.ended or (self.loose and self.lost):
                return
            try:
                if not self.lost:
                    send_all(self.sock, views, HEAD.size + frame.length, self.check)
                    return
            except OSError as error:
                self.lose(why_of(error))
        if not self.loose:
            self._bear()

    def _bear(self) -> None:
        """The other is gone: let whoever knows why say so first."""
        while not self.ended:
            self.check()
            check_link(self)
            threading.Event().wait(0.02)

    def cut(self) -> None:
        """Let nobody send or read here any more."""
        self.lose("another takes its place")
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def renew(self, sock: socket.socket) -> None:
        """Another has taken the place of the one that was there."""
        with self._lock:
            self.sock.close()
            self.sock, self.lost, self.ended = sock, "", False

    def lose(self, why: str) -> None:
        """Note that the connection is gone."""
        if not (self.lost or self.ended):
            self.since = time.monotonic()
            self.lost = why

    def read(self, terms: Terms, ears: Ears, due: Mapping[Key, int] | None = None) -> None:
        """Read frames until the other ends; what isn't a frame ends the connection.

        Heads are read ahead, many at once where they have no bodies; bodies go where they belong.
        """
        state, ahead = Reading.start(terms, due), memoryview(bytearray(AHEAD))
        first = last = 0  # what is read ahead and not looked at yet
        while True:
            if last - first < HEAD.size:
                ahead[: last - first] = bytes(ahead[first:last])
                first, last = 0, last - first
                last += some(self.sock, ahead[last:])
                continue
            state, events = on_head(state, bytes(ahead[first : first + HEAD.size]))
            first += HEAD.size
            event = events[0]
            if isinstance(event, Refused):
                raise NotAdmitted(event.why)
            assert isinstance(event, Begun)
            frame = event.frame
            if frame.kind == BYE:
                self.ended = True
                return
            if frame.length:
                first += fill(self.sock, ears.room(frame), ahead[first:last])
                state, _ = on_body(state, frame.length)
            ears.arrived(frame)

    def close(self) -> None:
        """Say that this worker has ended, unless the other has."""
        with suppress(OSError), self._lock:
            if not (self.lost or self.ended):
                self.sock.settimeout(0.5)
                self.sock.sendall(Frame(BYE, 0, 0, 0).packed())
            self.sock.shutdown(socket.SHUT_WR)

    def is_done(self) -> bool:
        """Whether nothing of what was sent is still on its way."""
        if self.lost or self.ended:
            return True
        try:
            return is_delivered(self.sock)
        except OSError:
            return True


def check_link(link: Link) -> None:
    """Raise if a worker has been gone for so long that nobody else will say why."""
    if link.loose:
        return
    if link.lost and not link.ended and time.monotonic() - link.since >= GRACE:
        raise RunError(
            f"the connection to worker {link.name} is lost: {link.lost}",
            "Its own output, marked with its name, may say why; or its host is gone.",
        )


class Links:
    """All connections of this worker."""

    def __init__(
        self,
        me: int,
        names: Sequence[str],
        known: Pass,
        check: Callable[[], None] = lambda: None,
        say: Say = to_stderr,
    ) -> None:
        self.me, self.names, self._known = me, names, known
        self._check, self._say = check, say
        self.links: dict[int, Link] = {}
        self.told_by: dict[int, int] = {}  # where one may join late, words that it is told
        self.told: dict[int, bytes] = {}  # what this worker was told, where it has joined late
        self._readers: dict[int, threading.Thread] = {}
        self._ears: Ears | None = None
        self._terms: Mapping[int, Terms] = {}
        self._wake: Callable[[], None] = lambda: None
        self._news = threading.Condition()
        self._pending = threading.BoundedSemaphore(PENDING)
        self._refused = 0
        self._closed = False
        self._listener: socket.socket | None = None

    def check(self) -> None:
        """Raise if a worker has been gone for too long."""
        for link in list(self.links.values()):
            check_link(link)

    def join(
        self, listener: socket.socket | None, others: Iterable[int], addresses: Sequence[Address]
    ) -> None:
        """Connect with all these workers: to those before this one, from those after it.

        Who has no listener joins late, and connects to all.
        """
        others = frozenset(others)
        self._listener = listener
        after = {other for other in others if other > self.me and listener is not None}
        if listener is not None and (after or self.told_by):
            threading.Thread(target=self._admit, args=(listener, after), daemon=True).start()
        for other in sorted(others - after):
            sock = self._connect(other, addresses[other])
            if sock is not None:
                self._stand(other, sock)
        until = time.monotonic() + PATIENCE
        while missing := others - set(self.links):
            self._check()
            if time.monotonic() > until:
                names = ", ".join(self.names[m] for m in sorted(missing))
                raise RunError(
                    f"no connection from {names} in {PATIENCE:.0f} seconds",
                    "Its own output may say why; its host must reach this one.",
                )
            with self._news:
                self._news.wait(0.05)

    def _stand(self, other: int, sock: socket.socket) -> None:
        with self._news:
            if other in self.links:  # nothing was read from it yet
                self.links[other].renew(tuned(sock))
            else:
                loose = other in self.told_by and self._listener is not None
                self.links[other] = Link(self.names[other], tuned(sock), self._check, loose=loose)
            self._news.notify_all()

    def read(
        self,
        terms: Mapping[int, Terms],
        ears: Ears,
        wake: Callable[[], None],
        due: Mapping[int, Mapping[Key, int]] | None = None,
    ) -> None:
        """Begin to read every connection; `wake` whoever waits when one is gone.

        `due` is what each sends first, where that isn't the first of all.
        """
        with self._news:
            self._ears, self._wake, self._terms = ears, wake, terms
            for other in self.links:
                self._begin(other, (due or {}).get(other, {}))

    def _begin(self, other: int, due: Mapping[Key, int]) -> None:
        self._readers[other] = threading.Thread(target=self._read, args=(other, due), daemon=True)
        self._readers[other].start()

    def _read(self, other: int, due: Mapping[Key, int]) -> None:
        link, ears = self.links[other], self._ears
        assert ears is not None
        try:
            link.read(self._terms[other], ears, due)
        except NotAdmitted as refusal:
            self._note(f"{link.name}: {refusal}")
            link.lose(f"it sent {refusal}")
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
        except (OSError, EOFError) as error:
            link.lose(why_of(error))
        except BaseException as error:
            link.lose(f"{type(error).__name__}: {error}")
            raise
        finally:
            if link.loose and not self._closed:
                ears.gone(other)
            self._wake()

    def close(self) -> None:
        """End all connections, so that the others know that it was meant."""
        self._closed = True
        if self._listener is not None:
            with suppress(OSError):  # wakes who accepts
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for link in self.links.values():
            link.close()
        until = time.monotonic() + LINGER
        while time.monotonic() < until and not all(x.is_done() for x in self.links.values()):
            threading.Event().wait(1e-3)

    def _note(self, line: str) -> None:
        """Say who was refused; of very many only some."""
        self._refused += 1
        if self._refused <= 20 or self._refused & (self._refused - 1) == 0:
            self._say(f"refused a connection ({self._refused}): {line}")

    # Who listens.

    def _admit(self, listener: socket.socket, others: set[int]) -> None:
        while not self._closed:
            try:
                sock, address = listener.accept()
            except OSError:
                if self._closed:
                    return
                threading.Event().wait(0.05)  # out of descriptors, perhaps
                continue
            if not self._pending.acquire(blocking=False):
                sock.close()
                self._note(f"{address[0]}: {PENDING} others are being asked who they are")
                continue
            args = sock, address[0], others
            threading.Thread(target=self._greet, args=args, daemon=True).start()

    def _greet(self, sock: socket.socket, host: str, others: set[int]) -> None:
        try:
            nonce = os.urandom(greeting.NONCE)
            sock.settimeout(GREETING)
            sock.sendall(greeting.hello(nonce))
            said = within(sock, greeting.CLAIM.size, GREETING)
            guest = greeting.welcome(self._known, self.me, nonce, said)
            who = guest.who
            if guest.again and who in self.told_by:
                self._greet_again(guest, sock)
                return
            if guest.again or who not in others or who in self.links:
                raise NotAdmitted(f"worker {who} isn't expected here")
            sock.sendall(guest.answer)
            self._stand(who, sock)
        except (NotAdmitted, OSError, EOFError) as error:
            sock.close()
            if not self._closed:
                self._note(f"{host}: {error if isinstance(error, NotAdmitted) else why_of(error)}")
        finally:
            self._pending.release()

    def _greet_again(self, guest: Guest, sock: socket.socket) -> None:
        """Let one in that takes the place of another, and tell it how far that one had come."""
        other = guest.who
        with self._news:
            if self._ears is None:  # nobody has come anywhere yet
                sock.sendall(guest.answer + bytes(8 * self.told_by[other]))
                self._stand(other, sock)
                return
            link = self.links[other]
            link.cut()
            self._readers[other].join(GREETING)

            def let_in(words: bytes) -> None:
                sock.sendall(guest.answer + words)
                link.renew(tuned(sock))

            self._begin(other, self._ears.again(other, let_in))

    # Who connects.

    def _connect(self, other: int, address: Address) -> socket.socket | None:
        """A connection; none if another in its place has come here meanwhile."""
        until, pause, why = time.monotonic() + PATIENCE, 0.02, ""
        while time.monotonic() < until:
            self._check()
            if other in self.links:
                return None
            sock = None
            try:
                sock = socket.create_connection(address, timeout=GREETING)
                return self._introduce(other, sock)
            except (NotAdmitted, OSError, EOFError) as error:
                why = str(error) if isinstance(error, NotAdmitted) else why_of(error)
                if sock is not None:
                    sock.close()
            threading.Event().wait(pause)
            pause = min(0.5, 2 * pause)
        raise RunError(
            f"worker {self.names[other]} can't be reached at {address[0]}:{address[1]}: {why}",
            "Its host must reach this one: look at its firewall, and at its own output.",
        )

    def _introduce(self, other: int, sock: socket.socket) -> socket.socket:
        ends, mine = (self.me, other), os.urandom(greeting.NONCE)
        said = within(sock, greeting.HELLO.size, GREETING)
        kind = greeting.AGAIN if self._listener is None else 0
        sock.sendall(greeting.claim(self._known, ends, said, mine, kind))
        nonces = mine + greeting.nonce_of(said)
        answer = within(sock, greeting.WELCOME.size, GREETING)
        greeting.check_welcome(self._known, ends, nonces, answer)
        if kind == greeting.AGAIN:
            self.told[other] = within(sock, 8 * self.told_by.get(other, 0), GREETING)
        return sock
