"""The protocol between workers on different hosts: its handshake and its frames, without sockets.

Both sides prove with a challenge-response that they know the run's token, which is never sent.
After that a connection carries frames: a header of fixed size, a body whose length follows from
the channel's spec, and optionally a message authentication code (MAC) keyed by the token. An
unexpected frame is refused and ends the connection.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from itertools import count
from struct import Struct
from typing import Any, NamedTuple

MAGIC, VERSION = b"SHOL", 5
HEAD = Struct("<4sBBHHHQqQ")  # magic, version, kind, channel, end, zero, number, stamp, length
# A message; messages taken; messages put; request to begin; grant; the sender has closed.
DATA, TAKEN, COUNT, ASK, GRANT, BYE = range(1, 7)
KINDS = {DATA: "data", TAKEN: "taken", COUNT: "count", ASK: "ask", GRANT: "grant", BYE: "bye"}
Key = tuple[int, int, int]  # kind, channel, end

NONCE, TOKEN, TAG = 32, 32, 16  # bytes
HELLO = Struct("<4sB3x32s")  # magic, version, nonce
CLAIM = Struct(
    "<4sB3xHHI32s32s32s"
)  # magic, version, worker, peer, incarnation, layout, nonce, proof
WELCOME = Struct("<I32s")  # bytes of the handover that follows, proof
MOST_HANDOVER = 1 << 24  # bytes


class ProtocolError(Exception):
    """The other side of a connection violates the protocol, and is refused."""


class Credentials(NamedTuple):
    """What both sides of a connection must share: the run's token and its channels' layout."""

    token: bytes
    layout: bytes  # a digest of the specs of all channels
    signed: bool = False  # whether every frame carries a MAC

    def __repr__(self) -> str:
        return "Credentials(...)"  # keeps the token out of logs


class Claim(NamedTuple):
    """The claim of a connecting worker."""

    worker: int
    peer: int  # the worker that it connects to
    incarnation: int  # the number of times it was replaced


def digest(text: str) -> bytes:
    """The SHA-256 digest of a text."""
    return hashlib.sha256(text.encode()).digest()


def hello(nonce: bytes) -> bytes:
    """The first message of a listener: its nonce."""
    return HELLO.pack(MAGIC, VERSION, nonce)


def pack_claim(known: Credentials, claim: Claim, hello: bytes, nonce: bytes) -> bytes:
    """The reply of a connecting worker to the listener's hello."""
    proof = _proof(known, b"claim", claim, nonce_of(hello) + nonce)
    return CLAIM.pack(MAGIC, VERSION, *claim, _layout(known), nonce, proof)


def check_claim(known: Credentials, me: int, nonce: bytes, data: bytes) -> tuple[Claim, bytes]:
    """Check a claim's proof; returns the claim and both nonces. `nonce` is the listener's."""
    worker, peer, incarnation, layout, theirs, proof = _unpack(data, CLAIM)
    claim = Claim(worker, peer, incarnation)
    if not hmac.compare_digest(proof, _proof(known, b"claim", claim, nonce + theirs)):
        raise ProtocolError("its proof is wrong: it doesn't know the run's token")
    if peer != me:
        raise ProtocolError(f"worker {worker} wants worker {peer}, but this is worker {me}")
    if layout != _layout(known):
        raise ProtocolError(f"worker {worker} has another plan's channels")
    return claim, nonce + theirs


def pack_welcome(known: Credentials, claim: Claim, nonces: bytes, handover: bytes = b"") -> bytes:
    """The listener's reply that accepts a worker, with the counts of the worker it replaces."""
    proof = _proof(known, b"welcome", claim, nonces + handover)
    return WELCOME.pack(len(handover), proof) + handover


def handover_size(welcome: bytes) -> int:
    """The size of the handover that follows a welcome."""
    size, _ = WELCOME.unpack(welcome)
    if size > MOST_HANDOVER:
        raise ProtocolError(f"a handover of {size} bytes")
    return size


def check_welcome(
    known: Credentials, claim: Claim, nonces: bytes, welcome: bytes, handover: bytes
) -> None:
    """Check the listener's proof."""
    _, proof = WELCOME.unpack(welcome)
    if not hmac.compare_digest(proof, _proof(known, b"welcome", claim, nonces + handover)):
        raise ProtocolError("the listener there doesn't know the run's token")


def nonce_of(hello: bytes) -> bytes:
    """The nonce of a listener's hello."""
    return _unpack(hello, HELLO)[0]


def _layout(known: Credentials) -> bytes:
    return known.layout if not known.signed else digest(known.layout.hex() + " signed")


def _proof(known: Credentials, what: bytes, claim: Claim, nonces: bytes) -> bytes:
    text = b"%s %d,%d,%d;" % (what, *claim)
    return hmac.digest(known.token, text + nonces, "sha256")


def _unpack(data: bytes, form: Struct) -> tuple[Any, ...]:
    if len(data) != form.size:
        raise ProtocolError(f"it sent {len(data)} bytes where {form.size} were due")
    magic, version, *found = form.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("it doesn't speak Shoal's protocol")
    if version != VERSION:
        raise ProtocolError(f"it speaks version {version}, and this is version {VERSION}")
    return tuple(found)


class Signing:
    """The MACs of one connection, with a key of its own for each direction.

    A MAC covers the number of its frame, so that frames can't be repeated, dropped or reordered.
    """

    def __init__(self, known: Credentials, nonces: bytes, *, connects: bool) -> None:
        names = (b"from the caller", b"from the listener")
        send, receive = (hmac.digest(known.token, name + nonces, "sha256") for name in names)
        self._send, self._receive = (send, receive) if connects else (receive, send)
        self._sent, self._received = count(), count()

    def tag(self, head: bytes, views: Iterable[Any]) -> bytes:
        """The MAC of the next outgoing frame."""
        return _tag(self._send, next(self._sent), head, views)

    def check(self, head: bytes, views: Iterable[Any], tag: bytes) -> None:
        """Raise unless the next incoming frame has the right MAC."""
        if not hmac.compare_digest(_tag(self._receive, next(self._received), head, views), tag):
            raise ProtocolError("a frame whose MAC is wrong: it was altered on the way")


def _tag(key: bytes, number: int, head: bytes, views: Iterable[Any]) -> bytes:
    code = hmac.new(key, b"%d " % number + head, "sha256")
    for view in views:
        code.update(view)
    return code.digest()[:TAG]


class Frame(NamedTuple):
    """A frame's header: its kind, channel and endpoint, and its number among frames of this key."""

    kind: int
    channel: int
    end: int
    number: int
    stamp: int = 0
    length: int = 0

    def pack(self) -> bytes:
        """The header as bytes."""
        kind, channel, end, number, stamp, length = self
        return HEAD.pack(MAGIC, VERSION, kind, channel, end, 0, number, stamp, length)


class Incoming:
    """The frames that are valid on a connection: by kind, channel and endpoint, number and length.

    For some keys only the newest frame counts: numbers may be skipped there, but never repeated.
    """

    def __init__(
        self,
        bodies: Mapping[Key, int],
        newest: Iterable[Key] = (),
        due: Mapping[Key, int] | None = None,
    ) -> None:
        self._bodies = {**bodies, (BYE, 0, 0): 0}
        self._newest = {key for key in bodies if key[0] in (TAKEN, COUNT)} | set(newest)
        self._due = dict.fromkeys(self._bodies, 0) | dict(due or {})

    def begin(self, head: bytes) -> Frame:
        """Parse a header; returns the frame, or raises if it is invalid."""
        magic, version, kind, channel, end, zero, number, stamp, length = HEAD.unpack(head)
        if magic != MAGIC or zero:
            raise ProtocolError("what came is no frame")
        if version != VERSION:
            raise ProtocolError(f"a frame of version {version}, and this is version {VERSION}")
        frame, key = Frame(kind, channel, end, number, stamp, length), (kind, channel, end)
        due = self._due.get(key, -1)
        is_due = number == due or (number > due >= 0 and key in self._newest)
        if not is_due or length != self._bodies[key]:
            raise ProtocolError(self._why(frame))
        return frame

    def _why(self, frame: Frame) -> str:
        """The reason why a frame is refused."""
        kind, channel, end, number, _, length = frame
        key = kind, channel, end
        name = f"{KINDS.get(kind, f'kind {kind}')} {number} of end {end} on channel {channel}"
        if key not in self._bodies:
            return f"{name}, which no worker sends here"
        due = self._due[key]
        if number < due or (number > due and key not in self._newest):
            return f"{name}, and {due} is due"
        return f"{name} with a body of {length} bytes, which has {self._bodies[key]}"

    def complete(self, frame: Frame) -> None:
        """Count a frame that is complete."""
        self._due[frame[:3]] = frame.number + 1
