"""Connections between workers of different hosts: how they are made, and made again.

Who has something to send sends it itself. There is always room for what may come (channels see to
that), so readers never wait for anybody, and nobody who sends can wait for ever on a worker that
lives.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from shoal.errors import RunError
from shoal.planning.restart_groups import party_of
from shoal.runtime.channels.channel import Waker
from shoal.runtime.logs import Say, to_stderr
from shoal.runtime.net import handshake as greeting
from shoal.runtime.net.connection import GRACE, GREETING, Connection, broken_ones
from shoal.runtime.net.connection_reader import ConnectionReader, SocketWaker, Wakes
from shoal.runtime.net.framing import Terms
from shoal.runtime.net.handshake import Credentials, Peer, ProtocolError
from shoal.runtime.net.inbox import FrameHandler, Inbox
from shoal.runtime.net.reconnect import Table
from shoal.runtime.net.sockets import why_of, within

Address = tuple[str, int]
PENDING = 32  # connections that may be proving it at once; more are turned away
PATIENCE = 120.0  # seconds that workers wait for each other to start
REJOIN = 30.0  # seconds in which a connection that broke has to be made again
LOOSE = 2.0  # the same, for a worker that can be done without
LINGER = 2.0  # seconds that what was sent has to arrive when a worker ends


class Connections:
    """All connections of this worker."""

    def __init__(
        self,
        me: int,
        names: Sequence[str],
        known: Credentials,
        check: Callable[[], None] = lambda: None,
        say: Say = to_stderr,
    ) -> None:
        self.me, self.names, self._known = me, names, known
        self._check, self._say = check, say
        self.links: dict[int, Connection] = {}
        self._addresses: dict[int, Address] = {}  # of those that this worker connects to
        self._news = threading.Condition()
        self._pending = threading.BoundedSemaphore(PENDING)
        self._refused, self._closed = 0, False
        self._listener: socket.socket | None = None
        self._porter: ConnectionReader | None = None
        self._terms: Mapping[int, Terms] = {}
        self._ears: FrameHandler | None = None
        self._wake: Callable[[], None] = lambda: None
        self.parties: tuple[frozenset[int], ...] = ()  # whose place others may take, together
        self.rejoin, self.life = REJOIN, 0  # which holder of its place this worker is
        self._lives: dict[int, int] = {}  # which others are
        self._first: frozenset[int] = frozenset()  # those that are as new as this worker
        self.told_by: dict[int, int] = {}  # where one may join late, words that it is told
        self.told: dict[int, bytes] = {}  # what this worker was told, where it has joined late

    def check(self) -> None:
        """Raise if a worker has been gone for too long."""
        for link in list(self.links.values()):
            link.check()

    @property
    def broken(self) -> str:
        """Which connections are being made again, and why; nothing if none is."""
        return broken_ones(self.links.values())

    def join(
        self, listener: socket.socket | None, others: Iterable[int], addresses: Sequence[Address]
    ) -> None:
        """Connect with all these workers: to those before this one, from those after it.

        Who joins late connects to all but those that do so with it.
        """
        others = frozenset(others)
        self._listener = listener
        as_new = others & party_of(self.parties, self.me)
        self._first = as_new if self.life or listener is None else others
        after = {other for other in self._first if other > self.me}
        if listener is not None and (after or self.told_by):
            threading.Thread(target=self._admit, args=(listener, after), daemon=True).start()
        for other in sorted(others - after):
            self._addresses[other] = addresses[other]
            sock = self._meet(other)
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

    def _is_loose(self, other: int) -> bool:
        """Whether another may take a worker's place while this one stays."""
        return any(other in party and self.me not in party for party in self.parties)

    def expect(self, others: Iterable[int]) -> None:
        """These workers may come later; until then, what they are sent is dropped."""
        for other in others:
            self.links[other] = Connection(self.names[other], None, self._check, loose=True)

    def _stand(self, other: int, sock: socket.socket) -> None:
        with self._news:
            if other in self.links:  # nothing was read from it yet
                self.links[other].renew(sock)
            else:
                loose = self._is_loose(other)
                self.links[other] = Connection(self.names[other], sock, self._check, loose=loose)
            self._news.notify_all()

    def read(
        self,
        terms: Mapping[int, Terms],
        ears: FrameHandler,
        wake: Callable[[], None],
        due: Mapping[int, Table] | None = None,
    ) -> None:
        """Begin to read every connection; `wake` whoever waits when one is gone.

        `due` is what each sends first, where that isn't the first of all.
        """
        with self._news:
            self._wake, self._ears, self._terms = wake, ears, terms
            self._porter = ConnectionReader(self._failed)
            for other, link in self.links.items():
                link.inbox = Inbox(terms[other], ears, (due or {}).get(other))
                if not link.away:
                    self._porter.add(link)

    def bell(self, bell: Waker, wakes: Wakes, spin: float = 0.0) -> SocketWaker:
        """A bell whose owner reads for itself while it waits."""
        assert self._porter is not None
        return SocketWaker(bell, self._porter, wakes, spin)

    # What becomes of them.

    def _failed(self, link: Connection, error: BaseException) -> None:
        """A connection ended, broke, or brought what isn't believed."""
        other = next(o for o, one in self.links.items() if one is link)
        try:
            if isinstance(error, (OSError, EOFError)) and not link.ended:
                self._broke(other, why_of(error))
                return
            if not link.ended:
                refused = isinstance(error, ProtocolError)
                why = f"it sent {error}" if refused else f"{type(error).__name__}: {error}"
                link.fall(why, GRACE)
                link.refused = True
                if not refused:
                    raise error
                self._note(f"{link.name}: {error}")
            self._give_up(other)
        finally:
            self._wake()

    def _broke(self, other: int, why: str) -> None:
        """Make a connection again, or wait until the other does."""
        link = self.links[other]
        link.fall(why, min(LOOSE, self.rejoin) if link.loose else self.rejoin)
        mends = link.loose or other in self._addresses
        if mends and not self._closed and link.begin_mending():
            threading.Thread(target=self._mend, args=(other,), daemon=True).start()

    def _mend(self, other: int) -> None:
        """Make a connection again, and again if it breaks meanwhile; nobody else does."""
        link, is_done = self.links[other], False
        while not is_done:
            self._mend_once(other, link)
            is_done = link.end_mending(gives_up=self._closed)
        self._wake()

    def _mend_once(self, other: int, link: Connection) -> None:
        while link.is_broken and not self._closed and link.left > 0:
            sock = None
            try:
                if other in self._addresses:
                    sock = self._connect(other, link.left, greeting.RESUME)
                    self._resume(link, sock)
            except (ProtocolError, OSError, EOFError, RunError) as error:
                link.tried = _told(error)
                if sock is not None:
                    sock.close()
            threading.Event().wait(0.05)
        with link.mending:
            if link.is_broken:
                self._give_up(other)

    def _give_up(self, other: int) -> None:
        """A worker that can be done without doesn't come back; another may take its place."""
        link = self.links[other]
        if link.loose and not (link.away or self._closed):
            link.away = True
            assert self._ears is not None
            self._ears.gone(other)

    def _resume(self, link: Connection, sock: socket.socket) -> None:
        """Go on over a new connection, whether the old one is known to be gone or not."""
        porter = self._porter
        with link.mending:
            if porter is None or link.refused or link.ended or link.away:
                raise ProtocolError(f"worker {link.name} isn't expected here")
            porter.drop(link)
            link.fall("the other side made it again", self.rejoin)
            why, since = link.broken, link.since
            link.resume(sock, lambda: porter.add(link))
            self._say(
                f"the connection to worker {link.name} broke ({why}) and was made again after "
                f"{time.monotonic() - since:.1f} s"
            )
        self._wake()

    def close(self) -> None:
        """End all connections, so that the others know that it was meant."""
        with suppress(Exception):  # what is to stop at once, stops
            while any(link.is_wanted for link in self.links.values()):
                self._check()
                threading.Event().wait(0.02)
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
        if self._porter is not None:
            self._porter.close()

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
            self._let_in(guest, sock, others)
        except (ProtocolError, OSError, EOFError) as error:
            sock.close()
            if not self._closed:
                self._note(f"{host}: {_told(error)}")
        finally:
            self._pending.release()

    def _let_in(self, guest: Peer, sock: socket.socket, others: set[int]) -> None:
        """Let one in that may come as it says."""
        who, link = guest.who, self.links.get(guest.who)
        is_same = guest.life == self._lives.get(who, self.life if who in self._first else 0)
        if guest.kind == greeting.AGAIN and self._is_loose(who):
            self._replace(guest, sock)
        elif guest.kind == greeting.RESUME and link is not None and is_same:
            sock.sendall(guest.answer)
            link.come_back(sock)
            self._resume(link, sock)
        elif guest.kind == greeting.FIRST and who in others and link is None and is_same:
            sock.sendall(guest.answer)
            self._stand(who, sock)
        else:
            raise ProtocolError(f"worker {who} isn't expected here")

    def _replace(self, guest: Peer, sock: socket.socket) -> None:
        """Let one in that takes the place of another, and tell it how far that one had come."""
        other = guest.who
        with self._news:
            self._begin_life(other, guest.life)
            porter, ears = self._porter, self._ears
            if porter is None or ears is None:  # nobody has come anywhere yet
                sock.sendall(guest.answer + bytes(8 * self.told_by[other]))
                self._stand(other, sock)
                return
            with (link := self.links[other]).mending:
                self._part(other)

                def let_in(words: bytes) -> None:
                    sock.sendall(guest.answer + words)
                    link.renew(sock)

                due = ears.again(other, let_in)
                link.inbox = Inbox(self._terms[other], ears, due)
                porter.add(link)

    def _begin_life(self, other: int, life: int) -> None:
        """Another takes a place: those that were there with the one before are gone too."""
        if life < self._lives.get(other, 0):
            raise ProtocolError(f"another has taken the place of worker {other} since")
        self._lives[other] = life
        for one in party_of(self.parties, other) & self.links.keys() - {other}:
            if self._lives.get(one, 0) < life and not self.links[one].away:
                with self.links[one].mending:
                    self._part(one)

    def _part(self, other: int) -> None:
        """Give up a worker in whose place another comes, though it may be thought to be there."""
        link = self.links[other]
        self._addresses.pop(other, None)  # its door is gone
        if self._porter is not None:
            self._porter.drop(link)
        link.fall("another takes its place", LOOSE)
        if self._ears is not None:
            self._give_up(other)
        link.away = True

    # Who connects.

    def _meet(self, other: int) -> socket.socket | None:
        """A first connection; none if another in its place has come here meanwhile."""

        def check() -> None:
            self._check()
            if other in self.links:
                raise _HasCome

        kind = greeting.FIRST if other in self._first else greeting.AGAIN
        try:
            return self._connect(other, PATIENCE, kind, check)
        except _HasCome:
            return None

    def _connect(
        self, other: int, seconds: float, kind: int, check: Callable[[], None] = lambda: None
    ) -> socket.socket:
        address, until = self._addresses[other], time.monotonic() + seconds
        pause, why = 0.02, ""
        while (left := until - time.monotonic()) > 0 and not self._closed:
            check()
            sock = None
            try:
                sock = socket.create_connection(address, timeout=min(left, GREETING))
                return self._introduce(other, sock, kind)
            except (ProtocolError, OSError, EOFError) as error:
                why = _told(error)
                if sock is not None:
                    sock.close()
            threading.Event().wait(pause)
            pause = min(0.5, 2 * pause)
        raise RunError(
            f"worker {self.names[other]} can't be reached at {address[0]}:{address[1]}: {why}",
            "Its host must reach this one: look at its firewall, and at its own output.",
        )

    def _introduce(self, other: int, sock: socket.socket, kind: int) -> socket.socket:
        ends, mine = (self.me, other, self.life), os.urandom(greeting.NONCE)
        said = within(sock, greeting.HELLO.size, GREETING)
        sock.sendall(greeting.claim(self._known, ends, said, mine, kind))
        nonces = mine + greeting.nonce_of(said)
        answer = within(sock, greeting.WELCOME.size, GREETING)
        greeting.check_welcome(self._known, ends, nonces, answer)
        if kind == greeting.AGAIN:
            self.told[other] = within(sock, 8 * self.told_by.get(other, 0), GREETING)
        return sock


class _HasCome(Exception):
    """Another has connected in the place of the one that was to be reached."""


def _told(error: BaseException) -> str:
    """Why somebody isn't reached or refused, in words."""
    return str(error) if isinstance(error, (ProtocolError, RunError)) else why_of(error)
