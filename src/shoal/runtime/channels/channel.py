"""Channels: one way from a fragment to another, for any number of ends on both sides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shoal.planning.channel_specs import ChannelSpec, Gate
from shoal.planning.policy import Latest, Lockstep, Serve, takes_some
from shoal.runtime.channels.flow_control import (
    Counts,
    Cursor,
    Ledger,
    Missing,
    Turn,
    choose,
    may_put,
    may_take,
)

Message = dict[str, Any]
DEPTH = 32  # turns of an end that a ledger remembers: more than any may have under way


class Taken(NamedTuple):
    """A message as its reader keeps it, and the version that each source made it from."""

    message: Message
    versions: tuple[int, ...]


Receive = Callable[[Message, list[Turn]], Message]


class FlowControl(Protocol):
    """Decides which ends may move through a channel."""

    @property
    def sheet(self) -> ChannelSpec:
        """What the channel is."""
        ...

    @property
    def in_flight(self) -> int:
        """Turns that asynchronous writers have begun, and the reader has yet to use."""
        ...

    def may_put(self, end: int) -> bool:
        """Whether a writer's end has room for its next message."""
        ...

    def may_take(self, end: int, tick: int) -> bool:
        """Whether a reader's end may take its next message."""
        ...


class Channel(Protocol):
    """One way from a fragment to another; a move is made only after `FlowControl` allows it."""

    @property
    def state(self) -> FlowControl:
        """Which ends may move."""
        ...

    def put(self, end: int, message: Message, version: int) -> None:
        """Hand over what one end of the writer has made."""
        ...

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """The next message as one end of the reader sees it.

        What `receive` is given may lie in memory that is used again as soon as it returns.
        """
        ...


class Waker(Protocol):
    """What a thread sleeps by, and others wake it with."""

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when notified, when `ready`, or after `seconds`; raise if all is to stop."""
        ...

    def notify(self) -> None:
        """Wake the thread that waits."""
        ...


class Silent:
    """The waker of an end in another process or host, which is woken there."""

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Never called: the end waits elsewhere."""
        raise AssertionError

    def notify(self) -> None:
        """Do nothing."""


class Bundle:
    """The queues from which one reader takes the same turns, the first to come.

    An end that puts notes itself, so that the reader looks at that end alone. Where ends are other
    processes, `changed` finds those that have put since it was last called.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.counts: list[Counts] = []
        self.changed: Callable[[], Iterable[int]] | None = None
        self._noted: deque[int] = deque()
        self._arrived: dict[Turn, None] = {}  # the first to come first
        self._looked: list[int] | None = None  # for each end, the turns that were seen whole
        self._missing, self._watched = Missing(count=1), (0, 0, 0)
        self._chosen: tuple[int, list[Turn]] = (-1, [])

    def note(self, end: int) -> None:
        """An end has put; until the reader looks for the first time, nothing need be noted."""
        if self.changed is None and self._looked is not None:
            self._noted.append(end)

    def turns(self, tick: int) -> list[Turn] | None:
        """The turns that `tick` uses; None while it has to wait for them."""
        if self._chosen[0] == tick:
            return self._chosen[1]
        ledger = self.counts[0].ledger
        assert ledger is not None
        self._look(ledger, tick)
        if self._still_waits(ledger):
            return None
        chosen = choose(self.gate, ledger, tick, self._arrived)
        if isinstance(chosen, Missing):
            self._wait_for(chosen, ledger)
            return None
        self._chosen, self._missing = (tick, chosen), Missing(count=0)
        for turn in chosen:
            del self._arrived[turn]
            ledger.used[turn[0]] += 1
        return chosen

    def _look(self, ledger: Ledger, tick: int) -> None:
        """Note turns of which all parts have come, of ends that have put since the last time."""
        if self._looked is None:
            self._looked = [ledger.used[end] for end in range(len(ledger.used))]
            ends = range(len(self._looked))
            for end in sorted(ends, key=lambda end: (end - tick) % len(ends)):
                self._look_at(end)
        if self.changed is not None:
            for end in self.changed():
                self._look_at(end)
        while self._noted:
            self._look_at(self._noted.popleft())

    def _look_at(self, end: int) -> None:
        looked = self._looked
        assert looked is not None
        whole = min([counts.puts[end] for counts in self.counts])
        for number in range(looked[end], whole):
            self._arrived[end, number] = None
            if (end, number) in self._missing.among:
                self._missing = Missing(count=0)
        looked[end] = max(looked[end], whole)

    def _still_waits(self, ledger: Ledger) -> bool:
        """Whether what had to arrive is still to come; if it never will, choose again."""
        if not self._missing.among:
            return len(self._arrived) < self._missing.count
        end, number, version = self._watched
        return ledger.begun[end] > number and ledger.version(end, number) == version

    def _wait_for(self, missing: Missing, ledger: Ledger) -> None:
        if missing.among:
            end, number = min(missing.among)
            self._watched = end, number, ledger.version(end, number)
            self._missing = missing
        else:
            self._missing = Missing(count=len(self._arrived) + missing.count)


@dataclass
class ChannelState:
    """A channel's gate and counts: decides which ends may move, and numbers the messages."""

    sheet: ChannelSpec
    counts: Counts
    bundle: Bundle | None = None
    fence: Callable[[], None] = lambda: None
    admit: Callable[[int], bool] | None = (
        None  # asked elsewhere whether an asynchronous end may begin
    )
    taken: list[int] = field(default_factory=list)
    readers: list[list[Waker]] = field(default_factory=list)  # to wake, by writer's end
    writers: list[list[Waker]] = field(default_factory=list)  # to wake, by reader's end

    def __post_init__(self) -> None:
        self.taken = [0] * self.sheet.readers
        self._is_news = isinstance(self.sheet.gate.flow, Latest)
        if takes_some(self.sheet.gate.flow):
            assert self.bundle is not None
            self.bundle.counts.append(self.counts)
        self._may_put = [Cursor() for _ in range(self.sheet.writers)]
        self._may_take = [Cursor() for _ in range(self.sheet.readers)]

    @property
    def in_flight(self) -> int:
        """Turns that asynchronous writers have begun, and the reader has yet to use."""
        ledger = self.counts.ledger
        if self.bundle is None or ledger is None:
            return 0
        return sum(1 for _ in ledger.in_flight())

    def may_put(self, end: int) -> bool:
        """Whether a writer's end has room for its next message."""
        return may_put(self.sheet.gate, self.counts, end, self._may_put[end])

    def may_take(self, end: int, tick: int) -> bool:
        """Whether a reader's end may take its next message."""
        if self.bundle is not None:
            turns = self.bundle.turns(tick)
            return turns is not None and all(self.counts.puts[w] > n for w, n in turns)
        if self.admit is not None:
            return self.admit(end)
        cursor, taken = self._may_take[end], self.taken[end]
        return may_take(self.sheet.gate, self.counts, end, taken, tick, cursor)

    def turns(self, end: int, tick: int) -> list[Turn]:
        """The writers' ends that a reader's next take brings from, and the messages' numbers."""
        if self.bundle is not None:
            return self.bundle.turns(tick) or []
        number = self.begin(end) if self._is_news else self.taken[end]
        return [(w, number) for w in self.sheet.gate.sources[end]]

    def begin(self, end: int) -> int:
        """The newest version, noted in the ledger if the reader is asynchronous."""
        version, ledger = self.newest(end), self.counts.ledger
        if self.sheet.gate.admits and ledger is not None:
            ledger.begin(end, version)
            self.fence()
            # Had the writer gone on before it could see this, the newest is another by now.
            while (newest := self.newest(end)) != version:
                version = newest
                ledger.amend(end, version)
        return version

    def again(self, end: int) -> list[Turn]:
        """As `turns`, for a reader that found the newest written over while it looked."""
        newest, ledger = self.newest(end), self.counts.ledger
        if self.sheet.gate.admits and ledger is not None:
            ledger.amend(end, newest)
        return [(w, newest) for w in self.sheet.gate.sources[end]]

    def subscribe(self, readers: Sequence[Waker], writers: Sequence[Waker]) -> None:
        """Wake these, given by end, when there is something for them."""
        gate, count = self.sheet.gate, self.sheet.writers
        self.readers = [_each(readers[r] for r in gate.readers.get(w, ())) for w in range(count)]
        self.writers = [_each(writers[w] for w in sources) for sources in gate.sources]
        if self._is_news:  # a writer that is ahead waits for those beside it
            for w, woken in enumerate(self.readers):
                beside = _each(writers[b] for b in gate.beside.get(w, ()) if b != w)
                woken += [waker for waker in beside if waker not in woken]

    def did_put(self, end: int) -> None:
        """A writer's end has put its next message."""
        self.counts.puts[end] += 1
        if self.bundle is not None:
            self.bundle.note(end)
        if self._is_news and self.counts.ledger is not None:
            self.counts.ledger.settle()
        for waker in self.readers[end] if self.readers else ():
            waker.notify()

    def let_go(self, end: int, turns: list[Turn]) -> None:
        """A reader's end is done with messages: their room may be used again."""
        self.taken[end] += 1
        counts, capacity = self.counts, self.sheet.gate.capacity
        # Only a writer that found no room waits for it; others would be woken for nothing.
        waits = any(counts.puts[w] - n >= capacity for w, n in turns)
        if self.bundle is not None:
            for w, n in turns:
                counts.takes[w] = n + 1
            waits = True  # turns that were used also let others begin
        else:
            counts.takes[end] = turns[0][1] + 1  # by its first source; all have one number
        if waits and self.writers:
            for waker in self.writers[end]:
                waker.notify()

    def newest(self, end: int) -> int:
        """The number of the newest message that a reader's end has of all its sources."""
        return min(self.counts.puts[w] for w in self.sheet.gate.sources[end]) - 1


def take_back(channels: Iterable[ChannelState], fragments: Collection[str], end: int) -> int:
    """Take back what ends that are gone had begun and not completed; returns how many turns.

    They are those of one number of fragments in lockstep. No reader has looked at it: one that
    takes the first to come looks only at turns that are whole. What is whole stays where it is,
    and is taken once. What was on its way between these ends is forgotten.
    """
    gates = [(state.sheet.gate, state.counts) for state in channels]
    for gate, counts in gates:
        within = {gate.writer, gate.reader} <= set(fragments)
        if within and isinstance(gate.flow, Lockstep | Serve):
            counts.puts[end] = counts.takes[end] = 0
    own = [c for gate, c in gates if gate.writer in fragments and takes_some(gate.flow)]
    if not own:
        return 0
    whole, ledger = min(c.puts[end] for c in own), own[0].ledger
    for counts in own:
        counts.puts[end] = whole
    assert ledger is not None
    lost = max(0, ledger.begun[end] - whole)
    ledger.begun[end] -= lost
    return lost


def _each(wakers: Iterable[Waker]) -> list[Waker]:
    return list(dict.fromkeys(wakers))


def make_bundles(sheets: Mapping[str, ChannelSpec]) -> dict[str, Bundle]:
    """For each queue whose reader takes the first to come, what it is bundled with."""
    some = {name: sheet for name, sheet in sheets.items() if takes_some(sheet.gate.flow)}
    bundles = {sheet.gate.reader: Bundle(sheet.gate) for sheet in some.values()}
    return {name: bundles[sheet.gate.reader] for name, sheet in some.items()}
