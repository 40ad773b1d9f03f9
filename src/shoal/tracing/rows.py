"""Which values have a row for every environment, and which would differ between replicas.

The loop is walked as if every stage ran on replicas that each hold some of the environments. What
is carried has rows if its shape follows the number of environments; all else follows from the
operations. A cut is judged by a walk of its own, fragment by fragment (`planning/spread.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    Sharded,
    Varying,
    in_node,
    inside,
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
    return _fold_rows(replace(graph, values=values), envs)


def _value(value: Value, layout: Layout, twin: Value | None, envs: int) -> Value:
    found = replace(value, layout=layout)
    if isinstance(layout, Sharded) and not found.differs:
        return replace(found, axis=layout.axis)
    axis = axis_of(value.shape, twin.shape, envs) if twin and found.differs else None
    return replace(found, axis=axis)


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


def _fold_rows(graph: Graph, envs: int) -> Graph:
    """`graph` whose stages read and write several rows an environment by way of what can cross.

    A value with 2n rows, say, can't be divided among replicas along its axis. One of n times 2
    can, so a stage per environment gets it from such a one, and makes such a one of its own.
    """
    values = dict(graph.values)

    def folded(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        found: list[Node] = []
        for node in nodes:
            match node:
                case Loop():
                    found.append(
                        replace(node, body=replace(node.body, nodes=folded(node.body.nodes)))
                    )
                case Stage(per="env", host=False):
                    found += _Folded(values, envs).stage(node)
                case _:
                    found.append(node)
        return tuple(found)

    return replace(graph, nodes=folded(graph.nodes), values=values)


@dataclass(frozen=True, slots=True)
class _Folded:
    """Names values in the table that stand between a stage and those of several rows."""

    values: dict[str, Value]
    envs: int

    def stage(self, stage: Stage) -> list[Node]:
        """A stage, and the operations before and after it."""
        before, after, code = list[Node](), list[Node](), stage.code
        args, outs = list(code.args), list(code.outs)
        for names, variables in ((args, code.equation.invars), (outs, code.equation.outvars)):
            for i, (name, variable) in enumerate(zip(names, variables, strict=True)):
                if not isinstance(name, str) or not self._has_several(name):
                    continue
                own = self._new(f"{name}.{stage.name}", self.values[name])
                names[i] = own
                if names is args:
                    before += self._fold(name, own, variable.aval.dtype, stage)
                else:
                    after += self._fold(own, name, variable.aval.dtype, stage)
        reads = tuple(dict.fromkeys(a for a in args if isinstance(a, str)))
        writes = tuple(o for o in outs if o is not None)
        code = replace(code, args=tuple(args), outs=tuple(outs))
        return [*before, replace(stage, reads=reads, writes=writes, code=code), *after]

    def _has_several(self, name: str) -> bool:
        return self.values[name].has_rows and self.values[name].differs

    def _fold(self, old: str, new: str, dtype: Any, stage: Stage) -> list[Node]:
        """Operations that make one value of another of its shape, by way of one that can cross."""
        value, layout = self.values[old], self.values[old].layout
        assert isinstance(layout, Sharded)
        before, after = ([n] if n > 1 else [] for n in (layout.before, layout.after))
        at, rest = value.shape[: layout.axis], value.shape[layout.axis + 1 :]
        shape = (*at, *before, self.envs, *after, *rest)
        axis = layout.axis + len(before)
        rows = replace(value, shape=shape, axis=axis, layout=Sharded(axis))
        middle = self._new(f"{old}.rows", rows)
        return [
            self._reshaped(old, middle, dtype, stage), self._reshaped(middle, new, dtype, stage)
        ]  # fmt: skip

    def _reshaped(self, old: str, new: str, dtype: Any, stage: Stage) -> Glue:
        spec = jax.ShapeDtypeStruct(self.values[old].shape, dtype)
        shape = self.values[new].shape
        (equation,) = jax.make_jaxpr(lambda x: lax.reshape(x, shape))(spec).eqns
        code = replace(stage.code, equation=equation, args=(old,), outs=(new,))
        return Glue(f"fold.{new}", "reshape", (old,), (new,), stage.source, code)

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
