"""The layout of every value over the replicas of every fragment that holds it.

All fragments are walked together, in the order of the graph: what a fragment with one replica
makes is whole wherever it is read, what replicas make from their shares is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shoal.errors import first_line
from shoal.graph.ir import Graph, Loop, Node
from shoal.graph.layout import (
    REPLICATED,
    Fault,
    Findings,
    Layout,
    Partial,
    Replicated,
    Sharded,
    Varying,
    cause_of,
    in_node,
    inside,
    outside,
)
from shoal.graph.words import name_text
from shoal.planning.homes import Homes, Sites, crossings
from shoal.planning.program import Channel

Table = dict[tuple[str, str], Layout]


@dataclass(frozen=True)
class Spread:
    """The layout of every value in every fragment, and the findings of the analysis."""

    layouts: Mapping[tuple[str, str], Layout]
    findings: Mapping[str, Findings]


def spread_out(
    sites: Sites, homes: Homes, channels: tuple[Channel, ...], shares: Mapping[str, int]
) -> Spread:
    """How `sites` lie over fragments that each have some of the `shares` of the environments."""
    walk = _Walk(sites, homes, shares)
    walk.kept.update(_kept(sites, homes, channels))
    walk.nodes(sites.graph.nodes)
    return Spread(walk.table, walk.findings)


def _kept(
    sites: Sites, homes: Homes, channels: tuple[Channel, ...]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Values that outlive a segment, by fragment; each lies as another one does, or itself.

    What is carried lies as it did before, what crosses as its reader expects it.
    """
    graph = sites.graph
    pairs = [(v, v) for c in channels for v in c.values]
    pairs += [(m.inner, m.inner) for m in graph.metrics]
    pairs += [(link.inner, link.inner) for loop, _ in sites.loops for link in loop.stacks]
    pairs += [(v, v) for node in sites.nodes.values() for v in node.code.rows_for_host]
    turned = [c for loop, _ in sites.loops for c in loop.carries if not c.unchanged]
    pairs += [(v, c.before) for c in turned for v in (c.first, c.after)]
    pairs += [(after, before) for before, after in graph.carry if before != after]
    for value, like in pairs:
        for fragment in sites.holders(value, homes):
            yield (fragment, value), like


@dataclass(frozen=True)
class _Walk:
    """Walks over all fragments' sites and fills the tables."""

    sites: Sites
    homes: Homes
    shares: Mapping[str, int]
    table: Table = field(default_factory=dict)
    findings: dict[str, Findings] = field(default_factory=dict)
    kept: dict[tuple[str, str], str] = field(default_factory=dict)
    crossing: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.crossing.update(crossings(self.sites, self.homes))
        for loop, _ in self.sites.loops:
            for c in loop.carries:
                if not c.unchanged:
                    for fragment in self.sites.holders(c.after, self.homes):
                        lies = canonical(self.sites.graph, c.before, self.shares[fragment])
                        self.table.update({(fragment, c.before): lies, (fragment, c.final): lies})

    def nodes(self, nodes: tuple[Node, ...]) -> None:
        """Walk over nodes in order, each in all its homes."""
        for node in nodes:
            if isinstance(node, Loop) and node.name in self.sites.opened:
                self.nodes(node.body.nodes)
                for link in node.stacks:
                    for fragment in self.sites.holders(link.inner, self.homes):
                        self.table[fragment, link.outer] = outside(self.read(fragment, link.inner))
                continue
            for fragment in self.homes[node.name]:
                self.site(node, fragment)

    def site(self, node: Node, fragment: str) -> None:
        """How what a site writes lies in one of its homes."""
        known = {v: self.read(fragment, v) for v in node.reads}
        if self.shares[fragment] == 1 and all(isinstance(x, Replicated) for x in known.values()):
            self.table.update({(fragment, w): REPLICATED for w in node.writes})
            return
        found = self.findings.setdefault(fragment, Findings())
        made = layouts_of(node, known, self.sites.graph.envs, found)
        for name, layout in made.items():
            layout = in_node(layout, node.name, node.source)
            self.table[fragment, name] = self._as_kept(fragment, name, layout, found, node)

    def _as_kept(
        self, fragment: str, name: str, layout: Layout, found: Findings, node: Node
    ) -> Layout:
        """A value's layout where it is kept: by rows if it has any, however it was made."""
        like = self.kept.get((fragment, name))
        if like is None or not isinstance(layout, Replicated):
            return layout
        wanted = canonical(self.sites.graph, like, self.shares[fragment])
        if isinstance(wanted, Sharded) and wanted.axis not in layout.uniform:
            found.numbered.append(node.source)
        return wanted

    def read(self, fragment: str, value: str) -> Layout:
        """How a value lies where a fragment reads it."""
        if (fragment, value) in self.table:
            return self.table[fragment, value]
        if value in self.sites.parts:
            outer = self.sites.parts[value]
            layout = self.read(fragment, outer)
            return layout if self._is_whole(value) else inside(layout)
        writer = self.crossing.get((fragment, value))
        if writer is not None and (writer, value) in self.table:
            return self._crossed(self.table[writer, value], value, writer, fragment)
        return canonical(self.sites.graph, value, self.shares[fragment])

    def _is_whole(self, value: str) -> bool:
        """Whether an alias is the outer value itself, and not one turn's slice of it."""
        return not any(value == link.inner for loop, _ in self.sites.loops for link in loop.slices)

    def _crossed(self, layout: Layout, value: str, writer: str, reader: str) -> Layout:
        here = canonical(self.sites.graph, value, self.shares[reader])
        if layout == canonical(self.sites.graph, value, self.shares[writer]):
            return here
        return layout if isinstance(layout, Partial) else Varying(cause=cause_of(layout))


def layouts_of(
    node: Node, known: Mapping[str, Layout], envs: int, found: Findings
) -> Mapping[str, Layout]:
    """How what a node writes lies; an unexpected failure forbids the cut, and names the line."""
    try:
        return node.code.layouts(known, envs, found)
    except Exception as error:
        found.faults.append(
            Fault(
                f"what replicas would do in `{name_text(node.name)}` can't be analysed "
                f"({type(error).__name__}: {first_line(error)})",
                "Do it in a stage that isn't replicated, or report it as a mistake of Shoal's.",
                node.source,
            )
        )
        return dict.fromkeys(node.writes, Varying())


def canonical(graph: Graph, value: str, shares: int) -> Layout:
    """How a value lies where it is kept: by rows if it has any, otherwise whole."""
    axis = graph.values[value].axis
    return REPLICATED if shares == 1 or axis is None else Sharded(axis)
