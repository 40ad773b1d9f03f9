"""Which values have a row for every environment, and which would differ between replicas.

The loop is walked as if every stage ran on replicas that each hold some of the environments. What
is carried has rows if its shape follows the number of environments; all else follows from the
operations. A cut is judged by a walk of its own, fragment by fragment (`planning/spread.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import jax
from jax import lax

from shoal.graph.ir import Glue, Graph, Loop, Node, Stage, Value, leaves
from shoal.graph.layout import (
    REPLICATED,
    Findings,
    Layout,
    Partial,
    Replicated,
    Sharded,
    Varying,
    in_node,
    inside,
    is_exact,
    join,
    outside,
)


def annotate(graph: Graph, carried: Mapping[str, int], wide: Graph | None, envs: int) -> Graph:
    """`graph` with the environment axis of every value; `carried` are the axes of its inputs.

    `wide` is the loop with twice as many environments, if it does the same work then: where
    environments are mixed, shapes that follow their number show that there are rows again.
    """
    twins = wide.values if wide is not None and list(wide.values) == list(graph.values) else {}
    axes = {name: axis_of(graph.values[name].shape, x.shape, envs) for name, x in twins.items()}
    kept = {after: carried[name] for name, after in graph.carry if name in carried}
    walk = Walk(envs, axes, kept)
    for name in graph.inputs:
        walk.layouts[name] = Sharded(carried[name]) if name in carried else REPLICATED
    walk.nodes(graph.nodes)
    values = {
        name: _value(value, walk.layouts.get(name, REPLICATED), axes.get(name))
        for name, value in graph.values.items()
    }
    # What a host stage reads by rows crosses and is kept by rows, also where all rows are alike.
    for name in (v for node in leaves(graph) for v in node.code.rows_for_host):
        values[name] = replace(values[name], axis=0)
    return _by_rows(replace(graph, values=values), envs)


def _value(value: Value, layout: Layout, axis: int | None) -> Value:
    found = replace(value, layout=layout)
    if isinstance(layout, Sharded) and not found.differs:
        return replace(found, axis=layout.axis)
    return replace(found, axis=axis if found.differs else None)


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk over a graph; what it finds out fills the table as it goes."""

    envs: int
    axes: Mapping[str, int | None] = field(default_factory=dict)  # by shape, where they are known
    kept: Mapping[str, int] = field(default_factory=dict)  # axes of rows, also where all are alike
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
        known = self.layouts
        if isinstance(node, Stage):
            known = {v: self._exactly(v) for v in node.reads}
        try:
            outs = node.code.layouts(known, self.envs, Findings())
        except Exception:  # a cut of what can't be analysed is refused, with its line
            outs = dict.fromkeys(node.writes, Varying())
        for name, layout in outs.items():
            if name in self.kept and isinstance(layout, Replicated):
                layout = Sharded(self.kept[name])
            self.layouts[name] = in_node(layout, node.name, node.source)

    def _exactly(self, value: str) -> Layout:
        """How a stage reads a value: glue before it can run where all rows are."""
        layout = self.layouts[value]
        if not isinstance(layout, Partial) and is_exact(layout):
            return layout
        if value not in self.axes:
            return layout
        axis = self.axes[value]
        return REPLICATED if axis is None else Sharded(axis)

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


def _by_rows(graph: Graph, envs: int) -> Graph:
    """`graph` in which what has rows where it is used can also cross between fragments by rows.

    A value with 2n rows, say, can't be divided among replicas along its axis. One of n times 2
    can, so a stage per environment gets it from such a one, and makes such a one of its own. What
    a loop carries by rows starts from rows, also where all replicas could have the whole.
    """
    rows = _Rows(dict(graph.values), envs)
    return replace(graph, nodes=tuple(rows.nodes(graph.nodes)), values=rows.values)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Puts operations beside stages and loops, and the values that these make into the table."""

    values: dict[str, Value]
    envs: int

    def nodes(self, nodes: tuple[Node, ...]) -> Iterator[Node]:
        """Nodes, and between them what is put there."""
        for node in nodes:
            match node:
                case Loop():
                    yield from self.loop(node)
                case Stage(per="env", host=False):
                    yield from self.stage(node)
                case _:
                    yield node

    def loop(self, loop: Loop) -> Iterator[Node]:
        """A loop whose carried rows start from rows."""
        args, carries = list(loop.code.args), list(loop.carries)
        first = len(args) - len(loop.slices) - len(carries)
        for i, carry in enumerate(carries):
            axis = self.values[carry.before].axis
            if carry.unchanged or axis is None or self.values[carry.first].axis is not None:
                continue
            value = replace(self.values[carry.first], axis=axis, layout=Sharded(axis))
            name = args[first + i] = self._new(f"{carry.first}.rows", value)
            carries[i] = replace(carry, first=name)
            code = replace(loop.code, equation=None, args=(carry.first,), outs=(name,))
            yield Glue(f"rows.{name}", "copy", (carry.first,), (name,), loop.source, code)
        body = replace(loop.body, nodes=tuple(self.nodes(loop.body.nodes)))
        code = replace(loop.code, args=tuple(args))
        yield replace(loop, body=body, carries=tuple(carries), code=code)

    def stage(self, stage: Stage) -> Iterator[Node]:
        """A stage, and the operations before and after it."""
        equation, args, outs = stage.code.equation, list(stage.code.args), list(stage.code.outs)
        for i, variable in enumerate(equation.invars):
            if self._has_several(name := args[i]):
                args[i] = self._new(f"{name}.{stage.name}", self.values[name])
                yield from self._folded(name, args[i], variable.aval.dtype, stage)
        after = list[Node]()
        for i, variable in enumerate(equation.outvars):
            if self._has_several(name := outs[i]):
                outs[i] = self._new(f"{name}.{stage.name}", self.values[name])
                after += self._folded(outs[i], name, variable.aval.dtype, stage)
        reads = tuple(dict.fromkeys(a for a in args if isinstance(a, str)))
        writes = tuple(o for o in outs if o is not None)
        code = replace(stage.code, args=tuple(args), outs=tuple(outs))
        yield replace(stage, reads=reads, writes=writes, code=code)
        yield from after

    def _has_several(self, name: Any) -> bool:
        """Whether `name` is a value with several rows for each environment."""
        value = self.values.get(name) if isinstance(name, str) else None
        if value is None or not isinstance(value.layout, Sharded):
            return False
        return value.has_rows and value.differs and value.layout.group == 1

    def _folded(self, old: str, new: str, dtype: Any, stage: Stage) -> Iterator[Node]:
        """Operations that make one value of another of its shape, by way of one that can cross."""
        value, layout = self.values[old], self.values[old].layout
        assert isinstance(layout, Sharded)
        before, after = ([n] if n > 1 else [] for n in (layout.before, layout.after))
        at, rest = value.shape[: layout.axis], value.shape[layout.axis + 1 :]
        shape = (*at, *before, self.envs, *after, *rest)
        axis = layout.axis + len(before)
        middle = replace(value, shape=shape, axis=axis, layout=Sharded(axis))
        rows = self._new(f"{old}.rows", middle)
        for name, made in ((old, rows), (rows, new)):
            spec = jax.ShapeDtypeStruct(self.values[name].shape, dtype)
            to = self.values[made].shape
            (equation,) = jax.make_jaxpr(lambda x, to=to: lax.reshape(x, to))(spec).eqns
            code = replace(stage.code, equation=equation, args=(name,), outs=(made,))
            yield Glue(f"rows.{made}", "reshape", (name,), (made,), stage.source, code)

    def _new(self, base: str, value: Value) -> str:
        name = next(n for n in (f"{base}{'#' * i}" for i in count()) if n not in self.values)
        self.values[name] = replace(value, name=name)
        return name


def axis_of(narrow: tuple[int, ...], wide: tuple[int, ...], envs: int) -> int | None:
    """The axis along which two shapes follow the environment count."""
    if len(narrow) != len(wide):
        return None
    moved = [i for i, (a, b) in enumerate(zip(narrow, wide, strict=True)) if a != b]
    clean = len(moved) == 1 and (narrow[moved[0]], wide[moved[0]]) == (envs, 2 * envs)
    return moved[0] if clean else None
