"""The intermediate representation of a traced loop: values, nodes and graphs, as frozen data.

A graph's nodes are in an order in which they can run. Names are unique in the whole graph,
bodies of loops included, so a value is its name. The only cycle is the carry: output i of a graph
is input i of its next turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.graph.layout import REPLICATED, Layout, Replicated, Sharded, is_exact


@dataclass(frozen=True, slots=True)
class Value:
    """An array that flows between nodes.

    `axis` is the environment axis. `layout` says how the value would lie over replicas that
    each held some of the environments.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    axis: int | None = None
    layout: Layout = REPLICATED

    @property
    def has_rows(self) -> bool:
        """Whether replicas would have the value's rows, also if several for each environment."""
        return isinstance(self.layout, Sharded) and is_exact(self.layout)

    @property
    def differs(self) -> bool:
        """Whether replicas would differ on it, and it can't cross row by row."""
        plain = isinstance(self.layout, Sharded) and self.layout.is_plain and self.has_rows
        return not plain and not isinstance(self.layout, Replicated)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value, all environments included."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Stage:
    """One use of a marked function."""

    name: str
    stage: str
    per: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    source: str = ""
    host: bool = False
    on_policy: str = ""  # the fix to show where a lag is requested; "": a lag is allowed
    agrees: bool = False
    body: Graph | None = None
    role: str = ""  # `env`: it steps environments
    code: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Glue:
    """An operation between stages."""

    name: str
    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    source: str = ""
    code: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """A `lax.cond` or `while_loop` that holds stages; all of them run where it does."""

    name: str
    op: str
    stages: tuple[Stage, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    source: str = ""
    agrees: bool = False
    code: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Agree:
    """Where replicas agree between stages: the mean, or all rows, of one value."""

    name: str
    how: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    source: str = ""
    code: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Loop:
    """A `lax.scan` that holds stages; its body reads outer values by their own names."""

    name: str
    length: int
    reverse: bool
    body: Graph
    carries: tuple[Carry, ...]
    slices: tuple[Link, ...]
    stacks: tuple[Link, ...]
    source: str = ""
    code: Any = field(default=None, repr=False, compare=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """Outer values that the loop reads, the ones its body names included."""
        inner = {v for node in self.body.nodes for v in node.reads} - self.body.made
        # To run as it was traced it also needs arguments that it never uses.
        inner |= {a for a in getattr(self.code, "args", ()) if isinstance(a, str)}
        first = [c.first for c in self.carries] + [link.outer for link in self.slices]
        return tuple(dict.fromkeys([*first, *sorted(inner)]))

    @property
    def writes(self) -> tuple[str, ...]:
        """Outer values that the loop makes."""
        return (*(c.final for c in self.carries), *(link.outer for link in self.stacks))


@dataclass(frozen=True, slots=True)
class Carry:
    """State of a loop: `first` enters, the body turns `before` into `after`, `final` leaves."""

    first: str
    before: str
    after: str
    final: str

    @property
    def unchanged(self) -> bool:
        """Whether the body returns the value unchanged."""
        return self.before == self.after


@dataclass(frozen=True, slots=True)
class Link:
    """An outer array and its slice of one turn."""

    outer: str
    inner: str


Node = Stage | Glue | Agree | Choice | Loop


@dataclass(frozen=True, slots=True)
class Graph:
    """A loop, or the body of one: nodes in a runnable order, and the carry."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, Value] = field(default_factory=dict)
    metrics: tuple[Link, ...] = ()
    envs: int = 0
    title: str = ""
    origin: Any = field(default=None, repr=False, compare=False)

    @property
    def made(self) -> frozenset[str]:
        """Names of values that exist only inside: inputs and what nodes write."""
        return frozenset([*self.inputs, *(w for n in self.nodes for w in n.writes)])

    @property
    def carry(self) -> tuple[tuple[str, str], ...]:
        """Pairs of an input and the output that becomes it in the next turn."""
        return tuple(zip(self.inputs, self.outputs, strict=False))

    def __str__(self) -> str:
        from shoal.graph.show import graph_text

        return graph_text(self)

    def to_json(self) -> dict[str, Any]:
        """The graph as plain JSON data."""
        from shoal.graph.show import graph_json

        return graph_json(self)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Every use of a stage, loops and choices included, nested stages not."""
        return tuple(stage for node in leaves(self) for stage in _stages_of(node))


def _stages_of(node: Node) -> tuple[Stage, ...]:
    return node.stages if isinstance(node, Choice) else (node,) if isinstance(node, Stage) else ()


def leaves(graph: Graph) -> Iterator[Node]:
    """Every node of `graph` and of its loops' bodies, in order; loops themselves not."""
    for node in graph.nodes:
        if isinstance(node, Loop):
            yield from leaves(node.body)
        else:
            yield node


def loops(graph: Graph) -> Iterator[Loop]:
    """Every loop of `graph`, outer ones before inner ones."""
    for node in graph.nodes:
        if isinstance(node, Loop):
            yield node
            yield from loops(node.body)


def nested_stages(graph: Graph) -> Iterator[tuple[str, Stage]]:
    """Every use of a stage with its full name (`learn/grad`), outer ones first."""
    for stage in graph.stages:
        yield stage.stage, stage
        if stage.body is not None:
            for name, inner in nested_stages(stage.body):
                yield f"{stage.stage}/{name}", inner
