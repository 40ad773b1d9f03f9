"""The handshake: only workers of the run may connect, and other peers do no harm."""

import os
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.lines import HANG, until
from shoal.errors import RunError
from shoal.runtime.net import connection, wire
from shoal.runtime.net import connections as links
from shoal.runtime.net.connections import PENDING, PENDING_OF_ONE, Connections, Membership
from shoal.runtime.net.sockets import listen
from shoal.runtime.net.wire import (
    CLAIM,
    DATA,
    HEAD,
    HELLO,
    NONCE,
    TAKEN,
    TOKEN,
    VERSION,
    Claim,
    Credentials,
    Frame,
    Incoming,
    ProtocolError,
)

KNOWN = Credentials(b"t" * TOKEN, wire.digest("the channels"))
STRANGE = Credentials(b"x" * TOKEN, KNOWN.layout)


@contextmanager
def listening(monkeypatch, seconds=HANG):
    """Worker 0, which waits for worker 1 to connect: its connections, address and log."""
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT_S", seconds)
    said, listener = [], listen()
    mine = Connections(0, ("env[0]", "learner[0]"), KNOWN, say=said.append)
    address = listener.getsockname()
    waiting = threading.Thread(target=mine.join, args=(listener, [1], [address] * 2), daemon=True)
    waiting.start()
    yield mine, address, said
    connect(address)
    waiting.join(HANG)
    assert set(mine.links) == {1}, "a worker of the run was refused"
    mine.close()


def connect(address, known=KNOWN, me=1):
    """A worker that connects."""
    theirs = Connections(me, ("env[0]", "learner[0]", "env[1]"), known)
    theirs.join(listen(), [0], [address] * 3)
    return theirs


def ended(sock):
    """Whether the other side has closed a connection."""
    sock.settimeout(HANG)
    try:
        while sock.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


def claim_of(sock, known=KNOWN, ends=(1, 0, 0)):
    hello = sock.recv(HELLO.size, socket.MSG_WAITALL)
    return wire.pack_claim(known, Claim(*ends), hello, os.urandom(NONCE))


def spoilt_version(sock):
    claim = bytearray(claim_of(sock))
    claim[4] = VERSION + 1
    return bytes(claim)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda sock: b"GET / HTTP/1.1\r\n" * 20, "it doesn't speak Shoal's protocol"),
        (
            lambda sock: claim_of(sock, STRANGE),
            "its proof is wrong: it doesn't know the run's token",
        ),
        (spoilt_version, f"it speaks version {VERSION + 1}, and this is version {VERSION}"),
        (lambda sock: claim_of(sock, ends=(7, 0, 0)), "worker 7 isn't expected here"),
        (
            lambda sock: claim_of(sock, ends=(1, 3, 0)),
            "worker 1 wants worker 3, but this is worker 0",
        ),
        (
            lambda sock: claim_of(sock, Credentials(KNOWN.token, b"o" * 32)),
            "another plan's channels",
        ),
        (
            lambda sock: claim_of(sock, KNOWN._replace(signed=True)),
            "another plan's channels",
        ),
    ],
    ids=["noise", "wrong token", "wrong version", "unexpected", "misled", "other plan", "signed"],
)
def test_a_stranger_is_refused_and_logged(monkeypatch, says, why):
    with listening(monkeypatch) as (mine, address, said):
        with socket.create_connection(address) as sock:
            sock.sendall(says(sock))
            assert ended(sock)
        until(lambda: said)
        assert why in said[0]
        assert mine.links == {}


def test_an_answer_is_of_no_use_on_another_connection(monkeypatch):
    with listening(monkeypatch) as (_, address, said):
        with socket.create_connection(address) as first, socket.create_connection(address) as again:
            overheard = claim_of(first)
            again.sendall(overheard)
            assert ended(again)
        until(lambda: any("doesn't know the run's token" in line for line in said))


def test_a_silent_or_slow_peer_is_refused_in_time(monkeypatch):
    with listening(monkeypatch, 0.3) as (_, address, said):
        silent, slow = (socket.create_connection(address) for _ in range(2))
        claim = claim_of(slow)
        try:
            for byte in claim:
                slow.sendall(bytes([byte]))
                threading.Event().wait(0.02)
        except OSError:
            pass
        assert ended(silent)
        assert ended(slow)
        until(lambda: len(said) >= 2)
        assert "no answer in time" in said[0]


def test_many_silent_peers_delay_no_worker(monkeypatch):
    sockets, threads = [], threading.active_count()
    # Their time is never over: a worker gets in because the oldest of them make room.
    with listening(monkeypatch, 10 * HANG) as (mine, address, said):
        sockets += [socket.create_connection(address) for _ in range(PENDING)]
        until(lambda: len(mine._pending) == PENDING_OF_ONE + 1)
        until(
            lambda: any(
                "too many connections from there wait to authenticate" in line for line in said
            )
        )
        assert threading.active_count() <= threads + 2
    for sock in sockets:
        sock.close()


def test_silent_peers_from_many_addresses_delay_no_worker(monkeypatch):
    sockets = []
    with listening(monkeypatch, 10 * HANG) as (mine, address, _):
        for n in range(PENDING + 20):  # all of 127.0.0.0/8 is this machine
            source = f"127.0.0.{2 + n // 4}", 0
            sockets.append(socket.create_connection(address, source_address=source))
        until(lambda: len(mine._pending) == PENDING + 1)
    for sock in sockets:
        sock.close()


def test_logging_of_refusals_is_rate_limited():
    said = []
    mine = Connections(0, ("a",), KNOWN, say=said.append)
    for _ in range(10_000):
        mine._note("a stranger")
    assert len(said) < 40


def test_a_worker_does_not_believe_a_listener_without_the_token(monkeypatch):
    monkeypatch.setattr(links, "START_TIMEOUT_S", 0.5)
    listener = listen()
    address = listener.getsockname()
    false = Connections(0, ("env[0]", "learner[0]"), STRANGE, say=lambda line: None)
    threading.Thread(target=joins_alone, args=(false, listener), daemon=True).start()
    with pytest.raises(RunError, match=r"worker env\[0\] can't be reached at 127.0.0.1"):
        connect(address)
    false.close()


def joins_alone(mine, listener):
    """Wait for a worker that isn't let in."""
    with suppress(RunError):
        mine.join(listener, [1], [listener.getsockname()] * 2)


def test_listening_is_on_loopback_by_default():
    with listen() as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


class FrameHandler:
    """Ignores all frames."""

    def buffers(self, frame):
        return [bytearray(frame.length)]

    def arrived(self, frame):
        pass

    def gone(self, other):
        raise AssertionError

    replaced = gone


@pytest.mark.parametrize(
    ("sends", "why"),
    [
        (b"x" * HEAD.size, "what came is no frame"),
        (Frame(DATA, 0, 0, 0, 0, 2**40).pack(), "a body of 1099511627776 bytes"),
        (Frame(TAKEN, 9, 9, 9).pack(), "which no worker sends here"),
        (Frame(DATA, 0, 0, 0, 0, 8).pack() + b"half", "the other side closed it"),
    ],
    ids=["noise", "too long", "unexpected", "half"],
)
def test_a_malformed_frame_ends_the_connection_with_its_cause(monkeypatch, sends, why):
    monkeypatch.setattr(connection, "ERROR_GRACE_S", 0.0)
    listener, woken = listen(), threading.Event()
    mine = Connections(0, ("env[0]", "learner[0]"), KNOWN, say=lambda line: None)
    args = listener, [1], [listener.getsockname()] * 2
    waiting = threading.Thread(target=mine.join, args=args)
    waiting.start()
    theirs = connect(listener.getsockname())
    waiting.join(HANG)
    mine.read({1: Incoming({(DATA, 0, 0): 8})}, FrameHandler(), woken.set)
    sock = theirs.links[0].sock
    sock.sendall(sends)
    sock.shutdown(socket.SHUT_WR)
    assert woken.wait(HANG)
    with pytest.raises(RunError, match=r"the connection to worker learner\[0\] is lost") as caught:
        mine.check()
    assert why in str(caught.value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.binary(max_size=CLAIM.size + 4))
def test_nothing_but_a_proof_is_let_in(data):
    with pytest.raises(ProtocolError):
        wire.check_claim(KNOWN, 0, b"n" * NONCE, data)


def test_a_token_is_never_printed():
    assert KNOWN.token.decode() not in repr(KNOWN)


class Listed(FrameHandler):
    """Records lost peers, and sends nothing to their replacements."""

    def __init__(self):
        self.lost = []

    def gone(self, other):
        self.lost.append(other)

    def replaced(self, other, let_in):
        let_in(b"")
        return Incoming({})


def replace_worker(address, known, me, incarnation):
    """A worker that replaces another; the rest of its restart group has yet to connect."""
    group = Membership((frozenset({1, 2}),), incarnation=incarnation)
    theirs = Connections(me, ("learner[0]", "env[0]", "inference[0]"), known, membership=group)
    theirs.join(None, [0], [address] * 3)
    return theirs


@pytest.mark.parametrize("signed", [False, True])
def test_a_replacement_disconnects_the_group_that_it_replaces(monkeypatch, signed):
    known = KNOWN._replace(signed=signed)
    said, listener = [], listen()
    group = Membership((frozenset({1, 2}),))
    names = ("learner[0]", "env[0]", "inference[0]")
    mine = Connections(0, names, known, say=said.append, membership=group)
    address = listener.getsockname()
    waiting = threading.Thread(target=mine.join, args=(listener, [1, 2], [address] * 3))
    waiting.start()
    first = [connect(address, known, me=1), connect(address, known, me=2)]
    waiting.join(HANG)
    handler = Listed()
    mine.read({1: Incoming({}), 2: Incoming({})}, handler, lambda: None)
    again = [replace_worker(address, known, 2, incarnation=5)]
    until(lambda: 2 in handler.lost and mine.links[2].sock)
    assert sorted(handler.lost) == [1, 2], "both restart, though only one has connected"
    assert mine.links[1].sock is None
    again.append(replace_worker(address, known, 1, incarnation=5))
    until(lambda: mine.links[1].sock)
    assert sorted(handler.lost) == [1, 2], "a peer that has reconnected stays"
    monkeypatch.setattr(links, "START_TIMEOUT_S", 0.5)
    with pytest.raises(RunError, match="can't be reached"):
        replace_worker(address, known, 1, incarnation=4)
    assert "worker 1 was replaced by a newer one" in said[0]
    assert mine.links[1].sock
    for one in (*first, *again, mine):
        one.close()
