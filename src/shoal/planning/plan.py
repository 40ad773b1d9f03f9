"""A plan: fragments x replicas x places x channels, as plain data; and the passes that make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shoal.errors import CutError
from shoal.graph.ir import Graph, Loop, Node, Stage, Value, leaves, loops
from shoal.graph.layout import REPLICATED, Layout, Partial, Varying
from shoal.graph.rules import check_graph
from shoal.planning.assign import assign_stages
from shoal.planning.cluster import Cluster, Place, place, starting
from shoal.planning.glue import place_glue
from shoal.planning.homes import Homes, Sites, agrees
from shoal.planning.policy import (
    DistributionPolicy,
    Latest,
    Lockstep,
    Queue,
    Serve,
    takes_some,
)
from shoal.planning.program import Channel, Instruction, project
from shoal.planning.show import plan_json, plan_text
from shoal.planning.spread import Spread, spread_out

MOST_COPIED = 2**28  # bytes of carried state; of more, no copy is kept

Replica = tuple[str, int]  # a fragment, and which of its endpoints
WorkerId = tuple[str, int]  # a fragment, and which of its workers


@dataclass(frozen=True)
class Plan:
    """How a graph runs: the places of sites, the channels, and each fragment's program."""

    sites: Sites
    distribution: DistributionPolicy
    cluster: Cluster
    homes: Homes
    channels: tuple[Channel, ...]
    programs: Mapping[str, tuple[Instruction, ...]]
    places: Mapping[str, tuple[Place, ...]]
    apart: bool = False  # replicas that agree run each in a process of its own
    # What fragments run where the plan was loaded from a file, by name and `apart`.
    saved: Mapping[tuple[str, bool], Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def lowered(self) -> dict[str, Any]:
        """The programs of fragments that this process has run, for the next run of this plan."""
        return {}

    @cached_property
    def over_processes(self) -> Plan:
        """The same plan with a process for each replica of those that agree."""
        return replace(self, apart=True)

    @property
    def graph(self) -> Graph:
        """The graph that runs."""
        return self.sites.graph

    def nodes(self, fragment: str) -> list[Node]:
        """The sites of a fragment, in order."""
        return [n for n in self.sites.nodes.values() if fragment in self.homes[n.name]]

    def one_program(self, fragment: str) -> bool:
        """Whether a fragment's replicas agree inside it, and so run as one program over them."""
        many = self.distribution.ends(fragment) > 1
        return many and any(agrees(node) for node in self.nodes(fragment))

    def ends(self, fragment: str) -> int:
        """How many endpoints a fragment has on a channel: its shares, or one if they run as one."""
        alone = self.one_program(fragment) and not self.apart
        return 1 if alone else self.distribution.ends(fragment)

    def workers(self, fragment: str) -> int:
        """How many workers run a fragment's endpoints."""
        alone = self.one_program(fragment) and not self.apart
        return 1 if alone else self.distribution.fragment(fragment).most

    def starting(self, fragment: str) -> int:
        """How many replicas a fragment starts with; more may be added later."""
        return starting(self.distribution.fragment(fragment), self.distribution, self.cluster)

    def ends_of(self, fragment: str, worker: int) -> range:
        """The endpoints that one of a fragment's workers runs."""
        each = self.ends(fragment) // self.workers(fragment)
        return range(worker * each, (worker + 1) * each)

    def place_of(self, fragment: str, end: int) -> Place:
        """The place of an endpoint."""
        each = self.ends(fragment) // self.workers(fragment)
        return self.places[fragment][end // each]

    def leaves_host(self, channel: Channel) -> bool:
        """Whether a channel has endpoints on several hosts."""
        ends = self.places[channel.writer] + self.places[channel.reader]
        return len({place.host for place in ends}) > 1

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """Asynchronous fragments: their reader takes the first replicas to arrive, or is absent.

        Observers have none: nothing waits for them.
        """
        found = {c.writer for c in self.channels if takes_some(c.flow)} | self.observers
        return frozenset().union(*(self.in_step(fragment) for fragment in found))

    def in_step(self, fragment: str) -> frozenset[str]:
        """The fragments in lockstep with a fragment, itself included."""
        found = {fragment}
        for _ in self.channels:
            for c in self.channels:
                if isinstance(c.flow, Lockstep | Serve) and {c.writer, c.reader} & found:
                    found |= {c.writer, c.reader}
        return frozenset(found)

    @cached_property
    def observers(self) -> frozenset[str]:
        """Fragments that read only the newest values, however old, and that have no reader."""
        looks = {c.reader for c in self.channels if c.flow == Latest(None)}
        waits = {c.reader for c in self.channels if c.flow != Latest(None)}
        return frozenset(looks - waits - {c.writer for c in self.channels})

    @cached_property
    def replaceable(self) -> frozenset[str]:
        """Asynchronous fragments whose endpoints can be restarted while the rest continues.

        They read only the newest values, and their reader takes the first to arrive. Fragments
        in lockstep with each other are so endpoint by endpoint, and restart as a group.
        """
        some = {c.writer for c in self.channels if takes_some(c.flow)}
        found = [f for f in self.asynchronous if f in self.observers or some <= self.in_step(f)]
        return frozenset(f for f in found if self._is_loose(self.in_step(f)))

    def _is_loose(self, group: frozenset[str]) -> bool:
        """Whether fragments in lockstep wait for no others, and each endpoint only for its own."""
        own = [c for c in self.channels if {c.writer, c.reader} & group]
        inside = [c for c in own if {c.writer, c.reader} <= group]
        taken = [c.flow for c in own if c not in inside and c.reader in group]
        sent = [c.flow for c in own if c not in inside and c.writer in group]
        return (
            not any(self.one_program(fragment) for fragment in group)
            and all(isinstance(flow, Latest) for flow in taken)
            and all(isinstance(flow, Latest) or takes_some(flow) for flow in sent)
            and all(self._is_end_by_end(channel) for channel in inside)
        )

    def _is_end_by_end(self, channel: Channel) -> bool:
        """Whether endpoint i of the reader takes from endpoint i of the writer alone."""
        stacked = any(self.is_stacked(channel.writer, value) for value in channel.values)
        as_many = self.ends(channel.writer) == self.ends(channel.reader)
        at_once = channel.flow == Lockstep() or isinstance(channel.flow, Serve)
        return as_many and at_once and not stacked

    def batch(self, fragment: str) -> int:
        """How many environments all endpoints of a fragment see together in a tick."""
        for c in self.channels:
            if c.reader == fragment and isinstance(c.flow, Queue) and c.flow.take != "all":
                return self.graph.envs * c.flow.take // self.ends(c.writer)
        return self.graph.envs

    @property
    def seen(self) -> int:
        """How many environments' values a tick of the whole plan uses."""
        return min(self.batch(f.name) for f in self.distribution.fragments)

    @cached_property
    def world(self) -> Sites:
        """The loop whose numbers a tick gives: with as many environments as a tick uses."""
        if self.seen == self.graph.envs:
            return self.sites
        graph = assign_stages(self.graph.origin.annotated(self.seen), self.distribution)[0]
        mine, others = self.graph.values, graph.values
        same = mine.keys() == others.keys() and all(mine[v].axis == others[v].axis for v in mine)
        if not same:
            raise CutError(
                f"tick does other work with the {self.seen} environments that are taken at a time "
                f"than with all {self.graph.envs}",
                "Don't branch in Python on the number of environments, "
                "or use a distribution policy that takes all replicas.",
            )
        return Sites(graph, self.sites.opened)

    def shares(self, fragment: str) -> int:
        """Over how many of a fragment's endpoints the environments of a tick are divided."""
        ends = self.distribution.ends(fragment)
        return ends * self.seen // self.graph.envs if fragment in self.asynchronous else ends

    @cached_property
    def spread(self) -> Spread:
        """How every value lies over the replicas of every fragment."""
        shares = {f.name: max(1, self.shares(f.name)) for f in self.distribution.fragments}
        return spread_out(self.world, self.homes, self.channels, shares)

    def layout(self, fragment: str, value: str) -> Layout:
        """How a value lies over the replicas of a fragment that makes it."""
        return self.spread.layouts.get((fragment, value), REPLICATED)

    @property
    def approximate(self) -> tuple[str, ...]:
        """The lines of the loop at which several replicas agree only approximately."""
        found = [
            line
            for name, findings in self.spread.findings.items()
            if self.shares(name) > 1
            for line in findings.approximate
        ]
        return tuple(dict.fromkeys(found))

    def is_stacked(self, writer: str, value: str) -> bool:
        """Whether a value crosses as one from each replica, because replicas differ on it."""
        return isinstance(self.layout(writer, value), Partial | Varying)

    def bytes_of(self, channel: Channel) -> int:
        """Bytes that a channel moves in a tick."""
        values = [self.graph.values[v] for v in channel.values]
        return sum(v.nbytes * self._copies(channel, v) for v in values) * channel.times

    def _copies(self, channel: Channel, value: Value) -> int:
        """How often a value crosses: its rows once, else to each reader, or to be agreed on."""
        if value.axis is not None:
            return 1
        if self.is_stacked(channel.writer, value.name):
            return self.distribution.ends(channel.writer)
        return self.ends(channel.reader)

    @property
    def is_copied(self) -> bool:
        """Whether the carried state is small enough to keep copies of, for rollbacks."""
        changed = [self.graph.values[b] for b, a in self.graph.carry if a != b]
        return sum(v.nbytes for v in changed) <= MOST_COPIED

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
    inside = [n for n in leaves(Graph((), (), (loop,))) if n.name in stages]
    hosts = any(isinstance(n, Stage) and n.host for n in inside)
    return len({stages[n.name] for n in inside}) > 1 or hosts
