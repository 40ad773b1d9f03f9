"""Where glue runs: next to its readers, unless fewer bytes cross when it stays with its writers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from shoal.graph.ir import Agree, Glue, Loop, Node, Stage
from shoal.planning.homes import EVERYWHERE, Homes, Sites, agrees, crossings
from shoal.planning.policy import DistributionPolicy, takes_some

_FORBIDDEN = 1e18
_AVOIDED = 1e15  # a fragment of Python alone stays one, and needs no JAX
_MOST_SWEEPS = 8


def place_glue(sites: Sites, stages: Mapping[str, str], distribution: DistributionPolicy) -> Homes:
    """A home for every site: stages where `stages` says, glue where fewest bytes cross."""
    homes = {
        name: frozenset({stages[name]})
        for name, node in sites.nodes.items()
        if isinstance(node, Stage)
    }
    homes |= {
        n.name: frozenset({stages[first_stage(n)]}) for n in sites.nodes.values() if first_stage(n)
    }
    free = [name for name in sites.nodes if name not in homes]
    strange = {name: _strangers(sites, homes, set(free), name) for name in distribution.onlookers}
    taking_part = [f for f in distribution.fragments if f.name not in strange]
    fallback = frozenset({min(taking_part, key=lambda f: distribution.ends(f.name)).name})
    homes |= dict.fromkeys(free, fallback)
    _to_readers(sites, homes, free, fallback)
    best = cost(sites, homes, distribution)
    for _ in range(_MOST_SWEEPS):
        before = best
        for name in free:
            far = _far_moves(sites, homes, name, set(free)) if best >= _AVOIDED else ()
            for move in chain(_moves(sites, homes, name, set(free)), far):
                if any(n in strange.get(h, ()) for n, where in move.items() for h in where):
                    continue
                trial = {**homes, **move}
                price = cost(sites, trial, distribution)
                if price < best:
                    homes, best = trial, price
        if best >= before:
            break
    return homes


def first_stage(node: Node) -> str:
    """The name of a stage inside a closed loop, which decides where the loop runs."""
    if not isinstance(node, Loop):
        return ""
    inner = (n.name if isinstance(n, Stage) else first_stage(n) for n in node.body.nodes)
    return next((name for name in inner if name), "")


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


def _moves(
    sites: Sites, homes: Homes, name: str, free: set[str]
) -> Iterator[dict[str, frozenset[str]]]:
    """Other homes for a site that something crosses at: its neighbours', alone or with its glue."""
    node, here = sites.nodes[name], homes[name]
    near: set[frozenset[str]] = set()
    for value in node.reads:
        holders = sites.holders(sites.resolve(value), homes)
        near |= {frozenset({h}) for h in holders} if holders is not EVERYWHERE else set()
    for other in sites.nodes.values():
        # Who reads what it makes, or reads the same as it does and so is sent that anyway.
        if other.name != name and set(other.reads) & {*node.writes, *node.reads}:
            near |= {frozenset({h}) for h in homes[other.name]}
    near -= {here}
    if not near:
        return
    above = _ancestors(sites, name, free)
    for home in sorted(near, key=sorted):
        yield {name: home}
        yield dict.fromkeys(above, home)
    if len(near) > 1:
        yield {name: frozenset().union(*near)}


def _far_moves(
    sites: Sites, homes: Homes, name: str, free: set[str]
) -> Iterator[dict[str, frozenset[str]]]:
    """Any home for a site, alone or with all glue that leads to it: for when it can't stay."""
    above = _ancestors(sites, name, free)
    for home in sorted(frozenset().union(*homes.values())):
        yield {name: frozenset({home})}
        yield dict.fromkeys(above, frozenset({home}))


def _strangers(sites: Sites, homes: Homes, free: set[str], fragment: str) -> set[str]:
    """Glue that neither leads to a stage of `fragment` nor follows from one."""
    stages = {name for name, home in homes.items() if fragment in home}
    known = set[str]()
    for name in [m for stage in stages for m in _makers(sites, stage)]:
        known |= _ancestors(sites, name, free)
    follows = set(stages)
    for name in sites.nodes:  # in order, so whom a site follows from is known before it
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


def cost(sites: Sites, homes: Homes, distribution: DistributionPolicy) -> float:
    """Bytes that cross between fragments in a tick; illegal placements cost more than any bytes."""
    values, total = sites.graph.values, 0.0
    for (reader, name), writer in crossings(sites, homes).items():
        value = values[name]
        copies = 1 if value.axis is not None else distribution.ends(reader)
        total += (value.nbytes * copies + 64) * sites.times.get(name, 1)
        # Who takes the first to come can hand them nothing in the middle of a tick.
        if (reader, writer) in _first_to_come(distribution) and name not in sites.graph.inputs:
            total += _FORBIDDEN
        differs = value.part and distribution.ends(writer) > 1
        if differs and not _stays(sites, name, writer, homes):
            total += _FORBIDDEN
    total += _FORBIDDEN * len(_kept_rows(sites, homes, distribution))
    own_pace = {writer for writer, _ in _first_to_come(distribution)}
    compiled = {
        home for node in sites.nodes.values() if isinstance(node, Stage) and not node.host
        for home in homes[node.name]
    }  # fmt: skip
    for node in sites.nodes.values():
        for home in homes[node.name]:
            total += 1e-3  # work done twice should save something
            if home not in compiled and not isinstance(node, Stage):
                total += _AVOIDED
            if distribution.ends(home) > 1 and not may_replicate(sites, node, home, homes):
                total += _FORBIDDEN
            # Replicas that each turn at their own pace never meet to agree.
            if home in own_pace and agrees(node):
                total += _FORBIDDEN
    return total


def _first_to_come(distribution: DistributionPolicy) -> set[tuple[str, str]]:
    """Pairs of a writer that turns freely and a reader that takes the first to come."""
    return {(w.writer, w.reader) for w in distribution.wires if takes_some(w.flow)}


def _kept_rows(sites: Sites, homes: Homes, distribution: DistributionPolicy) -> list[str]:
    """Rows of environments carried by who takes the first replicas to come, and has not all."""
    some = {wire.reader for wire in distribution.wires if takes_some(wire.flow)}
    carried = [(b, a) for b, a in sites.graph.carry if b != a and some]
    rows = [a for b, a in carried if sites.graph.values[b].axis is not None]
    return [a for a in rows if sites.holders(a, homes) & some]


def may_replicate(sites: Sites, node: Node, home: str, homes: Homes) -> bool:
    """Whether several replicas of `home` may each run `node` on their share of the environments."""
    if isinstance(node, Glue) and node.draws:
        return False
    if isinstance(node, Loop | Stage) or agrees(node):
        return True
    return all(not sites.graph.values[w].part or _stays(sites, w, home, homes) for w in node.writes)


def _stays(sites: Sites, value: str, home: str, homes: Homes) -> bool:
    """Whether a value on which replicas differ is read only at home, or to agree on it."""
    graph = sites.graph
    if value in graph.outputs or any(m.inner == value for m in graph.metrics):
        return False
    if any(value in (c.after, c.first) for loop, _ in sites.loops for c in loop.carries):
        return False
    readers = [n for n in sites.nodes.values() if value in n.reads]
    return all(isinstance(n, Agree) or homes[n.name] == {home} for n in readers)
