"""Flow control: pure functions that decide when a replica may continue, shared by all backends.

A replica runs until it reaches a move (a take or a put). Whether the move is allowed depends only
on the channel's gate and counts, so every thread or process that reads the counts decides alike.
Backends carry the decisions out and make none of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.planning.channel_specs import Gate
from shoal.planning.plan import Replica
from shoal.planning.policy import Latest, Queue, takes_some

Turn = tuple[int, int]  # the endpoint of an asynchronous replica, and the turn's index
NEVER = 2**62  # the version of a value that depends on nothing with a lag
AHEAD = 3  # latest values that an endpoint may be ahead of the reader's other sources


class Words(Protocol):
    """Counts by index: a list, or a view of shared memory."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def __len__(self) -> int: ...


@dataclass(slots=True)
class Ledger:
    """The turns of asynchronous replicas: begun, used, and the versions they began from."""

    begun: Words
    used: Words
    settled: Words  # used before the newest version was put
    versions: Words  # of each endpoint's newest `depth` turns, by index modulo `depth`
    depth: int

    def begin(self, end: int, version: int) -> None:
        """Record a turn that an endpoint begins from `version`."""
        self.versions[end * self.depth + self.begun[end] % self.depth] = version
        self.begun[end] += 1

    def settle(self) -> None:
        """Admit new turns for those used so far, as a new version was put."""
        for end in range(len(self.used)):
            self.settled[end] = self.used[end]

    def amend(self, end: int, version: int) -> None:
        """Set the version of the turn begun last to a newer one."""
        self.versions[end * self.depth + (self.begun[end] - 1) % self.depth] = version

    def in_flight(self) -> Iterator[tuple[Turn, int]]:
        """The turns that have begun and aren't used, with their versions."""
        for end in range(len(self.used)):
            for number in range(self.used[end], self.begun[end]):
                yield (end, number), self.version(end, number)

    def version(self, end: int, number: int) -> int:
        """The version that a turn in flight began from."""
        return self.versions[end * self.depth + number % self.depth]


@dataclass(slots=True)
class Counts:
    """The messages put to and taken from a channel so far; may be in shared memory."""

    puts: Words  # by writer's endpoint
    takes: Words  # by reader's endpoint; by writer's for a queue that takes some
    ledger: Ledger | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """The turns that have to arrive before choosing again: one of `among`, or `count` of any."""

    among: frozenset[Turn] = frozenset()
    count: int = 1


class Cursor:
    """The progress of a check of many counts, which only grow: those that passed aren't read again.

    Between two messages every count is read once, and one more at each check: the cost per source
    and message is constant for any number of sources.
    """

    __slots__ = ("_index", "_least")

    def __init__(self) -> None:
        self._least, self._index = -1, 0

    def passes(self, counts: Words, ends: Sequence[int], least: int) -> bool:
        """Whether the counts of all these endpoints are at least `least`."""
        index = self._index if least == self._least else 0
        while index < len(ends) and counts[ends[index]] >= least:
            index += 1
        self._least, self._index = least, index
        return index == len(ends)


def may_put(gate: Gate, counts: Counts, end: int, cursor: Cursor | None = None) -> bool:
    """Whether a writer's endpoint has room for its next message."""
    cursor = cursor or Cursor()
    if isinstance(gate.flow, Latest):
        # A reader takes one version from all sources, so none may overwrite one that others lack.
        return cursor.passes(counts.puts, gate.beside.get(end, ()), counts.puts[end] - AHEAD + 1)
    room = counts.puts[end] - gate.capacity + 1
    if takes_some(gate.flow):
        return counts.takes[end] >= room
    return cursor.passes(counts.takes, gate.readers.get(end, ()), room)


def may_take(
    gate: Gate, counts: Counts, end: int, taken: int, tick: int, cursor: Cursor | None = None
) -> bool:
    """Whether a reader's endpoint that has taken `taken` messages may take the next at `tick`."""
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
    """The turns that a reader uses at `tick`, or the turns it waits for.

    `arrived` has the turns that have arrived and aren't used yet, in order of arrival. Turns that
    would otherwise exceed their lag bound come first; the reader waits for them if necessary.
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
    """The fragment that each endpoint waits for, a line each."""
    for (fragment, end), gate, takes in wants:
        other = gate.writer if takes else gate.reader
        yield f"{fragment}[{end}] waits for {other} on {gate.name}"
