"""Who may connect: a worker of the run, and nobody else, who does no harm."""

import os
import socket
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.lines import HANG, until
from shoal.errors import RunError
from shoal.runtime.net import connections as links
from shoal.runtime.net import handshake as greeting
from shoal.runtime.net.connections import Connections
from shoal.runtime.net.framing import DATA, HEAD, TAKEN, VERSION, Frame, Terms
from shoal.runtime.net.handshake import CLAIM, HELLO, NONCE, TOKEN, Credentials, ProtocolError
from shoal.runtime.net.sockets import listen

KNOWN = Credentials(b"t" * TOKEN, greeting.digest("the channels"))
STRANGE = Credentials(b"x" * TOKEN, KNOWN.layout)


@contextmanager
def door(monkeypatch, seconds=HANG):
    """Worker 0, which waits for worker 1 to connect: its links, address and what it says."""
    monkeypatch.setattr(links, "GREETING", seconds)
    said, listener = [], listen()
    mine = Connections(0, ("env[0]", "learner[0]"), KNOWN, say=said.append)
    address = listener.getsockname()
    waiting = threading.Thread(target=mine.join, args=(listener, [1], [address] * 2), daemon=True)
    waiting.start()
    yield mine, address, said
    comes_in(address)
    waiting.join(HANG)
    assert set(mine.links) == {1}, "who belongs here was kept out"
    mine.close()


def comes_in(address, known=KNOWN, me=1):
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
    return greeting.claim(known, ends, hello, os.urandom(NONCE))


def spoilt_version(sock):
    claim = bytearray(claim_of(sock))
    claim[4] = VERSION + 1
    return bytes(claim)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda sock: b"GET / HTTP/1.1\r\n" * 20, "it doesn't speak as Shoal does"),
        (lambda sock: claim_of(sock, STRANGE), "a stranger: it doesn't know the run's token"),
        (spoilt_version, f"it speaks version {VERSION + 1}, and this is version {VERSION}"),
        (lambda sock: claim_of(sock, ends=(7, 0, 0)), "worker 7 isn't expected here"),
        (lambda sock: claim_of(sock, ends=(1, 3, 0)), "worker 1 looks for worker 3, and this is 0"),
        (
            lambda sock: claim_of(sock, Credentials(KNOWN.token, b"o" * 32)),
            "another plan's channels",
        ),
    ],
    ids=["noise", "wrong token", "wrong version", "unexpected", "misled", "other plan"],
)
def test_who_does_not_belong_is_refused_and_logged(monkeypatch, says, why):
    with door(monkeypatch) as (mine, address, said):
        with socket.create_connection(address) as sock:
            sock.sendall(says(sock))
            assert ended(sock)
        until(lambda: said)
        assert why in said[0]
        assert mine.links == {}


def test_an_answer_is_of_no_use_on_another_connection(monkeypatch):
    with door(monkeypatch) as (_, address, said):
        with socket.create_connection(address) as first, socket.create_connection(address) as again:
            overheard = claim_of(first)
            again.sendall(overheard)
            assert ended(again)
        until(lambda: any("doesn't know the run's token" in line for line in said))


def test_who_says_nothing_or_very_slowly_is_turned_away_in_time(monkeypatch):
    with door(monkeypatch, 0.3) as (_, address, said):
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


def test_many_who_say_nothing_keep_nobody_out(monkeypatch):
    crowd, threads = [], threading.active_count()
    with door(monkeypatch, 1.0) as (_, address, said):
        crowd += [socket.create_connection(address) for _ in range(links.PENDING + 10)]
        until(lambda: any("are being asked who they are" in line for line in said))
        assert threading.active_count() <= threads + links.PENDING + 2
    for sock in crowd:
        sock.close()


def test_of_very_many_refusals_only_some_are_logged():
    said = []
    mine = Connections(0, ("a",), KNOWN, say=said.append)
    for _ in range(10_000):
        mine._note("a stranger")
    assert len(said) < 40


def test_a_worker_does_not_believe_a_listener_without_the_token(monkeypatch):
    monkeypatch.setattr(links, "PATIENCE", 0.5)
    listener = listen()
    false = Connections(0, ("env[0]", "learner[0]"), STRANGE, say=lambda line: None)
    threading.Thread(target=false._admit, args=(listener, {1}), daemon=True).start()
    with pytest.raises(RunError, match=r"worker env\[0\] can't be reached at 127.0.0.1"):
        comes_in(listener.getsockname())
    false._listener = listener
    false.close()


def test_listening_is_on_loopback_unless_told_otherwise():
    with listen() as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


class FrameHandler:
    """Hears nothing."""

    def room(self, frame):
        return [bytearray(frame.length)]

    def arrived(self, frame):
        pass

    def gone(self, other):
        raise AssertionError

    again = gone


@pytest.mark.parametrize(
    ("sends", "why"),
    [
        (b"x" * HEAD.size, "what came is no frame"),
        (Frame(DATA, 0, 0, 0, 0, 2**40).packed(), "a body of 1099511627776 bytes"),
        (Frame(TAKEN, 9, 9, 9).packed(), "which nobody sends here"),
        (Frame(DATA, 0, 0, 0, 0, 8).packed() + b"half", "it ended without a word"),
    ],
    ids=["noise", "too long", "unexpected", "half"],
)
def test_a_malformed_frame_ends_the_connection_with_its_cause(monkeypatch, sends, why):
    monkeypatch.setattr(links, "GRACE", 0.0)
    monkeypatch.setattr(links, "REJOIN", 0.0)
    listener, woken = listen(), threading.Event()
    mine = Connections(0, ("env[0]", "learner[0]"), KNOWN, say=lambda line: None)
    args = listener, [1], [listener.getsockname()] * 2
    waiting = threading.Thread(target=mine.join, args=args)
    waiting.start()
    theirs = comes_in(listener.getsockname())
    waiting.join(HANG)
    mine.read({1: Terms.of({(DATA, 0, 0): (8, 8)})}, FrameHandler(), woken.set)
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
        greeting.welcome(KNOWN, 0, b"n" * NONCE, data)


def test_a_token_is_never_printed():
    assert KNOWN.token.decode() not in repr(KNOWN)


class Listed(FrameHandler):
    """Notes who is gone, and tells who comes in the place of one nothing."""

    def __init__(self):
        self.lost = []

    def gone(self, other):
        self.lost.append(other)

    def again(self, other, let_in):
        let_in(b"")
        return {}


def takes_place(address, me, life):
    """A worker that takes the place of another; those of its party are yet to come."""
    theirs = Connections(me, ("learner[0]", "env[0]", "inference[0]"), KNOWN)
    theirs.parties, theirs.life = (frozenset({1, 2}),), life
    theirs.join(None, [0], [address] * 3)
    return theirs


def test_who_takes_a_place_sends_away_those_who_were_there_before_and_they_stay_away(monkeypatch):
    said, listener = [], listen()
    mine = Connections(0, ("learner[0]", "env[0]", "inference[0]"), KNOWN, say=said.append)
    mine.parties, mine.told_by = (frozenset({1, 2}),), {1: 0, 2: 0}
    address = listener.getsockname()
    waiting = threading.Thread(target=mine.join, args=(listener, [1, 2], [address] * 3))
    waiting.start()
    first = [comes_in(address, me=1), comes_in(address, me=2)]
    waiting.join(HANG)
    ears = Listed()
    mine.read({1: Terms.of({}), 2: Terms.of({})}, ears, lambda: None)
    again = [takes_place(address, 2, life=5)]
    until(lambda: 2 in ears.lost and not mine.links[2].away)
    assert sorted(ears.lost) == [1, 2], "both begin anew, though only one has come"
    assert mine.links[1].away
    again.append(takes_place(address, 1, life=5))
    until(lambda: not mine.links[1].away)
    assert sorted(ears.lost) == [1, 2], "who has come anew stays"
    monkeypatch.setattr(links, "PATIENCE", 0.5)
    with pytest.raises(RunError, match="can't be reached"):
        takes_place(address, 1, life=4)
    assert "another has taken the place of worker 1 since" in said[0]
    assert not mine.links[1].away
    for one in (*first, *again, mine):
        one.close()
