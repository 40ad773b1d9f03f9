"""Frames of a connection between hosts, read purely: what came, and whether it may be believed.

A frame is a head of fixed size and a body whose length the channel's spec knows, so a reader never
holds more than one head. Whatever isn't expected exactly so is refused, and ends the connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import NamedTuple

MAGIC, VERSION = b"SHOL", 3
HEAD = Struct("<4sBBHHHQqQ")  # magic, version, kind, channel, end, nothing, number, stamp, length
# A message; how many were taken; how many were put; may I begin; you have begun; I have ended.
DATA, TAKEN, COUNT, ASK, GRANT, BYE = range(1, 7)
KINDS = {DATA: "data", TAKEN: "taken", COUNT: "count", ASK: "ask", GRANT: "grant", BYE: "bye"}
Key = tuple[int, int, int]  # kind, channel, end
_NOBODY = (-1, 0, 0)


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


class Terms(NamedTuple):
    """What a connection may carry: for each kind, channel and end, how long a body may be."""

    known: Mapping[Key, tuple[int, int, int]]  # which count is its, the least and most bytes
    news: frozenset[Key] = frozenset()  # those of which only the newest counts

    @staticmethod
    def of(bodies: Mapping[Key, tuple[int, int]], news: Iterable[Key] = ()) -> Terms:
        """Terms with the least and most bytes of each; the other side may always end."""
        every = {**bodies, (BYE, 0, 0): (0, 0)}
        known = {key: (i, *bounds) for i, (key, bounds) in enumerate(every.items())}
        totals = [key for key in known if key[0] in (TAKEN, COUNT)]
        return Terms(known, frozenset([*totals, *news]))


class Reading(NamedTuple):
    """Where a reader is: in a head, of which `head` has come, or in a frame with `left` to come."""

    terms: Terms
    numbers: tuple[int, ...]  # of each kind, channel and end, what comes next
    head: bytes = b""
    frame: Frame | None = None
    left: int = 0
    refused: str = ""

    @staticmethod
    def start(terms: Terms, due: Mapping[Key, int] | None = None) -> Reading:
        """Nothing has come yet; `due` is what comes first where others came before."""
        due = due or {}
        return Reading(terms, tuple(due.get(key, 0) for key in terms.known))

    @property
    def wants(self) -> int:
        """How many bytes come next that belong together; 0 once it has refused."""
        if self.refused:
            return 0
        return self.left if self.frame else HEAD.size - len(self.head)

    @property
    def due(self) -> dict[Key, int]:
        """How many of each kind, channel and end have come whole, where any have."""
        if self.frame:
            return self.anew().due
        return {key: n for key, (at, *_) in self.terms.known.items() if (n := self.numbers[at])}

    def anew(self) -> Reading:
        """As it goes on over a new connection: of what has half come, nothing has."""
        if self.frame is None:
            return Reading(self.terms, self.numbers)
        at = self.terms.known[self.frame[:3]][0]
        return Reading(self.terms, _with(self.numbers, at, self.frame.number))


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
    head = state.head + data if state.head else data
    if len(head) < HEAD.size:
        return state._replace(head=head), []
    magic, version, kind, channel, end, nothing, number, stamp, length = HEAD.unpack(head)
    terms, numbers = state.terms, state.numbers
    at, least, most = terms.known.get((kind, channel, end), _NOBODY)
    agreed = magic == MAGIC and version == VERSION and not nothing
    if not (agreed and at >= 0 and number == numbers[at] and least <= length <= most):
        why = _why(state, head)
        return state._replace(head=b"", refused=why), [Refused(why)]
    frame = Frame(kind, channel, end, number, stamp, length)
    numbers = _with(numbers, at, number + 1)
    if length == 0:
        return Reading(terms, numbers), [Begun(frame), Whole(frame)]
    return Reading(terms, numbers, b"", frame, length), [Begun(frame)]


def on_body(state: Reading, count: int) -> tuple[Reading, list[Event]]:
    """So many bytes of a body have come, wherever they were put."""
    assert state.frame is not None
    assert 0 <= count <= state.left
    if count < state.left:
        return state._replace(left=state.left - count), []
    return Reading(state.terms, state.numbers), [Whole(state.frame)]


def on_skip(state: Reading, key: Key, number: int) -> Reading:
    """What comes next of news is of this number: those between are older and won't come."""
    at, *_ = state.terms.known.get(key, _NOBODY)
    if at < 0 or key not in state.terms.news or number < state.numbers[at]:
        kind, channel, end = key
        which = f"{KINDS.get(kind, f'kind {kind}')} of end {end} on channel {channel}"
        return state._replace(refused=f"{which} can't go on with {number}")
    return state._replace(numbers=_with(state.numbers, at, number))


def _with(numbers: tuple[int, ...], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


def _why(state: Reading, head: bytes) -> str:
    """Why a head is refused."""
    magic, version, kind, channel, end, nothing, number, _, length = HEAD.unpack(head)
    if magic != MAGIC or nothing:
        return "what came is no frame"
    if version != VERSION:
        return f"a frame of version {version}, and this is version {VERSION}"
    at, least, most = state.terms.known.get((kind, channel, end), _NOBODY)
    which = f"{KINDS.get(kind, f'kind {kind}')} {number} of end {end} on channel {channel}"
    if at < 0:
        return f"{which}, which nobody sends here"
    if number != state.numbers[at]:
        return f"{which}, and {state.numbers[at]} is due"
    return f"{which} with a body of {length} bytes, which has {least} to {most}"
