"""The cost of a placement: the bytes that cross, and more than any bytes where it isn't allowed.

`Ledger` keeps the sum entry by entry, so that a move is priced by the few entries it touches;
`tests/laws/test_placement.py` compares it with the definition.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from shoal.graph.ir import Agree, Choice, Loop, Node, Stage
from shoal.planning.homes import Homes, Sites, agrees
from shoal.planning.policy import DistributionPolicy, is_late, takes_some

# In exact numbers, each beyond any sum of the one before: work, a byte, and what is to be avoided.
_WORK = 1
_BYTE = 10**6
AVOIDED = 10**24  # a fragment of Python alone stays one, and needs no JAX
_FORBIDDEN = 10**30

Move = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Prices:
    """What each value and each site costs, of some sites distributed in some way."""

    sites: Sites
    distribution: DistributionPolicy
    compiled: frozenset[str]  # fragments with a stage that XLA compiles; stages never move

    def of_value(self, name: str, readers: Iterable[str], writer: str, homes: Homes) -> int:
        """The cost of sending a value from `writer` to each of `readers`."""
        value, total = self.sites.graph.values[name], 0
        differs = value.differs and self.ends[writer] > 1
        is_lost = differs and not self.stays(name, writer, homes)
        for reader in readers:
            copies = 1 if value.axis is not None else self.ends[reader]
            total += (value.nbytes * copies + 64) * self.sites.times.get(name, 1) * _BYTE
            # A reader that takes the first to arrive can send them nothing in the middle of a tick.
            backwards = (reader, writer) in self.first_to_arrive
            total += _FORBIDDEN * (backwards and name not in self.sites.graph.inputs)
            total += _FORBIDDEN * is_lost
            # What is to be read late must be what is carried, not what is made of it at once.
            too_early = (writer, reader) in self.late and self.sites.is_ahead(name, writer, homes)
            total += _FORBIDDEN * too_early
        return total

    def of_site(self, node: Node, homes: Homes) -> int:
        """The cost of a site's home, apart from what crosses."""
        total = 0
        for home in homes[node.name]:
            total += _WORK  # work done twice should save something
            total += AVOIDED * (home not in self.compiled and not isinstance(node, Stage))
            total += _FORBIDDEN * (self.ends[home] > 1 and not self.may_run(node, home, homes))
            # Asynchronous replicas can't agree with each other.
            total += _FORBIDDEN * (home in self.asynchronous and agrees(node))
        return total + _FORBIDDEN * self.kept_rows.get(node.name, 0) * bool(
            homes[node.name] & self.takers
        )

    def may_run(self, node: Node, home: str, homes: Homes) -> bool:
        """Whether several replicas of `home` may each run `node` on their share."""
        if isinstance(node, Loop | Stage | Choice) or agrees(node):
            return True
        values = self.sites.graph.values
        return all(not values[w].differs or self.stays(w, home, homes) for w in node.writes)

    def stays(self, value: str, home: str, homes: Homes) -> bool:
        """Whether a value on which replicas differ is read only there, or to agree on it.

        A stage per environment never agrees: it would make rows of what replicas differ on.
        """
        if value in self.shown:
            return False
        own, has_rows = {home}, self.sites.graph.values[value].has_rows
        return all(
            isinstance(n, Agree) or (homes[n.name] == own and (has_rows or not _is_by_row(n)))
            for n in self.sites.readers.get(value, ())
        )

    @cached_property
    def ends(self) -> dict[str, int]:
        """How many shares each fragment's environments are divided into."""
        return {f.name: self.distribution.ends(f.name) for f in self.distribution.fragments}

    @cached_property
    def first_to_arrive(self) -> frozenset[tuple[str, str]]:
        """Pairs of an asynchronous writer and a reader that takes the first to arrive."""
        wires = self.distribution.wires
        return frozenset((w.writer, w.reader) for w in wires if takes_some(w.flow))

    @cached_property
    def late(self) -> frozenset[tuple[str, str]]:
        """Pairs of a writer and a reader that sees what the writer carries late."""
        return frozenset((w.writer, w.reader) for w in self.distribution.wires if is_late(w.flow))

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """Fragments whose reader takes the first to arrive."""
        return frozenset(writer for writer, _ in self.first_to_arrive)

    @cached_property
    def takers(self) -> frozenset[str]:
        """Fragments that take the first replicas to arrive, and so don't have all rows."""
        return frozenset(reader for _, reader in self.first_to_arrive)

    @cached_property
    def kept_rows(self) -> dict[str, int]:
        """How many values with a row an environment each site makes for the next tick."""
        found: dict[str, int] = {}
        for before, after in self.sites.graph.carry:
            maker = self.sites.origin(after)
            if before != after and maker and self.sites.graph.values[before].axis is not None:
                found[maker] = found.get(maker, 0) + 1
        return found

    @cached_property
    def shown(self) -> frozenset[str]:
        """Values that leave the tick, or are carried by an opened loop."""
        graph = self.sites.graph
        turned = [
            x for loop, _ in self.sites.loops for c in loop.carries for x in (c.after, c.first)
        ]
        return frozenset([*graph.outputs, *(m.inner for m in graph.metrics), *turned])


def _is_by_row(node: Node) -> bool:
    """Whether a node is a stage per environment, or a loop with one inside."""
    if isinstance(node, Loop):
        return any(map(_is_by_row, node.body.nodes))
    return isinstance(node, Stage) and node.per == "env"


def make_prices(sites: Sites, homes: Homes, distribution: DistributionPolicy) -> Prices:
    """The prices for sites whose stages have these homes."""
    stages = (
        n
        for n in sites.nodes.values()
        if (isinstance(n, Choice) and n.stages) or (isinstance(n, Stage) and not n.host)
    )
    return Prices(sites, distribution, frozenset(h for n in stages for h in homes[n.name]))


class Ledger:
    """A placement and its price, entry by entry: `price` a move, then `take` it or not."""

    def __init__(self, prices: Prices, homes: Homes) -> None:
        self.prices, self.homes = prices, dict(homes)
        self._value = {v: self._value_price(v, self.homes) for v in prices.sites.wanted}
        self._site = {
            name: prices.of_site(node, self.homes) for name, node in prices.sites.nodes.items()
        }
        self.total = sum(self._value.values()) + sum(self._site.values())

    def price(self, move: Move) -> int:
        """What the placement would cost after `move`."""
        return self.total + sum(new - old for _, _, old, new in self._changes(move))

    def take(self, move: Move) -> None:
        """Make the move."""
        for entries, name, old, new in list(self._changes(move)):
            entries[name] = new
            self.total += new - old
        self.homes.update(move)

    def _changes(self, move: Move) -> Iterable[tuple[dict[str, int], str, int, int]]:
        """Every entry that a move touches: where it stands, its name, what it was and would be."""
        sites = self.prices.sites
        after = ChainMap(dict(move), self.homes)
        changed = [name for name, where in move.items() if self.homes[name] != where]
        for value in {v for name in changed for v in sites.touched_values[name]}:
            yield self._value, value, self._value[value], self._value_price(value, after)
        for name in {n for c in changed for n in (c, *sites.touched_sites[c])}:
            yield self._site, name, self._site[name], self.prices.of_site(sites.nodes[name], after)

    def _value_price(self, value: str, homes: Homes) -> int:
        """The cost of sending a value from its maker to all sites that need it."""
        sites = self.prices.sites
        maker = sites.origin(value)
        if maker is None:
            return 0
        holders = homes[maker]
        needing = {home for name in sites.wanted[value] for home in homes[name]} - holders
        return self.prices.of_value(value, needing, min(holders), homes) if needing else 0
