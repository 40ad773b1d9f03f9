"""The protocol between workers of different hosts: how a connection is proved, and its frames.

Both sides prove by a challenge that they know the run's token, which never travels itself. After
that a connection carries frames: a head of fixed size, a body whose length the channel's spec
bounds, and where the run asks for it a code (MAC) that needs the token to make. A frame
that isn't exactly what is due is refused and ends the connection. Nothing here touches a socket.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from struct import Struct
from typing import Any, NamedTuple

MAGIC, VERSION = b"SHOL", 4
# magic, version, kind, channel, end, zero, number, stamp, length, sequence number, acknowledged
HEAD = Struct("<4sBBHHHQqQQQ")
# A message; how many were taken; how many were put; may I begin; you may; the sender has ended.
DATA, TAKEN, COUNT, ASK, GRANT, BYE = range(1, 7)
KINDS = {DATA: "data", TAKEN: "taken", COUNT: "count", ASK: "ask", GRANT: "grant", BYE: "bye"}
Key = tuple[int, int, int]  # kind, channel, end

NONCE, TOKEN, TAG = 32, 32, 16  # bytes
HELLO = Struct("<4sB3x32s")  # magic, version, nonce
# magic, version, kind, worker, peer, incarnation, layout, frames received, nonce, proof
CLAIM = Struct("<4sBBHHI32sQ32s32s")
CLAIMS = (b"first", b"replace", b"resume")
FIRST, REPLACE, RESUME = range(3)
WELCOME = Struct("<Q32s")  # frames received, proof


class ProtocolError(Exception):
    """Why the other side of a connection is refused."""


class Credentials(NamedTuple):
    """What both sides of a connection must agree on: the run's token, and its channels."""

    token: bytes
    layout: bytes  # a digest of all channels' specs
    signed: bool = False  # whether every frame carries a MAC

    def __repr__(self) -> str:
        return "Credentials(...)"  # no token in a log


class Claim(NamedTuple):
    """What a worker that connects claims to be."""

    worker: int
    peer: int  # the worker that it wants to reach
    incarnation: int  # how many times its place had been taken before
    kind: int = FIRST
    received: int = 0  # the sequence number of the last frame that it has


def digest(text: str) -> bytes:
    """The digest by which the specs of channels are compared."""
    return hashlib.sha256(text.encode()).digest()


def hello(nonce: bytes) -> bytes:
    """The first bytes of a listener."""
    return HELLO.pack(MAGIC, VERSION, nonce)


def pack_claim(known: Credentials, claim: Claim, greeting: bytes, nonce: bytes) -> bytes:
    """The answer of a worker that connects to the listener's hello."""
    (theirs,) = _unpack(greeting, HELLO)
    proof = _proof(known, CLAIMS[claim.kind], claim, theirs + nonce)
    worker, peer, incarnation, kind, received = claim
    layout = _layout(known)
    return CLAIM.pack(
        MAGIC, VERSION, kind, worker, peer, incarnation, layout, received, nonce, proof
    )


def check_claim(known: Credentials, me: int, nonce: bytes, data: bytes) -> tuple[Claim, bytes]:
    """A claim that is proved, and both nonces; `nonce` is that of the listener's hello."""
    kind, worker, peer, incarnation, layout, received, theirs, proof = _unpack(data, CLAIM)
    claim = Claim(worker, peer, incarnation, kind, received)
    what = CLAIMS[kind] if kind < len(CLAIMS) else b""
    right = _proof(known, what, claim, nonce + theirs)
    if not (what and hmac.compare_digest(proof, right)):
        raise ProtocolError("its proof is wrong: it doesn't know the run's token")
    if peer != me:
        raise ProtocolError(f"worker {worker} looks for worker {peer}, and this is {me}")
    if layout != _layout(known):
        raise ProtocolError(f"worker {worker} has another plan's channels")
    return claim, nonce + theirs


def pack_welcome(known: Credentials, claim: Claim, received: int, nonces: bytes) -> bytes:
    """The listener's answer that lets a worker in; `received` is the last frame that it has."""
    answer = claim._replace(received=received)
    return WELCOME.pack(received, _proof(known, b"welcome", answer, nonces))


def check_welcome(known: Credentials, claim: Claim, nonces: bytes, data: bytes) -> int:
    """The last frame that the listener has; raises unless it knows the token too."""
    received, proof = WELCOME.unpack(data)
    right = _proof(known, b"welcome", claim._replace(received=received), nonces)
    if not hmac.compare_digest(proof, right):
        raise ProtocolError("the listener there doesn't know the run's token")
    return received


def nonce_of(greeting: bytes) -> bytes:
    """The nonce of a listener's hello."""
    return _unpack(greeting, HELLO)[0]


def _layout(known: Credentials) -> bytes:
    return known.layout if not known.signed else digest(known.layout.hex() + " signed")


def _proof(known: Credentials, what: bytes, claim: Claim, nonces: bytes) -> bytes:
    text = b"%s %d,%d,%d,%d,%d;" % (what, *claim)
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
    """The MACs of one connection: a key for each direction, which no other connection has."""

    def __init__(self, known: Credentials, nonces: bytes, *, connects: bool) -> None:
        names = (b"from the caller", b"from the listener")
        send, receive = (hmac.digest(known.token, name + nonces, "sha256") for name in names)
        self._send, self._receive = (send, receive) if connects else (receive, send)

    def tag(self, head: bytes, views: Iterable[Any]) -> bytes:
        """The MAC of a frame that is sent."""
        return _tag(self._send, head, views)

    def check(self, head: bytes, views: Iterable[Any], tag: bytes) -> None:
        """Raise unless a frame that came is what the other side sent."""
        if not hmac.compare_digest(_tag(self._receive, head, views), tag):
            raise ProtocolError("a frame whose MAC is wrong: it was altered on the way")


def _tag(key: bytes, head: bytes, views: Iterable[Any]) -> bytes:
    code = hmac.new(key, head, "sha256")
    for view in views:
        code.update(view)
    return code.digest()[:TAG]


class Frame(NamedTuple):
    """A frame's head: its kind, channel and end, and its number among those of one key."""

    kind: int
    channel: int
    end: int
    number: int
    stamp: int = 0
    length: int = 0

    def pack(self, sequence: int = 0, acknowledged: int = 0) -> bytes:
        """The head as it is sent."""
        kind, channel, end, number, stamp, length = self
        return HEAD.pack(
            MAGIC, VERSION, kind, channel, end, 0, number, stamp, length, sequence, acknowledged
        )


class Incoming:
    """What may come on a connection: of each kind, channel and end, which number and length.

    Of some only the newest counts: numbers may be left out there, but never come twice.
    """

    def __init__(
        self,
        bodies: Mapping[Key, tuple[int, int]],
        newest: Iterable[Key] = (),
        due: Mapping[Key, int] | None = None,
    ) -> None:
        self._bodies = {**bodies, (BYE, 0, 0): (0, 0)}
        self._newest = {key for key in bodies if key[0] in (TAKEN, COUNT)} | set(newest)
        self._due = dict.fromkeys(self._bodies, 0) | dict(due or {})
        self.received = 0  # the sequence number of the last frame that came whole
        self.acknowledged = 0  # that of the last one that the other side has

    def begin(self, head: bytes) -> tuple[Frame, int]:
        """The frame that a head announces, and its sequence number; raises if it isn't due."""
        magic, version, kind, channel, end, zero, number, stamp, length, sequence, acknowledged = (
            HEAD.unpack(head)
        )
        if magic != MAGIC or zero:
            raise ProtocolError("what came is no frame")
        if version != VERSION:
            raise ProtocolError(f"a frame of version {version}, and this is version {VERSION}")
        frame = Frame(kind, channel, end, number, stamp, length)
        key = kind, channel, end
        due, (least, most) = self._due.get(key, -1), self._bodies.get(key, (0, 0))
        is_due = number == due or (number > due >= 0 and key in self._newest)
        if not (is_due and least <= length <= most and sequence > self.received):
            raise ProtocolError(self._why(frame, sequence))
        if acknowledged > self.acknowledged:
            self.acknowledged = acknowledged
        return frame, sequence

    def _why(self, frame: Frame, sequence: int) -> str:
        """Why a frame is refused."""
        kind, channel, end, number, _, length = frame
        key = kind, channel, end
        name = f"{KINDS.get(kind, f'kind {kind}')} {number} of end {end} on channel {channel}"
        if key not in self._bodies:
            return f"{name}, which nobody sends here"
        due, (least, most) = self._due[key], self._bodies[key]
        if number < due or (number > due and key not in self._newest):
            return f"{name}, and {due} is due"
        if not least <= length <= most:
            return f"{name} with a body of {length} bytes, which has {least} to {most}"
        return f"{name} as frame {sequence}, after frame {self.received}"

    def complete(self, frame: Frame, sequence: int) -> None:
        """A frame has come whole."""
        self._due[frame[:3]] = frame.number + 1
        self.received = sequence
