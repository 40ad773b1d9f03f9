"""Which values have a row for every environment, and which would differ between replicas.

The loop is walked as if every stage ran on replicas that each hold some of the environments. What
is carried has rows if its shape follows the number of environments; all else follows from the
operations. A cut is judged by a walk of its own, fragment by fragment (`planning/spread.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.graph.ir import Graph, Loop, Node, Stage, Value, leaves
from shoal.graph.layout import (
    REPLICATED,
    Findings,
    Layout,
    Replicated,
    Sharded,
    Varying,
    cause_of,
    in_node,
    inside,
    is_exact,
    join,
    outside,
)


def annotate(graph: Graph, carried: Mapping[str, int], wide: Graph | None, envs: int) -> Graph:
    """`graph` with the environment axis of every value; `carried` are the axes of its inputs.

    `wide` is the loop with twice as many environments, if it does the same work then: where
    environments are mixed, shapes that follow their number tell that there are rows again.
    """
    walk = Walk(envs)
    for name in graph.inputs:
        walk.layouts[name] = Sharded(carried[name]) if name in carried else REPLICATED
    walk.nodes(graph.nodes)
    twins = wide.values if wide is not None and list(wide.values) == list(graph.values) else {}
    values = {
        name: _value(value, walk.layouts.get(name, REPLICATED), twins.get(name), envs)
        for name, value in graph.values.items()
    }
    # What a host stage reads by rows crosses and is kept by rows, also where all rows are alike.
    for name in (v for node in leaves(graph) for v in node.code.rows_for_host):
        values[name] = replace(values[name], axis=0)
    return replace(graph, values=values)


def _value(value: Value, layout: Layout, twin: Value | None, envs: int) -> Value:
    if isinstance(layout, Replicated):
        return value
    if isinstance(layout, Sharded) and layout.is_plain and is_exact(layout):
        return replace(value, axis=layout.axis)
    axis = axis_of(value.shape, twin.shape, envs) if twin else None
    return replace(value, axis=axis, part=True, cause=cause_of(layout).node)


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk over a graph; what it finds out fills the table as it goes."""

    envs: int
    layouts: dict[str, Layout] = field(default_factory=dict)

    def nodes(self, nodes: tuple[Node, ...]) -> None:
        """Walk over nodes in order."""
        for node in nodes:
            match node:
                case Loop():
                    self.loop(node)
                case Stage(body=Graph() as inner):
                    self.nodes(inner.nodes)
                case _:
                    self.leaf(node)

    def leaf(self, node: Any) -> None:
        """Walk over one node without nodes inside."""
        try:
            outs = node.code.layouts(self.layouts, self.envs, Findings())
        except Exception:  # a cut of what nobody foresaw is refused, and says so
            outs = dict.fromkeys(node.writes, Varying())
        for name, layout in outs.items():
            self.layouts[name] = in_node(layout, node.name, node.source)

    def loop(self, loop: Loop) -> None:
        """Walk over a loop until the layouts of what it carries settle."""
        table = self.layouts
        for link in loop.slices:
            table[link.inner] = inside(table[link.outer])
        for carry in loop.carries:
            table[carry.before] = table[carry.first]
        while True:
            self.nodes(loop.body.nodes)
            before = [table[c.before] for c in loop.carries]
            after = [join(b, table[c.after]) for b, c in zip(before, loop.carries, strict=True)]
            if before == after:
                break
            table.update({c.before: x for c, x in zip(loop.carries, after, strict=True)})
        table.update({c.final: table[c.before] for c in loop.carries})
        table.update({link.outer: outside(table[link.inner]) for link in loop.stacks})


def axis_of(narrow: tuple[int, ...], wide: tuple[int, ...], envs: int) -> int | None:
    """The axis along which two shapes follow the environment count."""
    if len(narrow) != len(wide):
        return None
    moved = [i for i, (a, b) in enumerate(zip(narrow, wide, strict=True)) if a != b]
    clean = len(moved) == 1 and (narrow[moved[0]], wide[moved[0]]) == (envs, 2 * envs)
    return moved[0] if clean else None
