"""Frames of a connection between hosts, read purely: what came, and whether it may be believed.

A frame is a head of fixed size and a body whose length the channel's spec knows, so a reader never
holds more than one head. Whatever isn't expected exactly so is refused, and ends the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from struct import Struct
from typing import NamedTuple

MAGIC, VERSION = b"SHOL", 1
HEAD = Struct("<4sBBHHHQqQ")  # magic, version, kind, channel, end, nothing, number, stamp, length
# A message; how many were taken; how many were put; may I begin; you have begun; I have ended.
DATA, TAKEN, COUNT, ASK, GRANT, BYE = range(1, 7)
KINDS = {DATA: "data", TAKEN: "taken", COUNT: "count", ASK: "ask", GRANT: "grant", BYE: "bye"}
Key = tuple[int, int, int]  # kind, channel, end


class Frame(NamedTuple):
    """A head: of what kind, on which channel, of which end, the how-manieth, and its body."""

    kind: int
    channel: int
    end: int
    number: int
    stamp: int = 0
    length: int = 0

    def packed(self) -> bytes:
        """The head as it is sent."""
        kind, channel, end, number, stamp, length = self
        return HEAD.pack(MAGIC, VERSION, kind, channel, end, 0, number, stamp, length)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a connection may carry: for each kind, channel and end, the least and most bytes."""

    bodies: Mapping[Key, tuple[int, int]]
    order: Mapping[Key, int]  # which count of a reading's is whose

    @staticmethod
    def of(bodies: Mapping[Key, tuple[int, int]]) -> Terms:
        """Terms that also let the other side end."""
        every = {**bodies, (BYE, 0, 0): (0, 0)}
        return Terms(every, {key: i for i, key in enumerate(every)})


@dataclass(frozen=True, slots=True)
class Reading:
    """Where a reader is: in a head, of which `head` has come, or in a frame with `left` to come."""

    terms: Terms
    numbers: tuple[int, ...]  # of each kind, channel and end, what comes next
    head: bytes = b""
    frame: Frame | None = None
    left: int = 0
    refused: str = ""

    @staticmethod
    def start(terms: Terms) -> Reading:
        """Nothing has come yet."""
        return Reading(terms, (0,) * len(terms.order))

    @property
    def wants(self) -> int:
        """How many bytes come next that belong together; 0 once it has refused."""
        if self.refused:
            return 0
        return self.left if self.frame else HEAD.size - len(self.head)


class Begun(NamedTuple):
    """A head has come, and may be believed."""

    frame: Frame


class Part(NamedTuple):
    """Bytes of a frame's body."""

    data: bytes


class Whole(NamedTuple):
    """A frame has come whole."""

    frame: Frame


class Refused(NamedTuple):
    """What came is not what was agreed; nothing more is read."""

    why: str


Event = Begun | Part | Whole | Refused


def on_bytes(state: Reading, data: bytes) -> tuple[Reading, list[Event]]:
    """What bytes that have come mean, however they were divided on the way."""
    events: list[Event] = []
    while data and not state.refused:
        some, data = data[: state.wants], data[state.wants :]
        if state.frame is None:
            state, found = on_head(state, some)
        else:
            events.append(Part(some))
            state, found = on_body(state, len(some))
        events += found
    return state, events


def on_head(state: Reading, data: bytes) -> tuple[Reading, list[Event]]:
    """Some bytes of a head, at most as many as it wants."""
    head = state.head + data
    if len(head) < HEAD.size:
        return replace(state, head=head), []
    frame, why = _read(state, head)
    if frame is None:
        return replace(state, head=b"", refused=why), [Refused(why)]
    at = state.terms.order[frame[:3]]
    numbers = (*state.numbers[:at], frame.number + 1, *state.numbers[at + 1 :])
    if frame.length == 0:
        return Reading(state.terms, numbers), [Begun(frame), Whole(frame)]
    return Reading(state.terms, numbers, b"", frame, frame.length), [Begun(frame)]


def on_body(state: Reading, count: int) -> tuple[Reading, list[Event]]:
    """So many bytes of a body have come, wherever they were put."""
    assert state.frame is not None
    assert 0 <= count <= state.left
    if count < state.left:
        return replace(state, left=state.left - count), []
    return Reading(state.terms, state.numbers), [Whole(state.frame)]


def _read(state: Reading, head: bytes) -> tuple[Frame | None, str]:
    """The frame that a head begins, or why it is refused."""
    magic, version, kind, channel, end, nothing, number, stamp, length = HEAD.unpack(head)
    if magic != MAGIC or nothing:
        return None, "what came is no frame"
    if version != VERSION:
        return None, f"a frame of version {version}, and this is version {VERSION}"
    key = kind, channel, end
    bounds = state.terms.bodies.get(key)
    if bounds is None:
        name = KINDS.get(kind, f"kind {kind}")
        return None, f"{name} of end {end} on channel {channel}, which nobody sends here"
    wanted = state.numbers[state.terms.order[key]]
    if number != wanted:
        return (
            None,
            f"{KINDS[kind]} {number} of end {end} on channel {channel}, and {wanted} is due",
        )
    least, most = bounds
    if not least <= length <= most:
        return None, f"a body of {length} bytes on channel {channel}, which has {least} to {most}"
    return Frame(kind, channel, end, number, stamp, length), ""
