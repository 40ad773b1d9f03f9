"""How a connection begins: both sides prove that they know the run's token, and say who they are.

Who listens sends a challenge, who connects answers it and sends another, and the answer to that
lets it in. The token itself never travels, and an answer is of no use on another connection.
"""

from __future__ import annotations

import hashlib
import hmac
from struct import Struct
from typing import NamedTuple

from shoal.runtime.net.framing import MAGIC, VERSION

NONCE = 32
TOKEN = 32  # bytes of a run's token
HELLO = Struct("<4sB3x32s")  # magic, version, nonce
CLAIM = Struct("<4sBBHHI32s32s32s")  # magic, version, kind, who, whom, life, layout, nonce, proof
CLAIMS = (b"claim", b"again", b"resume")  # what is claimed, by kind
FIRST, AGAIN, RESUME = range(3)
WELCOME = Struct("<32s")
Ends = tuple[int, int, int]  # who connects, whom it wants, and which holder of its place it is


class ProtocolError(Exception):
    """Why the other side of a connection is refused."""


class Credentials(NamedTuple):
    """What both sides of a connection must agree on: the run's token, and how messages lie."""

    token: bytes
    layout: bytes  # a digest of all channels' specs

    def __repr__(self) -> str:
        return "Pass(...)"  # no token in a log


def digest(text: str) -> bytes:
    """What channels' specs are compared by."""
    return hashlib.sha256(text.encode()).digest()


def hello(nonce: bytes) -> bytes:
    """What a listener says first."""
    return HELLO.pack(MAGIC, VERSION, nonce)


def claim(known: Credentials, ends: Ends, said: bytes, nonce: bytes, kind: int = 0) -> bytes:
    """The answer of who connects; `ends` are who it is, whom it wants, and its life.

    Of kind `AGAIN` it takes the place of one that was connected before, of kind `RESUME` it is
    that one, whose connection broke.
    """
    theirs = _opened(said, HELLO)[2]
    proof = _proof(known, CLAIMS[kind], ends, theirs + nonce)
    return CLAIM.pack(MAGIC, VERSION, kind, *ends, known.layout, nonce, proof)


class Peer(NamedTuple):
    """Who connects, what it claims, and the answer that lets it in."""

    who: int
    kind: int
    life: int  # which of those that have held its place it is
    answer: bytes


def welcome(known: Credentials, me: int, nonce: bytes, said: bytes) -> Peer:
    """Who connects, if it may; `nonce` is that of the listener's hello."""
    _, _, kind, who, whom, life, layout, theirs, proof = _opened(said, CLAIM)
    what = CLAIMS[kind] if kind < len(CLAIMS) else b""
    right = _proof(known, what, (who, whom, life), nonce + theirs)
    if not (what and hmac.compare_digest(proof, right)):
        raise ProtocolError("a stranger: it doesn't know the run's token")
    if whom != me:
        raise ProtocolError(f"worker {who} looks for worker {whom}, and this is {me}")
    if layout != known.layout:
        raise ProtocolError(f"worker {who} has another plan's channels")
    answer = WELCOME.pack(_proof(known, b"welcome", (who, whom, life), theirs + nonce))
    return Peer(who, kind, life, answer)


def check_welcome(known: Credentials, ends: Ends, nonces: bytes, said: bytes) -> None:
    """Raise unless the listener knows the token too; `nonces` are one's own and the listener's."""
    if not hmac.compare_digest(said, _proof(known, b"welcome", ends, nonces)):
        raise ProtocolError("who listens there doesn't know the run's token")


def nonce_of(said: bytes) -> bytes:
    """The nonce of a listener's hello."""
    return _opened(said, HELLO)[2]


def _proof(known: Credentials, what: bytes, ends: Ends, nonces: bytes) -> bytes:
    text = what + b"%d,%d,%d;" % ends + nonces
    return hmac.digest(known.token, text, "sha256")


def _opened(said: bytes, form: Struct) -> tuple:
    if len(said) != form.size:
        raise ProtocolError("it said too little")
    found = form.unpack(said)
    if found[0] != MAGIC:
        raise ProtocolError("it doesn't speak as Shoal does")
    if found[1] != VERSION:
        raise ProtocolError(f"it speaks version {found[1]}, and this is version {VERSION}")
    return found
