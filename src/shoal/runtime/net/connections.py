"""All connections of a worker: opened, authenticated, read and re-established by one event loop.

The thread that makes a frame sends it. Flow control guarantees buffer space for incoming frames, so
the loop never blocks, and a sender never blocks forever on a live worker.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shoal.errors import RunError
from shoal.planning.restart_groups import group_of
from shoal.runtime.channels.channel import Waker
from shoal.runtime.logs import Log, to_stderr
from shoal.runtime.net import wire
from shoal.runtime.net.connection import Connection, FrameHandler, Inbox
from shoal.runtime.net.loop import LOOK_S, READ, WRITE, Loop, SocketWaker, Wakes
from shoal.runtime.net.sockets import Address, connecting, why_of
from shoal.runtime.net.wire import (
    CLAIM,
    FIRST,
    HELLO,
    NONCE,
    REPLACE,
    RESUME,
    TAG,
    WELCOME,
    Claim,
    Credentials,
    Incoming,
    ProtocolError,
    Signing,
)

HANDSHAKE_TIMEOUT_S = 5.0  # for the other side to authenticate itself
# Most unauthenticated connections, in all and from one address, besides one per worker.
PENDING, PENDING_OF_ONE = 64, 16
START_TIMEOUT_S = 120.0  # for workers to connect at start
REJOIN_TIMEOUT_S = 30.0  # to re-establish a broken connection
LOOSE_TIMEOUT_S = 2.0  # the same, for a worker that the others can run without
ERROR_GRACE_S = 5.0  # for the driver to learn why a worker was lost
LINGER_S = 2.0  # for sent frames to be delivered when a worker ends
Steps = Generator[int, bytes, None]


class Membership(NamedTuple):
    """The restart groups of a run, and how this worker joined it."""

    groups: tuple[frozenset[int], ...] = ()  # workers that are replaced together
    rejoin: float = REJOIN_TIMEOUT_S  # seconds to re-establish a broken connection
    incarnation: int = 0  # the number of times this worker was replaced
    handover_sizes: Mapping[int, int] = {}  # number of counts in a handover, by worker


@dataclass(eq=False)
class _Pending:
    """A connection whose other side isn't authenticated yet."""

    sock: socket.socket
    source: str
    deadline: float
    steps: Steps
    other: int | None = None  # the worker this one connects to; None if accepted
    want: int = 0
    got: bytes = b""


@dataclass
class _Call:
    """An attempt to connect to a worker, and when to try next."""

    kind: int
    at: float = 0.0
    pause: float = 0.02
    why: str = ""
    pending: _Pending | None = None


class Connections:
    """All connections of this worker."""

    def __init__(
        self,
        me: int,
        names: Sequence[str],
        known: Credentials,
        check: Callable[[], None] = lambda: None,
        say: Log = to_stderr,
        membership: Membership | None = None,
    ) -> None:
        self.me, self.names, self._known = me, names, known
        self._check, self._say, self.membership = check, say, membership or Membership()
        self.links: dict[int, Connection] = {}
        self.handovers: dict[int, bytes] = {}  # the counts received on joining late
        self._addresses: dict[int, Address] = {}  # of the workers that this one connects to
        self._calls: dict[int, _Call] = {}
        self._pending: dict[_Pending, None] = {}  # oldest first
        self._expected: frozenset[int] = frozenset()  # workers that connect to this one at start
        self._first: frozenset[int] = frozenset()  # workers that start together with this one
        self._incarnations: dict[int, int] = {}
        self._callers, self._refused, self._closed = 0, 0, False
        self._handler: FrameHandler | None = None
        self._wake_worker: Callable[[], None] = lambda: None
        self._loop, self._replacing = Loop(self._tick), threading.Lock()
        self._stands = threading.Event()  # set when a connection is established
        self._listener: socket.socket | None = None

    @property
    def rejoin(self) -> float:
        """Seconds to re-establish a broken connection."""
        return self.membership.rejoin

    def check(self) -> None:
        """Raise if a connection was not re-established in time."""
        for link in list(self.links.values()):
            link.check()

    @property
    def broken(self) -> str:
        """The connections that are being re-established, and why; empty if none is."""
        links = [one for one in list(self.links.values()) if one.is_broken and not one.away]
        names = ", ".join(f"{link.name} ({link.broken})" for link in links)
        return names and f"the connection is being made again to {names}"

    # Joining.

    def expect(self, others: Iterable[int]) -> None:
        """Expect these workers to join later; until then, frames to them are dropped."""
        for other in others:
            self.links[other] = self._link(other)

    def join(
        self, listener: socket.socket | None, others: Iterable[int], addresses: Sequence[Address]
    ) -> None:
        """Connect with all these workers: to lower indices, from higher ones.

        A worker that joins late connects to all others, except to those of its restart group.
        """
        others = frozenset(others)
        group = others & group_of(self.membership.groups, self.me)
        is_late = self.membership.incarnation or listener is None
        self._first = group if is_late else others
        self._expected = frozenset(other for other in self._first if other > self.me)
        self._callers = len(self._expected) + len(self.membership.handover_sizes)
        with self._loop.lock:
            if listener is not None and (self._expected or self.membership.handover_sizes):
                self._listener = listener
                listener.settimeout(0)
                self._loop.watch(listener, self._on_accept)
            for other in sorted(others - self._expected):
                self._addresses[other] = addresses[other]
                self._calls[other] = _Call(FIRST if other in self._first else REPLACE)
        self._loop.start()
        until = time.monotonic() + START_TIMEOUT_S
        while missing := others - self.links.keys():
            self._check()
            if time.monotonic() > until:
                raise self._unreached(sorted(missing))
            self._stands.wait(LOOK_S)
            self._stands.clear()

    def _unreached(self, missing: Sequence[int]) -> RunError:
        called = [other for other in missing if other in self._calls]
        if called:
            host, port = self._addresses[called[0]]
            return RunError(
                f"worker {self.names[called[0]]} can't be reached at {host}:{port}: "
                f"{self._calls[called[0]].why}",
                "Check the firewalls between the two hosts, and the worker's own output.",
            )
        names = ", ".join(self.names[other] for other in missing)
        return RunError(
            f"no connection from {names} in {START_TIMEOUT_S:.0f} seconds",
            "Check the worker's own output, and that its host can reach this one.",
        )

    def _link(self, other: int) -> Connection:
        return Connection(self.names[other], self._check, loose=self._is_loose(other))

    def _is_loose(self, other: int) -> bool:
        """Whether a worker may be replaced while this one stays."""
        return any(other in group and self.me not in group for group in self.membership.groups)

    def read(
        self,
        incoming: Mapping[int, Incoming],
        handler: FrameHandler,
        wake: Callable[[], None],
    ) -> None:
        """Start to read all connections; `wake` is called when one is lost."""
        with self._loop.lock:
            self._wake_worker, self._handler = wake, handler
            for other, link in self.links.items():
                link.open(Inbox(incoming[other], handler))
                if not link.away:
                    self._watch(link)
        self._loop.call()

    def waker(self, waker: Waker, wakes: Wakes, spin: float = 0.0) -> SocketWaker:
        """Make a waker whose owner runs the loop while it waits."""
        return SocketWaker(waker, self._loop, wakes, spin)

    # The loop.

    def _tick(self, now: float) -> bool:
        """Handle deadlines of handshakes, connects and reconnects; returns whether any are left."""
        for one in [one for one in self._pending if now >= one.deadline]:
            self._drop(one, TimeoutError())
        for other, call in list(self._calls.items()):
            link = self.links.get(other)
            is_over = link is not None and (
                link.left <= 0 or not link.is_broken if call.kind == RESUME else not link.away
            )
            if is_over:
                self._end_call(other)
            elif call.pending is None and now >= call.at:
                self._call(other, call)
        broken = False
        for other, link in self.links.items():
            if link.loose and link.is_broken and not link.away:
                broken = True
                if link.left <= 0:
                    self._give_up(other)
                    self._wake_worker()
        return bool(self._pending or self._calls or broken)

    # Established connections.

    def _watch(self, link: Connection) -> None:
        """Read a connection, and resend the frames that the other side lacks."""
        if (sock := link.sock) is not None:
            # A sender may hold the lock of a connection without resends: don't wait for it.
            mask = READ | WRITE if not link.is_direct and link.send_again() else READ
            if link.sock is sock:
                self._loop.watch_stream(sock, partial(self._on_link, link, sock), mask)

    def _on_link(self, link: Connection, sock: socket.socket, mask: int) -> bool:
        """Read a connection once; stop reading it if it has ended or broken."""
        inbox = link.inbox
        if inbox is None or link.sock is not sock:
            return False
        if mask & WRITE:
            self._watch(link)
        if not mask & READ:
            return False
        try:
            inbox.read(sock)
        except BlockingIOError:
            return False
        except BaseException as error:
            self._failed(link, error)
            return True
        if inbox.ended:
            link.ended = True
            self._failed(link, EOFError())
        return True

    def _failed(self, link: Connection, error: BaseException) -> None:
        """Handle a connection that ended, broke, or sent an invalid frame."""
        other = next(o for o, one in self.links.items() if one is link)
        self._loop.unwatch(link.sock)
        try:
            if isinstance(error, (OSError, EOFError)) and not link.ended:
                grace_s = min(LOOSE_TIMEOUT_S, self.rejoin) if link.loose else self.rejoin
                link.fall(why_of(error), grace_s)
                if other in self._addresses and not self._closed:
                    self._calls.setdefault(other, _Call(RESUME))
                return
            if not link.ended:
                refused = isinstance(error, ProtocolError)
                why = f"it sent {error}" if refused else f"{type(error).__name__}: {error}"
                link.fall(why, ERROR_GRACE_S)
                link.refused = True
                if not refused:
                    raise error
                self._note(f"{link.name}: {error}")
            self._give_up(other)
        finally:
            self._loop.expect()
            self._wake_worker()

    def _give_up(self, other: int) -> None:
        """Continue without a worker that doesn't come back; it may be replaced."""
        link = self.links[other]
        if link.loose and not (link.away or self._closed):
            link.away = True
            if self._handler is not None:
                self._handler.gone(other)

    def _stand(self, other: int, sock: socket.socket, signing: Signing | None) -> None:
        """Register a first connection; it isn't read before `read` is called."""
        link = self.links.get(other) or self._link(other)
        link.renew(sock, signing)
        self.links[other] = link
        self._stands.set()

    def _resume(self, other: int, sock: socket.socket, signing: Signing | None, n: int) -> None:
        """Resume over a new connection to a worker that has the first `n` frames."""
        link = self.links[other]
        why, since = link.broken, link.since
        link.resume(sock, signing, n)
        self._watch(link)
        self._say(
            f"the connection to worker {link.name} broke ({why}) and was made again after "
            f"{time.monotonic() - since:.1f} s"
        )
        self._wake_worker()

    # Handshakes.

    def _begin(self, sock: socket.socket, source: str, steps: Steps, other: int | None) -> _Pending:
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        one = _Pending(sock, source, deadline, steps, other)
        self._pending[one] = None
        self._loop.watch(sock, partial(self._on_pending, one))
        return one

    def _on_pending(self, one: _Pending, _: int) -> bool:
        """Read the bytes that a handshake expects, and run its next step."""
        try:
            data = one.sock.recv(one.want - len(one.got))
            if not data:
                raise EOFError
            one.got += data
            if len(one.got) == one.want:
                self._advance(one, one.got)
        except BlockingIOError:
            pass
        except (ProtocolError, OSError, EOFError) as error:
            self._drop(one, error)
        return True

    def _advance(self, one: _Pending, data: bytes | None) -> None:
        one.got = b""
        try:
            one.want = next(one.steps) if data is None else one.steps.send(data)
        except StopIteration:
            self._forget(one)

    def _forget(self, one: _Pending) -> None:
        """Remove a handshake that is over."""
        self._pending.pop(one, None)
        if one.other in self._calls:
            self._calls[one.other].pending = None

    def _end(self, one: _Pending) -> None:
        self._forget(one)
        self._loop.unwatch(one.sock)
        one.sock.close()

    def _drop(self, one: _Pending, error: BaseException) -> None:
        """Close a handshake that failed."""
        self._end(one)
        why = str(error) if isinstance(error, ProtocolError) else why_of(error)
        if one.other is None:
            if not self._closed:
                self._note(f"{one.source}: {why}")
        elif call := self._calls.get(one.other):
            self._postpone(one.other, call, why)

    def _postpone(self, other: int, call: _Call, why: str) -> None:
        call.why, call.at = why, time.monotonic() + call.pause
        call.pause = min(0.5, 2 * call.pause)
        if call.kind == RESUME:
            self.links[other].tried, call.pause = why, 0.05

    def _note(self, line: str) -> None:
        """Log a refused connection; of very many only some."""
        self._refused += 1
        if self._refused <= 20 or self._refused & (self._refused - 1) == 0:
            self._say(f"refused a connection ({self._refused}): {line}")

    # Handshakes: the listening side.

    def _on_accept(self, _: int) -> bool:
        assert self._listener is not None
        calling = [one for one in self._pending if one.other is None]
        try:
            sock, address = self._listener.accept()
        except OSError:
            if calling and not self._closed:  # perhaps out of file descriptors
                self._drop(calling[0], ProtocolError("too many connections wait to authenticate"))
            return False
        # Silent strangers must not block a worker: drop the oldest pending connection.
        # All workers may connect from one address at once, and slowly if they are many.
        same = [one for one in calling if one.source == address[0]]
        if len(same) >= PENDING_OF_ONE + self._callers:
            self._drop(
                same[0], ProtocolError("too many connections from there wait to authenticate")
            )
        elif len(calling) >= PENDING + self._callers:
            self._drop(calling[0], ProtocolError("too many connections wait to authenticate"))
        sock.settimeout(0)
        one = self._begin(sock, address[0], self._answer(sock), None)
        try:
            self._advance(one, None)
        except OSError as error:
            self._drop(one, error)
        return True

    def _answer(self, sock: socket.socket) -> Steps:
        """Challenge a peer that has connected, and accept it if its claim is valid."""
        nonce = os.urandom(NONCE)
        _send(sock, wire.hello(nonce))
        data = yield CLAIM.size
        claim, nonces = wire.check_claim(self._known, self.me, nonce, data)
        signing = self._signing(nonces, connects=False)
        other, link = claim.worker, self.links.get(claim.worker)
        is_first = other in self._first
        known = self._incarnations.get(other, self.membership.incarnation if is_first else 0)
        is_same = claim.incarnation == known
        self._loop.unwatch(sock)
        if claim.kind == REPLACE and self._is_loose(other):
            args = claim, nonces, sock, signing
            threading.Thread(target=self._replace, args=args, daemon=True).start()
        elif link is not None and is_same and self._may_resume(link, claim):
            link.check_received(claim.received)
            self._loop.unwatch(link.sock)
            link.fall("the other side reconnected", self.rejoin)
            _send(sock, wire.pack_welcome(self._known, claim, link.received, nonces))
            self._resume(other, sock, signing, claim.received)
        elif claim.kind == FIRST and other in self._expected and is_same and self._handler is None:
            _send(sock, wire.pack_welcome(self._known, claim, 0, nonces))
            self._stand(other, sock, signing)
        else:
            raise ProtocolError(f"worker {other} isn't expected here")

    def _may_resume(self, link: Connection, claim: Claim) -> bool:
        """Whether a connection may be resumed; with FIRST, if the welcome never arrived."""
        if self._handler is None or link.refused or link.ended or link.away:
            return False
        return claim.kind == RESUME or (claim.kind == FIRST and not link.received)

    def _signing(self, nonces: bytes, *, connects: bool) -> Signing | None:
        return Signing(self._known, nonces, connects=connects) if self._known.signed else None

    def _replace(
        self, claim: Claim, nonces: bytes, sock: socket.socket, signing: Signing | None
    ) -> None:
        """Accept a replacement worker, and send it the counts of its predecessor.

        Runs in its own thread: it waits until no message is being sent or taken.
        """
        other, welcome = claim.worker, wire.pack_welcome(self._known, claim, 0, nonces)
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        try:
            with self._replacing:
                with self._loop.lock:
                    self._begin_incarnation(other, claim.incarnation)
                    if self._handler is None:  # no message was sent yet
                        words = bytes(8 * self.membership.handover_sizes[other])
                        sock.sendall(welcome + words + _tag(signing, words))
                        self._stand(other, sock, signing)
                        return
                    self._part(other)
                link = self.links[other]

                def let_in(words: bytes) -> None:
                    sock.sendall(welcome + words + _tag(signing, words))
                    link.renew(sock, signing)

                incoming = self._handler.replaced(other, let_in)
                with self._loop.lock:
                    link.open(Inbox(incoming, self._handler))
                    self._watch(link)
        except (ProtocolError, OSError) as error:
            sock.close()
            self._note(str(error))

    def _begin_incarnation(self, other: int, incarnation: int) -> None:
        """Record a replacement's incarnation: older workers of its group are lost too."""
        if incarnation < self._incarnations.get(other, 0):
            raise ProtocolError(f"worker {other} was replaced by a newer one")
        self._incarnations[other] = incarnation
        for one in group_of(self.membership.groups, other) & self.links.keys() - {other}:
            if self._incarnations.get(one, 0) < incarnation and not self.links[one].away:
                self._part(one)

    def _part(self, other: int) -> None:
        """Drop the connection to a worker that is being replaced, even if it seems alive."""
        link = self.links[other]
        self._addresses.pop(other, None)  # its listener is closed
        self._end_call(other)
        self._loop.unwatch(link.sock)
        link.fall("it is being replaced", LOOSE_TIMEOUT_S)
        self._give_up(other)
        link.away = True

    # Handshakes: the connecting side.

    def _call(self, other: int, call: _Call) -> None:
        try:
            sock = connecting(self._addresses[other])
        except OSError as error:
            self._postpone(other, call, why_of(error))
            return
        call.pending = self._begin(sock, "", self._introduce(other, call.kind, sock), other)
        self._advance(call.pending, None)

    def _end_call(self, other: int) -> None:
        call = self._calls.pop(other, None)
        if call is not None and call.pending is not None:
            self._end(call.pending)

    def _introduce(self, other: int, kind: int, sock: socket.socket) -> Steps:
        """Authenticate this worker to a listener, and check the listener's proof."""
        hello = yield HELLO.size
        received = self.links[other].received if kind == RESUME else 0
        claim = Claim(self.me, other, self.membership.incarnation, kind, received)
        nonce = os.urandom(NONCE)
        nonces = wire.nonce_of(hello) + nonce
        _send(sock, wire.pack_claim(self._known, claim, hello, nonce))
        answer = yield WELCOME.size
        theirs = wire.check_welcome(self._known, claim, nonces, answer)
        signing = self._signing(nonces, connects=True)
        if kind == REPLACE:
            size = 8 * self.membership.handover_sizes.get(other, 0)
            rest = (yield size + (TAG if signing else 0)) if size or signing else b""
            if signing is not None:
                signing.check(b"handover", [rest[:size]], rest[size:])
            self.handovers[other] = rest[:size]
        if kind == RESUME:
            self.links[other].check_received(theirs)
        self._loop.unwatch(sock)
        self._calls.pop(other, None)
        if kind == RESUME:
            self._resume(other, sock, signing, theirs)
        else:
            self._stand(other, sock, signing)

    def close(self) -> None:
        """Close all connections in an orderly way, with BYE to the others."""
        with suppress(Exception):  # `check` raises if the run stops at once
            while any(link.is_wanted for link in self.links.values()):
                self._check()
                threading.Event().wait(0.02)
        self._closed = True
        with self._loop.lock:
            if self._listener is not None:
                self._loop.unwatch(self._listener)
                self._listener.close()
            for one in list(self._pending):
                self._end(one)
        for link in self.links.values():
            link.close()
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until and not all(x.is_done() for x in self.links.values()):
            threading.Event().wait(1e-3)
        self._loop.close()


def _tag(signing: Signing | None, words: bytes) -> bytes:
    """The MAC of a handover's counts, or nothing if the run uses no MACs."""
    return signing.tag(b"handover", [words]) if signing is not None else b""


def _send(sock: socket.socket, data: bytes) -> None:
    """Send a short message, which always fits in a new connection's buffer."""
    if sock.send(data) != len(data):
        raise ConnectionResetError
