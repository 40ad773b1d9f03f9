"""Each fragment's program for a tick: its sites in order, and the takes and puts between them.

Every fragment keeps the order of the whole graph. A value is put after it is made and before the
writer next waits; it is taken right before the first site that needs it. So a fragment that
waits, waits for something earlier in the graph, and no deadlock can arise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.graph.ir import Graph, Loop, Node, Stage
from shoal.planning.homes import Homes, Sites, crossings
from shoal.planning.policy import (
    DistributionPolicy,
    Flow,
    Latest,
    Lockstep,
    Queue,
    Serve,
    takes_some,
)


@dataclass(frozen=True, slots=True)
class Do:
    """Run a site inside a compiled segment."""

    node: str


@dataclass(frozen=True, slots=True)
class Call:
    """Call a host stage, in Python between compiled segments."""

    node: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for a channel's next message, which has these values."""

    channel: str
    values: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """The values of the message."""
        return self.values


@dataclass(frozen=True, slots=True)
class Put:
    """Send a message with these values on a channel."""

    channel: str
    values: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """The values of the message."""
        return self.values

    @property
    def writes(self) -> tuple[str, ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """This fragment's part of a loop."""

    loop: str
    body: tuple[Instruction, ...]


Instruction = Do | Call | Take | Put | Repeat


@dataclass(frozen=True, slots=True)
class Channel:
    """Values that go from fragment to fragment together; `scope` is a loop's name, or the tick."""

    name: str
    writer: str
    reader: str
    values: tuple[str, ...]
    scope: str
    times: int
    flow: Flow


@dataclass(frozen=True, slots=True)
class _Need:
    """Values of the current scope that must have been taken by now."""

    values: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Send:
    """Values that go to one reader now."""

    reader: str
    values: tuple[str, ...]
    carried: bool
    scope: str


@dataclass(frozen=True, slots=True)
class _Inside:
    """The draft of this fragment's part of a loop."""

    loop: str
    body: tuple[_Draft, ...]


_Draft = Do | Call | _Need | _Send | _Inside


def project(
    sites: Sites, homes: Homes, distribution: DistributionPolicy
) -> tuple[tuple[Channel, ...], dict[str, tuple[Instruction, ...]]]:
    """The channels between fragments and each fragment's program."""
    crossing = crossings(sites, homes)
    view = _View(sites, homes, crossing)
    drafts = {f.name: tuple(view.scope(sites.graph, "", f.name)) for f in distribution.fragments}
    channels = tuple(
        _channel(sites, distribution, writer, send, number)
        for number, (writer, send) in enumerate(
            (writer, send) for writer, draft in drafts.items() for send in _sends(draft)
        )
    )
    brings = {(c.reader, v): c for c in channels for v in c.values}
    puts = {(c.writer, c.reader, c.values): c.name for c in channels}
    programs = {f: tuple(_finish(f, draft, brings, puts, set())) for f, draft in drafts.items()}
    return channels, programs


@dataclass(frozen=True)
class _View:
    """Draws up fragments' programs, before channels have names."""

    sites: Sites
    homes: Homes
    crossing: dict[tuple[str, str], str]
    scopes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scopes.update(self._scopes(self.sites.graph, ""))

    def _scopes(self, graph: Graph, scope: str) -> Iterator[tuple[str, str]]:
        yield from ((v, scope) for v in graph.inputs)
        for node in graph.nodes:
            yield from ((w, scope) for w in node.writes)
            if isinstance(node, Loop) and node.name in self.sites.opened:
                yield from self._scopes(node.body, node.name)

    def scope(self, graph: Graph, scope: str, fragment: str) -> Iterator[_Draft]:
        """The draft of one scope: the tick's, or a loop's."""
        pending: dict[tuple[str, bool], list[str]] = {}
        self._offer(fragment, graph.inputs, pending, carried=True)
        for node in graph.nodes:
            if not self._takes_part(node, fragment):
                continue
            need = frozenset(v for v in self._needs(node, fragment) if self.scopes[v] == scope)
            is_open = isinstance(node, Loop) and node.name in self.sites.opened
            if need or is_open:
                yield from _flush(pending, scope)
            if need:
                yield _Need(need)
            if isinstance(node, Loop) and is_open:
                yield _Inside(node.name, tuple(self.scope(node.body, node.name, fragment)))
            else:
                is_host = isinstance(node, Stage) and node.host
                yield Call(node.name, node.reads, node.writes) if is_host else Do(node.name)
            self._offer(fragment, node.writes, pending, carried=False)
        yield from _flush(pending, scope)

    def _offer(
        self, fragment: str, values: tuple[str, ...], pending: dict, *, carried: bool
    ) -> None:
        for (reader, value), writer in self.crossing.items():
            if writer == fragment and value in values:
                pending.setdefault((reader, carried), []).append(value)

    def _takes_part(self, node: Node, fragment: str) -> bool:
        if isinstance(node, Loop) and node.name in self.sites.opened:
            return any(self._takes_part(inner, fragment) for inner in node.body.nodes)
        return fragment in self.homes[node.name]

    def _needs(self, node: Node, fragment: str) -> Iterator[str]:
        """What `fragment` takes from elsewhere for `node`, insides of opened loops included."""
        wanted: list[str] = []
        if isinstance(node, Loop) and node.name in self.sites.opened:
            for carry in node.carries:
                if not carry.unchanged and fragment in self.sites.holders(carry.after, self.homes):
                    wanted.append(carry.first)
            for inner in node.body.nodes:
                if self._takes_part(inner, fragment):
                    yield from self._needs(inner, fragment)
        else:
            wanted += node.reads
        resolved = (self.sites.resolve(v) for v in wanted)
        yield from (v for v in resolved if (fragment, v) in self.crossing)


def _flush(pending: dict[tuple[str, bool], list[str]], scope: str) -> Iterator[_Send]:
    for (reader, carried), values in pending.items():
        yield _Send(reader, tuple(values), carried, scope)
    pending.clear()


def _sends(draft: tuple[_Draft, ...]) -> Iterator[_Send]:
    for item in draft:
        if isinstance(item, _Send):
            yield item
        elif isinstance(item, _Inside):
            yield from _sends(item.body)


def _channel(
    sites: Sites, distribution: DistributionPolicy, writer: str, send: _Send, number: int
) -> Channel:
    name, reader = f"{writer}>{send.reader}:{number}", send.reader
    flow = _flow(distribution, writer, send)
    times = sites.times[send.values[0]]
    return Channel(name, writer, reader, send.values, send.scope, times, flow)


def _flow(distribution: DistributionPolicy, writer: str, send: _Send) -> Flow:
    """The flow of a message, by where it is sent: inside a loop, in a tick, or at its start."""
    if send.scope:
        return distribution.flow(writer, send.reader, (Serve,))
    queue = distribution.flow(writer, send.reader, (Queue,))
    if send.carried and not takes_some(queue):
        return distribution.flow(writer, send.reader, (Lockstep, Latest))
    return queue


def _finish(
    fragment: str, draft: tuple[_Draft, ...], brings: dict, puts: dict, taken: set[str]
) -> Iterator[Instruction]:
    """A draft with its needs turned into takes, and its sends into puts."""
    for item in draft:
        match item:
            case _Need(values):
                for channel in dict.fromkeys(brings[fragment, v] for v in sorted(values)):
                    if channel.name not in taken:
                        taken.add(channel.name)
                        yield Take(channel.name, channel.values)
            case _Send(reader, values):
                yield Put(puts[fragment, reader, values], values)
            case _Inside(loop, body):
                yield Repeat(loop, tuple(_finish(fragment, body, brings, puts, taken)))
            case _:
                yield item


def instructions(program: tuple[Instruction, ...]) -> Iterator[Instruction]:
    """Every instruction, those inside loops included."""
    for item in program:
        yield item
        if isinstance(item, Repeat):
            yield from instructions(item.body)


def communicates(program: tuple[Instruction, ...]) -> bool:
    """Whether a program waits for others or calls out of XLA."""
    return any(isinstance(i, Take | Put | Call) for i in instructions(program))
