"""Channels between hosts as plain data: who holds which end, and who has to do with whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shoal.planning.channel_specs import ChannelSpec
from shoal.planning.policy import Latest
from shoal.planning.restart_groups import party_of
from shoal.runtime.channels.shm import Rings
from shoal.runtime.net.connections import REJOIN, Address
from shoal.runtime.net.handshake import Credentials, digest


@dataclass(frozen=True)
class RemoteChannels:
    """All channels between hosts, as plain data: who holds which end, and where to reach them."""

    rings: Rings
    size: int
    ends: Mapping[str, tuple[int, ...]]  # for each end of a fragment, its worker's number
    names: tuple[str, ...]  # of workers, as errors say them
    addresses: tuple[Address, ...]
    token: bytes
    parties: tuple[frozenset[int], ...] = ()  # workers whose place others may take, together
    absent: frozenset[int] = frozenset()  # those of them that aren't there at first
    rejoin: float = REJOIN  # seconds in which a broken connection has to be made again
    life: int = 0  # which of those that have held this worker's place it is

    def __repr__(self) -> str:
        return f"Lines({list(self.rings.rings)}, {self.names}, {self.addresses})"  # no token

    @property
    def known(self) -> Credentials:
        """What both sides of a connection must agree on."""
        sheets = [repr((name, ring.sheet)) for name, ring in self.rings.rings.items()]
        return Credentials(
            self.token, digest("\n".join([*sheets, repr(sorted(self.ends.items()))]))
        )

    def views(self) -> Iterator[View]:
        """Every channel."""
        for number, ring in enumerate(self.rings.rings.values()):
            gate = ring.sheet.gate
            yield View(number, ring.sheet, self.ends[gate.writer], self.ends[gate.reader])

    def others(self, me: int) -> frozenset[int]:
        """The workers that one worker is connected with."""
        pairs = {pair for view in self.views() for pair in view.pairs()}
        return frozenset(b if a == me else a for a, b in pairs if me in (a, b))

    def party(self, worker: int) -> frozenset[int]:
        """The workers that begin anew with one, itself too."""
        return party_of(self.parties, worker)

    def anew(self, life: int, addresses: Mapping[int, Address]) -> RemoteChannels:
        """The same for one that takes another's place; those who do so with it are elsewhere."""
        at = tuple(addresses.get(worker, known) for worker, known in enumerate(self.addresses))
        return replace(self, life=life, addresses=at)

    def told(self, me: int) -> dict[int, int]:
        """For each worker that one of the two may join late, how many words it is told then."""
        sizes, loose = {}, frozenset().union(*self.parties)
        for other in self.others(me) - self.party(me):
            keeper, joiner = (other, me) if me in loose else (me, other)
            if joiner in loose:
                sizes[other] = sum(len(view.told(keeper, joiner)) for view in self.views())
        return sizes


@dataclass(frozen=True)
class View:
    """A channel's number and sheet, and which worker holds each end."""

    number: int
    sheet: ChannelSpec
    writers: tuple[int, ...]
    readers: tuple[int, ...]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Workers that have something to tell each other, smaller number first."""
        for writer, worker in enumerate(self.writers):
            found = {self.readers[r] for r in self.sheet.gate.readers.get(writer, ())}
            for other in (found | self.beside(writer)) - {worker}:
                yield min(worker, other), max(worker, other)

    def beside(self, writer: int) -> set[int]:
        """Workers whose ends may not fall far behind this writer's, because one reads both."""
        gate = self.sheet.gate
        if not isinstance(gate.flow, Latest):
            return set()
        ends = {w for r in gate.readers.get(writer, ()) for w in gate.sources[r]}
        return {self.writers[w] for w in ends}

    def told(self, keeper: int, joiner: int) -> list[tuple[str, int]]:
        """The counts that a worker which joins late has to be told, and the end of each."""
        gate = self.sheet.gate
        mine = [w for w, at in enumerate(self.writers) if at == joiner and self.taking(w, keeper)]
        news = [w for w, at in enumerate(self.writers) if at == keeper and self.taking(w, joiner)]
        found = [(what, w) for w in mine for what in ("puts", "takes")]
        found += [("news", w) for w in news]
        if gate.admits and isinstance(gate.flow, Latest) and news:
            found += [("begun", r) for r, at in enumerate(self.readers) if at == joiner]
        return found

    def taking(self, writer: int, worker: int) -> tuple[int, ...]:
        """The ends of a worker that take from a writer's end."""
        ends = self.sheet.gate.readers.get(writer, ())
        return tuple(r for r in ends if self.readers[r] == worker)
