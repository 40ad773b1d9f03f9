"""Channels: one-way links between two fragments, with any number of endpoints on each side."""

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
DEPTH = 32  # turns of an endpoint that a ledger holds: more than may be in flight


class Taken(NamedTuple):
    """A message that was taken, and the version that each source computed it from."""

    message: Message
    versions: tuple[int, ...]


Receive = Callable[[Message, list[Turn]], Message]


class FlowControl(Protocol):
    """Decides which endpoints may put to and take from a channel."""

    @property
    def spec(self) -> ChannelSpec:
        """The channel's spec."""
        ...

    def puts(self, end: int) -> int:
        """The number of messages that a writer's endpoint has put."""
        ...

    def may_put(self, end: int) -> bool:
        """Whether a writer's endpoint has room for its next message."""
        ...

    def may_take(self, end: int, tick: int) -> bool:
        """Whether a reader's endpoint may take its next message."""
        ...


class Channel(Protocol):
    """A one-way link between fragments; call `put` and `take` only when `state` allows it."""

    @property
    def state(self) -> FlowControl:
        """The channel's flow control."""
        ...

    def put(self, end: int, message: Message, version: int) -> None:
        """Send a message from one endpoint of the writer."""
        ...

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """Take the next message for one endpoint of the reader.

        The arguments of `receive` may be in memory that is reused as soon as it returns.
        """
        ...


class Waker(Protocol):
    """Lets one thread sleep until others wake it."""

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when notified, when `ready`, or after `seconds`; raise if the run stops."""
        ...

    def notify(self) -> None:
        """Wake the thread that waits."""
        ...


class Silent:
    """The waker of an endpoint in another process or on another host, which is woken there."""

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Never called: the endpoint waits elsewhere."""
        raise AssertionError

    def notify(self) -> None:
        """Do nothing."""


class Bundle:
    """The queues from which one reader takes the same turns, in order of arrival.

    An endpoint that puts is noted, so that the reader checks that endpoint only. If endpoints are
    in other processes, `changed` returns those that have put since its last call.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.counts: list[Counts] = []
        self.changed: Callable[[], Iterable[int]] | None = None
        self._noted: deque[int] = deque()
        self._arrived: dict[Turn, None] = {}  # in order of arrival
        self._looked: list[int] | None = None  # by endpoint, the turns that were seen complete
        self._missing, self._watched = Missing(count=1), (0, 0, 0)
        self._chosen: tuple[int, list[Turn]] = (-1, [])

    def note(self, end: int) -> None:
        """Note that an endpoint has put; needless before the reader's first check."""
        if self.changed is None and self._looked is not None:
            self._noted.append(end)

    def turns(self, tick: int) -> list[Turn] | None:
        """The turns that `tick` uses; None while the reader has to wait for them."""
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
        """Add the turns that are complete, of endpoints that have put since the last check."""
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
        """Whether the missing turns have yet to arrive; False if one never will."""
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
    """A channel's gate and counts: decides which endpoints may move, and numbers the messages."""

    spec: ChannelSpec
    counts: Counts
    bundle: Bundle | None = None
    fence: Callable[[], None] = lambda: None
    admit: Callable[[int], bool] | None = (
        None  # asks another worker if an asynchronous endpoint may begin
    )
    taken: list[int] = field(default_factory=list)
    readers: list[list[Waker]] = field(default_factory=list)  # to wake, by writer's endpoint
    writers: list[list[Waker]] = field(default_factory=list)  # to wake, by reader's endpoint

    def __post_init__(self) -> None:
        self.taken = [0] * self.spec.readers
        self._is_latest = isinstance(self.spec.gate.flow, Latest)
        if takes_some(self.spec.gate.flow):
            assert self.bundle is not None
            self.bundle.counts.append(self.counts)
        self._may_put = [Cursor() for _ in range(self.spec.writers)]
        self._may_take = [Cursor() for _ in range(self.spec.readers)]

    def puts(self, end: int) -> int:
        """The number of messages that a writer's endpoint has put."""
        return self.counts.puts[end]

    def may_put(self, end: int) -> bool:
        """Whether a writer's endpoint has room for its next message."""
        return may_put(self.spec.gate, self.counts, end, self._may_put[end])

    def may_take(self, end: int, tick: int) -> bool:
        """Whether a reader's endpoint may take its next message."""
        if self.bundle is not None:
            turns = self.bundle.turns(tick)
            return turns is not None and all(self.counts.puts[w] > n for w, n in turns)
        if self.admit is not None:
            return self.admit(end)
        cursor, taken = self._may_take[end], self.taken[end]
        return may_take(self.spec.gate, self.counts, end, taken, tick, cursor)

    def turns(self, end: int, tick: int) -> list[Turn]:
        """The source endpoints and message numbers of a reader's next take."""
        if self.bundle is not None:
            return self.bundle.turns(tick) or []
        number = self.begin(end) if self._is_latest else self.taken[end]
        return [(w, number) for w in self.spec.gate.sources[end]]

    def begin(self, end: int) -> int:
        """The newest version, recorded in the ledger if the reader is asynchronous."""
        version, ledger = self.newest(end), self.counts.ledger
        if self.spec.gate.admits and ledger is not None:
            ledger.begin(end, version)
            self.fence()
            # If the writer has put before it could see this, the newest version has changed.
            while (newest := self.newest(end)) != version:
                version = newest
                ledger.amend(end, version)
        return version

    def again(self, end: int) -> list[Turn]:
        """As `turns`, for a reader whose newest message was overwritten while it read."""
        newest, ledger = self.newest(end), self.counts.ledger
        if self.spec.gate.admits and ledger is not None:
            ledger.amend(end, newest)
        return [(w, newest) for w in self.spec.gate.sources[end]]

    def subscribe(self, readers: Sequence[Waker], writers: Sequence[Waker]) -> None:
        """Register the wakers of both sides, given by endpoint."""
        gate, count = self.spec.gate, self.spec.writers
        self.readers = [_each(readers[r] for r in gate.readers.get(w, ())) for w in range(count)]
        self.writers = [_each(writers[w] for w in sources) for sources in gate.sources]
        if self._is_latest:  # a writer that is ahead waits for the reader's other sources
            for w, woken in enumerate(self.readers):
                beside = _each(writers[b] for b in gate.beside.get(w, ()) if b != w)
                woken += [waker for waker in beside if waker not in woken]

    def did_put(self, end: int) -> None:
        """Count a message that a writer's endpoint has put, and wake its readers."""
        self.counts.puts[end] += 1
        if self.bundle is not None:
            self.bundle.note(end)
        if self._is_latest and self.counts.ledger is not None:
            self.counts.ledger.settle()
        for waker in self.readers[end] if self.readers else ():
            waker.notify()

    def let_go(self, end: int, turns: list[Turn]) -> None:
        """Release the messages that a reader's endpoint has taken: their slots may be reused."""
        self.taken[end] += 1
        counts, capacity = self.counts, self.spec.gate.capacity
        # Only a writer that found no room waits: don't wake the others.
        waits = any(counts.puts[w] - n >= capacity for w, n in turns)
        if self.bundle is not None:
            for w, n in turns:
                counts.takes[w] = n + 1
            waits = True  # used turns also let others begin
        else:
            counts.takes[end] = turns[0][1] + 1  # of its first source; all have the same number
        if waits and self.writers:
            for waker in self.writers[end]:
                waker.notify()

    def newest(self, end: int) -> int:
        """The number of the newest message that all sources of a reader's endpoint have put."""
        return min(self.counts.puts[w] for w in self.spec.gate.sources[end]) - 1


def take_back(channels: Iterable[ChannelState], fragments: Collection[str], end: int) -> None:
    """Roll back the incomplete turns of lost endpoints.

    The endpoints have the same index in `fragments`, which run in lockstep. No reader has used an
    incomplete turn. Complete turns stay, and are taken once. Messages in flight between these
    endpoints are dropped.
    """
    gates = [(state.spec.gate, state.counts) for state in channels]
    for gate, counts in gates:
        within = {gate.writer, gate.reader} <= set(fragments)
        if within and isinstance(gate.flow, Lockstep | Serve):
            counts.puts[end] = counts.takes[end] = 0
    own = [c for gate, c in gates if gate.writer in fragments and takes_some(gate.flow)]
    whole = min((c.puts[end] for c in own), default=0)
    for counts in own:
        counts.puts[end] = whole
        assert counts.ledger is not None
        counts.ledger.begun[end] = min(counts.ledger.begun[end], whole)


def _each(wakers: Iterable[Waker]) -> list[Waker]:
    return list(dict.fromkeys(wakers))


def make_bundles(specs: Mapping[str, ChannelSpec]) -> dict[str, Bundle]:
    """The bundle of each queue whose reader takes turns in order of arrival."""
    some = {name: spec for name, spec in specs.items() if takes_some(spec.gate.flow)}
    bundles = {spec.gate.reader: Bundle(spec.gate) for spec in some.values()}
    return {name: bundles[spec.gate.reader] for name, spec in some.items()}
