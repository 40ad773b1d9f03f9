"""All connections of a worker: opened, authenticated and read by one event loop.

The thread that makes a frame sends it. Flow control guarantees buffer space for incoming frames, so
the loop never blocks, and a sender never blocks forever on a live worker.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shoal.errors import RunError
from shoal.planning.restart_groups import group_of
from shoal.runtime.channels.channel import Waker
from shoal.runtime.logs import Log, to_stderr
from shoal.runtime.net import wire
from shoal.runtime.net.connection import Connection, FrameHandler
from shoal.runtime.net.loop import LOOK_S, Loop, SocketWaker
from shoal.runtime.net.sockets import Address, connecting, why_of
from shoal.runtime.net.wire import (
    CLAIM,
    HELLO,
    NONCE,
    WELCOME,
    Claim,
    Credentials,
    Incoming,
    ProtocolError,
    Signing,
)

HANDSHAKE_TIMEOUT_S = 5.0  # for a worker that connects to authenticate itself
# Most unauthenticated connections, in all and from one address, besides one per worker.
PENDING, PENDING_OF_ONE = 64, 16
START_TIMEOUT_S = 120.0  # for workers to connect at start
LINGER_S = 2.0  # for sent frames to be delivered when a worker ends
Steps = Generator[int, bytes, None]


class Membership(NamedTuple):
    """The restart groups of a run, and how this worker joined it."""

    groups: tuple[frozenset[int], ...] = ()  # workers that are replaced together
    incarnation: int = 0  # the number of times this worker was replaced


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
        self.handovers: dict[int, bytes] = {}  # the counts of the worker that this one replaces
        self._addresses: dict[int, Address] = {}  # of the workers that this one connects to
        self._calls: dict[int, _Call] = {}
        self._pending: dict[_Pending, None] = {}  # oldest first
        self._expected: frozenset[int] = frozenset()  # workers that connect to this one at start
        self._incarnations: dict[int, int] = {}
        self._callers, self._refused, self._closed = 0, 0, False
        self._handler: FrameHandler | None = None
        self._wake_worker: Callable[[], None] = lambda: None
        self._loop, self._replacing = Loop(self._tick), threading.Lock()
        self._stands = threading.Event()  # set when a connection is established
        self._listener: socket.socket | None = None

    def check(self) -> None:
        """Raise if a connection is lost to a worker that this one needs."""
        for link in list(self.links.values()):
            link.check()

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
        loose = frozenset(filter(self._is_loose, others | self.links.keys()))
        group = others & group_of(self.membership.groups, self.me)
        together = group if self.membership.incarnation else others
        self._expected = frozenset(other for other in together if other > self.me)
        self._callers = len(self._expected) + len(loose)
        with self._loop.lock:
            if listener is not None and self._callers:
                self._listener = listener
                listener.settimeout(0)
                self._loop.watch(listener, self._on_accept)
            for other in sorted(others - self._expected):
                self._addresses[other] = addresses[other]
                self._calls[other] = _Call()
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
                link.receive(incoming[other], handler)
                self._watch(link)
        self._loop.call()

    def waker(self, waker: Waker, *, alone: bool, spin: float = 0.0) -> SocketWaker:
        """Make a waker whose owner runs the loop while it waits.

        It is `alone` if nothing else wakes it: no other worker of its host, and no other thread.
        """
        return SocketWaker(waker, self._loop, self._look, spin, alone=alone)

    def _look(self) -> None:
        """Raise if the run stops, or if a connection is lost."""
        self._check()
        self.check()

    # The loop.

    def _tick(self, now: float) -> bool:
        """Handle deadlines of handshakes and connects; returns whether any are left."""
        for one in [one for one in self._pending if now >= one.deadline]:
            self._drop(one, TimeoutError())
        for other, call in list(self._calls.items()):
            if call.pending is None and now >= call.at:
                self._call(other, call)
        return bool(self._pending or self._calls)

    # Established connections.

    def _watch(self, link: Connection) -> None:
        """Read a connection."""
        if (sock := link.sock) is not None:
            self._loop.watch(sock, partial(self._on_link, link, sock))

    def _on_link(self, link: Connection, sock: socket.socket) -> bool:
        """Read a connection once; stop reading it if it has ended or broken."""
        inbox = link.inbox
        if inbox is None or link.sock is not sock:
            return False
        try:
            inbox.read(sock)
        except BlockingIOError:
            return False
        except (OSError, EOFError) as error:
            self._lose(link, why_of(error))
        except BaseException as error:
            self._lose(link, f"it sent {error}")
            if not isinstance(error, ProtocolError):
                raise
            self._note(f"{link.name}: {error}")
        if inbox.ended:
            link.ended = True
            self._lose(link, "it has ended")
        return True

    def _lose(self, link: Connection, why: str) -> None:
        """Close a connection that ended or broke; its worker may be replaced."""
        if (sock := link.sock) is None:
            return
        self._loop.unwatch(sock)
        link.fall(why)
        if link.loose and self._handler is not None and not self._closed:
            other = next(o for o, one in self.links.items() if one is link)
            self._handler.gone(other)
        self._wake_worker()

    def _stand(self, other: int, sock: socket.socket, signing: Signing | None) -> None:
        """Register a first connection; it isn't read before `read` is called."""
        self._end_call(other)
        link = self.links.get(other) or self._link(other)
        link.open(sock, signing)
        self.links[other] = link
        self._stands.set()

    # Handshakes.

    def _begin(self, sock: socket.socket, source: str, steps: Steps, other: int | None) -> _Pending:
        timeout = HANDSHAKE_TIMEOUT_S if other is None else START_TIMEOUT_S
        one = _Pending(sock, source, time.monotonic() + timeout, steps, other)
        self._pending[one] = None
        self._loop.watch(sock, partial(self._on_pending, one))
        return one

    def _on_pending(self, one: _Pending) -> bool:
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

    def _note(self, line: str) -> None:
        """Log a refused connection; of very many only some."""
        self._refused += 1
        if self._refused <= 20 or self._refused & (self._refused - 1) == 0:
            self._say(f"refused a connection ({self._refused}): {line}")

    # Handshakes: the listening side.

    def _on_accept(self) -> bool:
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
        other, signing = claim.worker, self._signing(nonces, connects=False)
        is_first = other in self._expected and other not in self.links
        self._loop.unwatch(sock)
        if claim.incarnation and self._is_loose(other):
            args = claim, nonces, sock, signing
            threading.Thread(target=self._replace, args=args, daemon=True).start()
        elif is_first and claim.incarnation == self.membership.incarnation:
            _send(sock, wire.pack_welcome(self._known, claim, nonces))
            self._stand(other, sock, signing)
        else:
            raise ProtocolError(f"worker {other} isn't expected here")

    def _signing(self, nonces: bytes, *, connects: bool) -> Signing | None:
        return Signing(self._known, nonces, connects=connects) if self._known.signed else None

    def _replace(
        self, claim: Claim, nonces: bytes, sock: socket.socket, signing: Signing | None
    ) -> None:
        """Accept a replacement worker, and send it the counts of its predecessor.

        Runs in its own thread: it waits until no message is being sent or taken.
        """
        other = claim.worker
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        try:
            with self._replacing:
                with self._loop.lock:
                    self._begin_incarnation(other, claim.incarnation)
                    if self._handler is None:  # no message was sent yet
                        sock.sendall(wire.pack_welcome(self._known, claim, nonces))
                        self._stand(other, sock, signing)
                        return
                    self._part(other)
                link = self.links[other]

                def let_in(handover: bytes) -> None:
                    sock.sendall(wire.pack_welcome(self._known, claim, nonces, handover))
                    link.open(sock, signing)

                incoming = self._handler.replaced(other, let_in)
                with self._loop.lock:
                    link.receive(incoming, self._handler)
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
            if self._incarnations.get(one, 0) < incarnation:
                self._part(one)

    def _part(self, other: int) -> None:
        """Drop the connection to a worker that is being replaced, even if it seems alive."""
        self._end_call(other)
        self._lose(self.links[other], "it is being replaced")

    # Handshakes: the connecting side.

    def _call(self, other: int, call: _Call) -> None:
        try:
            sock = connecting(self._addresses[other])
        except OSError as error:
            self._postpone(other, call, why_of(error))
            return
        call.pending = self._begin(sock, "", self._introduce(other, sock), other)
        self._advance(call.pending, None)

    def _end_call(self, other: int) -> None:
        call = self._calls.pop(other, None)
        if call is not None and call.pending is not None:
            self._end(call.pending)

    def _introduce(self, other: int, sock: socket.socket) -> Steps:
        """Authenticate this worker to a listener, and check the listener's proof."""
        hello = yield HELLO.size
        claim, nonce = Claim(self.me, other, self.membership.incarnation), os.urandom(NONCE)
        nonces = wire.nonce_of(hello) + nonce
        _send(sock, wire.pack_claim(self._known, claim, hello, nonce))
        welcome = yield WELCOME.size
        size = wire.handover_size(welcome)
        handover = (yield size) if size else b""
        wire.check_welcome(self._known, claim, nonces, welcome, handover)
        self._loop.unwatch(sock)
        self._calls.pop(other, None)
        if handover:
            self.handovers[other] = handover
        self._stand(other, sock, self._signing(nonces, connects=True))

    def close(self) -> None:
        """Close all connections in an orderly way, with BYE to the others."""
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


def _send(sock: socket.socket, data: bytes) -> None:
    """Send a short message, which always fits in a new connection's buffer."""
    if sock.send(data) != len(data):
        raise ConnectionResetError
