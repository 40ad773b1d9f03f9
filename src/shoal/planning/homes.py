"""Which fragments hold a value and which need it, and so the values that cross between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shoal.graph.ir import Agree, Choice, Graph, Loop, Node, Stage

Homes = Mapping[str, frozenset[str]]
EVERYWHERE: frozenset[str] = frozenset({"*"})


@dataclass(frozen=True)
class Sites:
    """A graph with some loops opened; every other node is a site: it runs as a whole."""

    graph: Graph
    opened: frozenset[str]

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """Every site by name, in order."""
        return {node.name: node for node, _ in self._walk(self.graph, 1)}

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each value is made in a tick."""
        made = {v: 1 for v in self.graph.inputs}
        for node, times in self._walk(self.graph, 1):
            made |= dict.fromkeys(node.writes, times)
        for loop, times in self.loops:
            made |= dict.fromkeys(loop.writes, times)
            made |= dict.fromkeys((c.before for c in loop.carries), times * loop.length)
        return made

    @cached_property
    def loops(self) -> list[tuple[Loop, int]]:
        """Every opened loop, and how often it runs in a tick."""
        return list(self._loops(self.graph, 1))

    @cached_property
    def maker(self) -> dict[str, str]:
        """The site that makes a value."""
        return {w: node.name for node in self.nodes.values() for w in node.writes}

    @cached_property
    def carried(self) -> dict[str, str]:
        """For a value that enters a turn (of the tick or a loop), the one it is replaced by."""
        pairs = dict(self.graph.carry)
        return pairs | {c.before: c.after for loop, _ in self.loops for c in loop.carries}

    @cached_property
    def alias(self) -> dict[str, str]:
        """Values that are another value, or a slice of it, and so need no channel of their own."""
        same: dict[str, str] = {}
        for loop, _ in self.loops:
            same |= {link.inner: link.outer for link in loop.slices}
            for c in loop.carries:
                same |= {c.before: c.first, c.final: c.first} if c.unchanged else {c.final: c.after}
            same |= {link.outer: link.inner for link in loop.stacks}
        return same

    @cached_property
    def parts(self) -> dict[str, str]:
        """Slices and unchanged carries: a reader needs the outer value itself."""
        found: dict[str, str] = {}
        for loop, _ in self.loops:
            found |= {link.inner: link.outer for link in loop.slices}
            for c in loop.carries:
                if c.unchanged:
                    found |= {c.before: c.first, c.final: c.first}
        return found

    def resolve(self, value: str) -> str:
        """The value that a reader of `value` has to hold."""
        while value in self.parts:
            value = self.parts[value]
        return value

    def holders(self, value: str, homes: Homes) -> frozenset[str]:
        """Fragments that have `value` because they make it, or carry it."""
        maker = self.origin(value)
        return EVERYWHERE if maker is None else homes[maker]

    def origin(self, value: str) -> str | None:
        """The site that makes a value, or what it becomes; None of what never changes."""
        if value not in self._origins:
            self._origins[value] = self._origin(value)
        return self._origins[value]

    def _origin(self, value: str) -> str | None:
        for _ in range(len(self.maker) + len(self.alias) + 2):
            if value in self.maker:
                return self.maker[value]
            if value in self.alias:
                value = self.alias[value]
            elif value in self.carried and self.carried[value] != value:
                value = self.carried[value]
            else:
                return None
        raise AssertionError(f"no site makes {value}")

    @cached_property
    def _origins(self) -> dict[str, str | None]:
        return {}

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        """The sites that read a value."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            for value in dict.fromkeys(node.reads):
                found.setdefault(value, []).append(node)
        return found

    @cached_property
    def wanted(self) -> dict[str, tuple[str, ...]]:
        """For a value that must be held, the sites in whose homes it must be, as in `needs`."""
        found: dict[str, dict[str, None]] = {}
        for node in self.nodes.values():
            for value in node.reads:
                found.setdefault(self.resolve(value), {})[node.name] = None
        for loop, _ in self.loops:
            for carry in loop.carries:
                maker = self.origin(carry.after)
                if not carry.unchanged and maker is not None:
                    found.setdefault(self.resolve(carry.first), {})[maker] = None
        return {value: tuple(names) for value, names in found.items()}

    @cached_property
    def touched_values(self) -> dict[str, frozenset[str]]:
        """For a site, the values that must be held elsewhere, or no longer, when it moves."""
        found: dict[str, set[str]] = {name: set() for name in self.nodes}
        for value, names in self.wanted.items():
            maker = self.origin(value)
            carried = [self.origin(v) for v in self.derived.get(value, ())]
            for name in (*names, maker, *carried):
                if name is not None:
                    found[name].add(value)
        return {name: frozenset(values) for name, values in found.items()}

    @cached_property
    def derived(self) -> dict[str, frozenset[str]]:
        """Values that a tick makes of nothing but what is carried: of which carried values."""
        changed = {before for before, after in self.graph.carry if before != after}
        found = {v: frozenset({v} & changed) for v in self.graph.inputs}
        for node in self.graph.nodes:
            if node.name in self.nodes and all(v in found for v in node.reads):
                sources = frozenset().union(*(found[v] for v in node.reads))
                found |= dict.fromkeys(node.writes, sources)
        return {v: of for v, of in found.items() if of and v not in self.graph.inputs}

    def is_ahead(self, value: str, writer: str, homes: Homes) -> bool:
        """Whether a value is made in a tick of what is carried, by `writer` alone or in part."""
        sources = self.derived.get(value, ())
        return any(self.holders(source, homes) == {writer} for source in sources)

    @cached_property
    def touched_sites(self) -> dict[str, frozenset[str]]:
        """For a site, those that make what it reads of its own replica's."""
        parts = {v: self.maker[v] for v in self.maker if self.graph.values[v].differs}
        return {
            name: frozenset(parts[v] for v in node.reads if v in parts)
            for name, node in self.nodes.items()
        }

    def needs(self, homes: Homes) -> Iterator[tuple[str, str, Node | Loop]]:
        """Every (fragment, value, reader): a fragment needs the value for a site or a loop."""
        for node in self.nodes.values():
            for fragment in homes[node.name]:
                for value in node.reads:
                    yield fragment, self.resolve(value), node
        for loop, _ in self.loops:
            for carry in loop.carries:
                if not carry.unchanged:
                    for fragment in self.holders(carry.after, homes):
                        yield fragment, self.resolve(carry.first), loop

    def _walk(self, graph: Graph, times: int) -> Iterator[tuple[Node, int]]:
        for node in graph.nodes:
            if isinstance(node, Loop) and node.name in self.opened:
                yield from self._walk(node.body, times * node.length)
            else:
                yield node, times

    def _loops(self, graph: Graph, times: int) -> Iterator[tuple[Loop, int]]:
        for node in graph.nodes:
            if isinstance(node, Loop) and node.name in self.opened:
                yield node, times
                yield from self._loops(node.body, times * node.length)


def agrees(node: Node) -> bool:
    """Whether replicas agree somewhere in `node`."""
    match node:
        case Agree():
            return True
        case Stage() | Choice():
            return node.agrees
        case Loop():
            return any(agrees(inner) for inner in node.body.nodes)
        case _:
            return False


def crossings(sites: Sites, homes: Homes) -> dict[tuple[str, str], str]:
    """For each (reader, value) that must come from elsewhere, the fragment that sends it."""
    found: dict[tuple[str, str], str] = {}
    for fragment, value, _ in sites.needs(homes):
        if (fragment, value) in found:
            continue
        holders = sites.holders(value, homes)
        if holders is not EVERYWHERE and fragment not in holders:
            found[fragment, value] = min(holders)
    return found
