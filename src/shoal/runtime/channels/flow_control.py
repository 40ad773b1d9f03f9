"""When a replica may go on: pure decisions that all backends share.

A replica runs until it reaches a move (a take or a put) and asks for it. Whether the move may
happen depends on the channel's gate and counts alone, so that whoever sees the counts, a thread or
a process, decides alike. Backends carry this out; they decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.planning.channel_specs import Gate
from shoal.planning.plan import Replica
from shoal.planning.policy import Latest, Queue, takes_some

Turn = tuple[int, int]  # a free replica's end, and which of its turns
NEVER = 2**62  # the version of what depends on nothing that can be late
AHEAD = 3  # messages of news that an end may be ahead of others which the same reader reads


class Words(Protocol):
    """Counts by number: a list, or a view of memory that processes share."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def __len__(self) -> int: ...


@dataclass(slots=True)
class Ledger:
    """What free replicas have begun, from which version, and how much of it was used."""

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

    def under_way(self) -> Iterator[tuple[Turn, int]]:
        """Turns that are begun and not used, with their versions."""
        for end in range(len(self.used)):
            for number in range(self.used[end], self.begun[end]):
                yield (end, number), self.versions[end * self.depth + number % self.depth]


@dataclass(slots=True)
class Counts:
    """What has moved through a channel so far; may lie in memory shared by processes."""

    puts: Words  # by writer's end
    takes: Words  # let go, by reader's end; where some are taken, by writer's end
    ledger: Ledger | None = None


def may_put(gate: Gate, counts: Counts, end: int) -> bool:
    """Whether a writer's end has room for its next message."""
    if isinstance(gate.flow, Latest):
        # A reader sees one version of all its sources, so none may write over what others lack.
        beside = [counts.puts[w] for r in gate.readers.get(end, ()) for w in gate.sources[r]]
        return counts.puts[end] - min(beside, default=counts.puts[end]) < AHEAD
    if takes_some(gate.flow):
        return counts.puts[end] - counts.takes[end] < gate.capacity
    if end not in gate.readers:
        return True
    return counts.puts[end] - min([counts.takes[r] for r in gate.readers[end]]) < gate.capacity


def may_take(gate: Gate, counts: Counts, end: int, taken: int, tick: int) -> bool:
    """Whether a reader's end, which has taken `taken` messages, may take its next at `tick`."""
    flow = gate.flow
    if isinstance(flow, Latest):
        newest = min(counts.puts[w] for w in gate.sources[end]) - 1
        if gate.anew:
            return newest >= counts.takes[end]
        if gate.admits:
            assert counts.ledger is not None
            ahead = counts.ledger.begun[end] - counts.ledger.settled[end]
            return newest >= 0 and ahead < gate.admits
        return newest >= (0 if flow.max_lag is None else max(0, tick - flow.max_lag))
    return min([counts.puts[w] for w in gate.sources[end]]) > taken


def choose(gate: Gate, ledger: Ledger, tick: int, arrived: Mapping[Turn, int]) -> list[Turn] | None:
    """Which turns a reader that takes the first to come uses at `tick`; None: it has to wait.

    `arrived` says when each turn came that has come and wasn't used yet. Turns that could not be
    used within their bound if they waited go first, so the reader waits for them if it must.
    """
    assert isinstance(gate.flow, Queue)
    assert isinstance(gate.flow.take, int)
    take, order = gate.flow.take, sorted(arrived, key=lambda turn: (arrived[turn], turn))
    chosen: list[Turn] = []
    if gate.bound is not None:
        due = [(v + gate.bound, turn) for turn, v in ledger.under_way()]
        for deadline in sorted({d for d, _ in due}):
            urgent = [turn for d, turn in due if d <= deadline]
            could_wait = take * max(0, deadline - tick)
            needed = len(urgent) - could_wait - len(chosen)
            first = [turn for turn in order if turn in urgent and turn not in chosen]
            if needed > len(first):
                return None
            chosen += first[: max(0, needed)]
    chosen += [turn for turn in order if turn not in chosen][: max(0, take - len(chosen))]
    return sorted(chosen) if len(chosen) == take else None


def waits(wants: Iterable[tuple[Replica, Gate, bool]]) -> Iterator[str]:
    """Who waits for whom, a line each."""
    for (fragment, end), gate, takes in wants:
        other = gate.writer if takes else gate.reader
        yield f"{fragment}[{end}] waits for {other} on {gate.name}"
