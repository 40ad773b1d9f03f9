"""When a replica may go on: pure decisions that all backends share.

A replica runs until it reaches a move (a take or a put) and asks for it. Whether the move may
happen depends on the channel's gate and counts alone, so that whoever sees the counts, a thread or
a process, decides alike. Backends carry this out; they decide nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.planning.channel_specs import Gate
from shoal.planning.plan import Replica
from shoal.planning.policy import Latest, Queue, takes_some

Turn = tuple[int, int]  # an asynchronous replica's end, and which of its turns
NEVER = 2**62  # the version of what depends on nothing that can be late
AHEAD = 3  # messages of news that an end may be ahead of others which the same reader reads


class Words(Protocol):
    """Counts by number: a list, or a view of memory that processes share."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def __len__(self) -> int: ...


@dataclass(slots=True)
class Ledger:
    """What asynchronous replicas have begun, from which version, and how much of it was used."""

    begun: Words
    used: Words
    settled: Words  # used before the newest version was made
    versions: Words  # of each end's newest `depth` turns, in a ring
    depth: int

    def begin(self, end: int, version: int) -> None:
        """Note a turn that an end begins from `version`."""
        self.versions[end * self.depth + self.begun[end] % self.depth] = version
        self.begun[end] += 1

    def settle(self) -> None:
        """A new version is there: turns used so far made room for turns begun from it."""
        for end in range(len(self.used)):
            self.settled[end] = self.used[end]

    def amend(self, end: int, version: int) -> None:
        """The turn begun last is made from a newer version."""
        self.versions[end * self.depth + (self.begun[end] - 1) % self.depth] = version

    def in_flight(self) -> Iterator[tuple[Turn, int]]:
        """Turns that are begun and not used, with their versions."""
        for end in range(len(self.used)):
            for number in range(self.used[end], self.begun[end]):
                yield (end, number), self.version(end, number)

    def version(self, end: int, number: int) -> int:
        """The version that a turn in flight is made from."""
        return self.versions[end * self.depth + number % self.depth]


@dataclass(slots=True)
class Counts:
    """What has moved through a channel so far; may lie in memory shared by processes."""

    puts: Words  # by writer's end
    takes: Words  # let go, by reader's end; where some are taken, by writer's end
    ledger: Ledger | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """What has to arrive before it is worth choosing again: one of these, or so many of any."""

    among: frozenset[Turn] = frozenset()
    count: int = 1


class Cursor:
    """Where a check of many counts got to: counts only grow, so what has passed isn't read again.

    Between two messages every count is read once, and one more at each check: a message costs as
    many reads with a thousand sources as with one.
    """

    __slots__ = ("_index", "_least")

    def __init__(self) -> None:
        self._least, self._index = -1, 0

    def passes(self, counts: Words, ends: Sequence[int], least: int) -> bool:
        """Whether the counts of all these ends are at least `least`."""
        index = self._index if least == self._least else 0
        while index < len(ends) and counts[ends[index]] >= least:
            index += 1
        self._least, self._index = least, index
        return index == len(ends)


def may_put(gate: Gate, counts: Counts, end: int, cursor: Cursor | None = None) -> bool:
    """Whether a writer's end has room for its next message."""
    cursor = cursor or Cursor()
    if isinstance(gate.flow, Latest):
        # A reader sees one version of all its sources, so none may write over what others lack.
        return cursor.passes(counts.puts, gate.beside.get(end, ()), counts.puts[end] - AHEAD + 1)
    room = counts.puts[end] - gate.capacity + 1
    if takes_some(gate.flow):
        return counts.takes[end] >= room
    return cursor.passes(counts.takes, gate.readers.get(end, ()), room)


def may_take(
    gate: Gate, counts: Counts, end: int, taken: int, tick: int, cursor: Cursor | None = None
) -> bool:
    """Whether a reader's end, which has taken `taken` messages, may take its next at `tick`."""
    flow = gate.flow
    needed = taken
    if isinstance(flow, Latest):
        needed = 0 if flow.max_lag is None else max(0, tick - flow.max_lag)
        if gate.only_newer:
            needed = counts.takes[end]
        elif gate.admits:
            assert counts.ledger is not None
            if counts.ledger.begun[end] - counts.ledger.settled[end] >= gate.admits:
                return False
            needed = 0
    return (cursor or Cursor()).passes(counts.puts, gate.sources[end], needed + 1)


def choose(
    gate: Gate, ledger: Ledger, tick: int, arrived: Collection[Turn]
) -> list[Turn] | Missing:
    """The turns that a reader which takes the first to come uses at `tick`, or what it waits for.

    `arrived` has the turns that have come and weren't used yet, the first to come first. Turns
    that could not be used within their bound if they waited go first, so the reader waits for
    them if it must.
    """
    assert isinstance(gate.flow, Queue)
    assert isinstance(gate.flow.take, int)
    take = gate.flow.take
    if len(arrived) < take:
        return Missing(count=take - len(arrived))
    chosen: dict[Turn, None] = {}
    if gate.bound is not None:
        due = sorted((version + gate.bound, turn) for turn, version in ledger.in_flight())
        urgent: list[Turn] = []
        for i, (deadline, turn) in enumerate(due):
            urgent.append(turn)
            if i + 1 < len(due) and due[i + 1][0] == deadline:
                continue
            needed = len(urgent) - take * max(0, deadline - tick) - len(chosen)
            if needed > 0:
                among = set(urgent) - chosen.keys()
                first = [found for found in arrived if found in among]
                if needed > len(first):
                    return Missing(frozenset(among.difference(arrived)))
                chosen |= dict.fromkeys(first[:needed])
    for turn in arrived:
        if len(chosen) >= take:
            break
        chosen[turn] = None
    return sorted(chosen) if len(chosen) == take else Missing()


def waits(wants: Iterable[tuple[Replica, Gate, bool]]) -> Iterator[str]:
    """Which end waits for which fragment, a line each."""
    for (fragment, end), gate, takes in wants:
        other = gate.writer if takes else gate.reader
        yield f"{fragment}[{end}] waits for {other} on {gate.name}"
