"""Where glue runs: next to its readers, unless fewer bytes cross when it stays with its writers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from shoal.graph.ir import Choice, Loop, Node, Stage
from shoal.planning.homes import EVERYWHERE, Homes, Sites
from shoal.planning.policy import DistributionPolicy
from shoal.planning.prices import AVOIDED, Ledger, make_prices

_MOST_SWEEPS = 8


def place_glue(sites: Sites, stages: Mapping[str, str], distribution: DistributionPolicy) -> Homes:
    """A home for every site: stages where `stages` says, glue where fewest bytes cross."""
    homes = {
        name: frozenset({stages[name]}) for name, node in sites.nodes.items() if name in stages
    }
    homes |= {
        n.name: frozenset({stages[first_stage(n)]}) for n in sites.nodes.values() if first_stage(n)
    }
    free = [name for name in sites.nodes if name not in homes]
    unrelated = {name: _unrelated(sites, homes, set(free), name) for name in distribution.observers}
    taking_part = [f for f in distribution.fragments if f.name not in unrelated]
    fallback = frozenset({min(taking_part, key=lambda f: distribution.ends(f.name)).name})
    homes |= dict.fromkeys(free, fallback)
    _to_readers(sites, homes, free, fallback)
    ledger = Ledger(make_prices(sites, homes, distribution), homes)
    around = _Surroundings(sites, frozenset(free))
    for _ in range(_MOST_SWEEPS):
        before = ledger.total
        for name in free:
            far = around.far_moves(ledger.homes, name) if ledger.total >= AVOIDED else ()
            for move in chain(around.moves(ledger.homes, name), far):
                if any(n in unrelated.get(h, ()) for n, where in move.items() for h in where):
                    continue
                if ledger.price(move) < ledger.total:
                    ledger.take(move)
        if ledger.total >= before:
            break
    return ledger.homes


def first_stage(node: Node) -> str:
    """The name of a stage inside a closed loop, which decides where the loop runs."""
    if not isinstance(node, Loop):
        return ""
    inner = (n.name if _is_staged(n) else first_stage(n) for n in node.body.nodes)
    return next((name for name in inner if name), "")


def _is_staged(node: Node) -> bool:
    return isinstance(node, Stage) or (isinstance(node, Choice) and bool(node.stages))


def _to_readers(sites: Sites, homes: dict, free: list[str], fallback: frozenset[str]) -> None:
    """Give each free site, last first, the home of its readers, else of its writers."""
    readers: dict[str, list[str]] = {}
    for node in sites.nodes.values():
        for value in node.reads:
            maker = sites.maker.get(_source(sites, value))
            if maker:
                readers.setdefault(maker, []).append(node.name)
    waiting = set(free)
    for name in reversed(free):
        found = [homes[r] for r in readers.get(name, ()) if r not in waiting and r != name]
        if found:
            homes[name] = frozenset().union(*found)
            waiting.discard(name)
    for name in free:
        if name in waiting:
            makers = [sites.maker.get(_source(sites, v)) for v in sites.nodes[name].reads]
            homes[name] = next((homes[m] for m in makers if m and m not in waiting), fallback)
            waiting.discard(name)


def _source(sites: Sites, value: str) -> str:
    """The value behind an alias or a loop's carry."""
    for _ in range(len(sites.alias) + 1):
        if value in sites.maker:
            return value
        value = sites.alias.get(value, sites.carried.get(value, value))
    return value


@dataclass(frozen=True)
class _Surroundings:
    """The neighbours of each free site, independent of its home."""

    sites: Sites
    free: frozenset[str]
    above: dict[str, set[str]] = field(default_factory=dict)
    beside: dict[str, list[str]] = field(default_factory=dict)

    def moves(self, homes: Homes, name: str) -> list[dict[str, frozenset[str]]]:
        """Other homes where something crosses: its neighbours', alone or with its glue."""
        near: set[frozenset[str]] = set()
        for value in self.sites.nodes[name].reads:
            holders = self.sites.holders(self.sites.resolve(value), homes)
            near |= {frozenset({h}) for h in holders} if holders is not EVERYWHERE else set()
        for other in self._beside(name):
            near |= {frozenset({h}) for h in homes[other]}
        near -= {homes[name]}
        found: list[dict[str, frozenset[str]]] = []
        for home in sorted(near, key=sorted):
            found += [{name: home}, dict.fromkeys(self._above(name), home)]
        return [*found, {name: frozenset().union(*near)}] if len(near) > 1 else found

    def far_moves(self, homes: Homes, name: str) -> Iterator[dict[str, frozenset[str]]]:
        """Any home for a site, alone or with all glue that leads to it: for when it can't stay."""
        for home in sorted(frozenset().union(*homes.values())):
            yield {name: frozenset({home})}
            yield dict.fromkeys(self._above(name), frozenset({home}))

    def _above(self, name: str) -> set[str]:
        if name not in self.above:
            self.above[name] = _ancestors(self.sites, name, set(self.free))
        return self.above[name]

    def _beside(self, name: str) -> list[str]:
        """Sites that read what a site makes, or the same as it does, which they receive anyway."""
        if name not in self.beside:
            node, readers = self.sites.nodes[name], self.sites.readers
            each = (r.name for v in (*node.writes, *node.reads) for r in readers.get(v, ()))
            self.beside[name] = [other for other in dict.fromkeys(each) if other != name]
        return self.beside[name]


def _unrelated(sites: Sites, homes: Homes, free: set[str], fragment: str) -> set[str]:
    """Glue that neither leads to a stage of `fragment` nor follows from one."""
    stages = {name for name, home in homes.items() if fragment in home}
    known = set[str]()
    for name in [m for stage in stages for m in _makers(sites, stage)]:
        known |= _ancestors(sites, name, free)
    follows = set(stages)
    for name in sites.nodes:  # in order, so that what a site follows from is known before it
        if name in free and follows.intersection(_makers(sites, name)):
            follows.add(name)
    return free - known - follows


def _makers(sites: Sites, name: str) -> list[str]:
    """The sites that make what a site reads."""
    reads = sites.nodes[name].reads
    return [m for v in reads if (m := sites.maker.get(_source(sites, v)))]


def _ancestors(sites: Sites, name: str, free: set[str]) -> set[str]:
    """`name` and all glue that leads to it."""
    found, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in found or current not in free:
            continue
        found.add(current)
        todo += _makers(sites, current)
    return found
