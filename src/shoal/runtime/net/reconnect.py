"""How a broken connection goes on as a new one: both sides say what has come, and what will.

Each tells how many of every kind of frame it has; the other sends what is missing, from where it
is kept. Of news only the newest is kept, so it also says which numbers won't come. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple, Protocol

from shoal.runtime.net.framing import BYE, MAGIC, VERSION, Frame, Key, Reading, on_skip
from shoal.runtime.net.handshake import ProtocolError

TABLE = Struct("<4sBxxxI")  # magic, version, how many entries
ENTRY = Struct("<BxHHxxQ")  # kind, channel, end, number
Table = Mapping[Key, int]


class Resent(NamedTuple):
    """A frame that is sent again, with its body."""

    frame: Frame
    body: Sequence[Any]


class Kept(Protocol):
    """What was sent of one kind, channel and end, as far as it may be wanted again."""

    @property
    def count(self) -> int:
        """How many were sent."""
        ...

    def since(self, number: int) -> list[Resent]:
        """All from this number on; of news only the newest."""
        ...


class Newest:
    """Of frames that need no body the newest, which says all that those before it did."""

    def __init__(self) -> None:
        self.frame: Frame | None = None

    @property
    def count(self) -> int:
        """How many were sent."""
        return self.frame.number + 1 if self.frame else 0

    def since(self, number: int) -> list[Resent]:
        """The newest, unless it has come."""
        return [Resent(self.frame, ())] if self.frame and self.frame.number >= number else []


def packed(table: Table) -> bytes:
    """A table as it is sent."""
    entries = [ENTRY.pack(*key, number) for key, number in sorted(table.items())]
    return TABLE.pack(MAGIC, VERSION, len(entries)) + b"".join(entries)


class Opening(NamedTuple):
    """A table of at most `most` entries that is being read; `left` are yet to come, -1: all."""

    most: int
    left: int = -1
    found: tuple[tuple[Key, int], ...] = ()

    @property
    def wants(self) -> int:
        """How many bytes come next that belong together; 0 if it is whole."""
        return TABLE.size if self.left < 0 else ENTRY.size if self.left else 0

    def on(self, data: bytes) -> Opening:
        """What it is after those bytes."""
        if self.left < 0:
            magic, version, count = TABLE.unpack(data)
            if magic != MAGIC or version != VERSION or count > self.most:
                raise ProtocolError("what came is no table of what it has")
            return self._replace(left=count)
        kind, channel, end, number = ENTRY.unpack(data)
        if any(key == (kind, channel, end) for key, _ in self.found):
            raise ProtocolError("a table with an entry twice")
        found = (*self.found, ((kind, channel, end), number))
        return self._replace(left=self.left - 1, found=found)


def opened(read: Callable[[int], bytes], most: int) -> dict[Key, int]:
    """A table of at most so many entries; `read` gives exactly as many bytes as it is asked for."""
    state = Opening(most)
    while state.wants:
        state = state.on(read(state.wants))
    return dict(state.found)


def check_due(sent: Mapping[Key, Kept], due: Table) -> Table:
    """What another says it has got, if that much was sent."""
    for key, number in due.items():
        if key[0] == BYE or (key in sent and number > sent[key].count):
            raise ProtocolError(f"it has got {number} of {key}, and so many were not sent")
    return due


def missing(sent: Mapping[Key, Kept], due: Table) -> tuple[list[Resent], dict[Key, int]]:
    """What another that has got `due` is to be sent again, and where numbers are left out."""
    again: list[Resent] = []
    skips: dict[Key, int] = {}
    for key, kept in sent.items():
        frames = kept.since(due.get(key, 0))
        if frames and frames[0].frame.number != due.get(key, 0):
            skips[key] = frames[0].frame.number
        again += frames
    return again, skips


def skipped(state: Reading, skips: Table) -> Reading:
    """What is due after a new connection was made."""
    for key, number in skips.items():
        state = on_skip(state, key, number)
        if state.refused:
            raise ProtocolError(state.refused)
    return state
