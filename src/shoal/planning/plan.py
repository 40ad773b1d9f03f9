"""A plan: fragments x replicas x places x channels, as plain data; and the passes that make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.graph.ir import Graph, Loop, Node, Value, loops
from shoal.graph.rules import check_graph
from shoal.planning.assign import assign_stages
from shoal.planning.cluster import Cluster, Place, place
from shoal.planning.glue import place_glue
from shoal.planning.homes import Homes, Sites, agrees
from shoal.planning.policy import DistributionPolicy
from shoal.planning.program import Channel, Instruction, project
from shoal.planning.show import plan_json, plan_text


@dataclass(frozen=True)
class Plan:
    """How a graph runs: which site where, what crosses, and in what order each fragment works."""

    sites: Sites
    distribution: DistributionPolicy
    cluster: Cluster
    homes: Homes
    channels: tuple[Channel, ...]
    programs: Mapping[str, tuple[Instruction, ...]]
    places: Mapping[str, tuple[Place, ...]]

    @property
    def graph(self) -> Graph:
        """The graph that runs."""
        return self.sites.graph

    def nodes(self, fragment: str) -> list[Node]:
        """The sites of a fragment, in order."""
        return [n for n in self.sites.nodes.values() if fragment in self.homes[n.name]]

    def one_program(self, fragment: str) -> bool:
        """Whether a fragment's replicas agree inside it, and so run as one program over them."""
        many = self.distribution.fragment(fragment).replicas > 1
        return many and any(agrees(node) for node in self.nodes(fragment))

    def endpoints(self, fragment: str) -> int:
        """How many ends a fragment has on a channel: its replicas, or one if they run as one."""
        return 1 if self.one_program(fragment) else self.distribution.fragment(fragment).replicas

    def bytes_of(self, channel: Channel) -> int:
        """Bytes that a channel moves in a tick."""
        values = [self.graph.values[v] for v in channel.values]
        return sum(v.nbytes * self._copies(channel, v) for v in values) * channel.times

    def _copies(self, channel: Channel, value: Value) -> int:
        """How often a value crosses: its rows once, else to each reader, or to be agreed on."""
        if value.axis is not None:
            return 1
        writers = self.distribution.fragment(channel.writer).replicas
        return writers if value.part and writers > 1 else self.endpoints(channel.reader)

    def __str__(self) -> str:
        return plan_text(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data."""
        return plan_json(self)


def draw_plan(graph: Graph, distribution: DistributionPolicy, cluster: Cluster) -> Plan:
    """How `graph` would run on `cluster` when distributed by `distribution`; no law checked yet."""
    opened, stages = assign_stages(check_graph(graph), distribution)
    sites = Sites(opened, split_loops(opened, stages))
    homes = place_glue(sites, stages, distribution)
    channels, programs = project(sites, homes, distribution)
    placed = place(distribution, cluster)
    return Plan(sites, distribution, cluster, homes, channels, programs, placed)


def split_loops(graph: Graph, stages: Mapping[str, str]) -> frozenset[str]:
    """Loops that come apart: their stages live in several fragments, or on the host."""
    return frozenset(loop.name for loop in loops(graph) if _comes_apart(loop, stages))


def _comes_apart(loop: Loop, stages: Mapping[str, str]) -> bool:
    inside = list(Graph((), (), (loop,)).stages)
    return len({stages[s.name] for s in inside}) > 1 or any(s.host for s in inside)
