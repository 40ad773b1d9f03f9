"""Which values have a row for every environment, and which would differ between replicas.

The loop is traced at two environment counts. Both traces are walked side by side; every value is
`SAME` (no matter which environments a replica holds), has rows along an axis (an int), or is
`PART` (depends on the environments a replica holds, with no rows to tell them apart). An operation
that isn't known to keep rows apart makes `PART`: a wrong answer could only forbid a cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from shoal.errors import TraceError
from shoal.graph.ir import Agree, Glue, Graph, Loop, Node, Stage, Value, leaves
from shoal.tracing.jaxprs import Fixed, Ref, place_of
from shoal.tracing.keep import (
    PART,
    SAME,
    Rowless,
    State,
    flow,
    inside,
    join,
    outside,
    same_number,
)
from shoal.tracing.stage import are_rows

_MOST_TURNS = 16


def annotate(graph: Graph, wide: Graph, envs: int) -> Graph:
    """`graph` with the environment axis of every value, found by comparing it with `wide`."""
    if [n for n in graph.values] != [n for n in wide.values]:
        raise other_work(graph, wide, envs)
    walk = Walk(graph.values, wide.values, envs)
    walk.states.update({name: walk.by_shape(name) for name in graph.inputs})
    walk.nodes(graph.nodes, wide.nodes)
    values = {name: walk.value(value) for name, value in graph.values.items()}
    return replace(graph, values=values, nodes=walk.marked(graph.nodes))


def other_work(graph: Graph, wide: Graph, envs: int) -> TraceError:
    """The error for a loop that isn't the same at both environment counts."""
    few, many = sorted((list(leaves(graph)), list(leaves(wide))), key=len)
    odd = next((b for a, b in zip_longest(few, many) if not a or a.name != b.name), None)
    return TraceError(
        f"tick does other work with {2 * envs} environments than with {envs}",
        "Don't branch in Python on the number of environments, "
        "or do it in a stage that isn't replicated.",
        odd.source if odd else "",
    )


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk over two traces of one loop; what it finds out fills the tables as it goes."""

    narrow: Mapping[str, Value]
    wide: Mapping[str, Value]
    envs: int
    states: dict[str, State] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    draws: dict[str, str] = field(default_factory=dict)

    def by_shape(self, name: str) -> State:
        """A value's state as far as its two shapes tell."""
        return axis_of(self.narrow[name].shape, self.wide[name].shape, self.envs)

    def value(self, value: Value) -> Value:
        """`value` with what the walk found out about it."""
        state, shape = self.states.get(value.name, PART), self.by_shape(value.name)
        axis = shape if isinstance(shape, int) and state is not SAME else None
        return replace(value, axis=axis, part=state == PART, cause=self.causes.get(value.name, ""))

    def enter(self, name: str, state: State, cause: str) -> None:
        """Note what a value is; where a loop comes round, the first cause stays."""
        self.states[name] = state
        if state is PART and cause:
            self.causes.setdefault(name, cause)

    def nodes(self, nodes: tuple[Node, ...], wides: tuple[Node, ...]) -> None:
        """Walk over nodes in order."""
        for node, wide in zip(nodes, wides, strict=True):
            match node, wide:
                case Loop(), Loop():
                    self.loop(node, wide)
                case Stage(body=Graph() as inner), Stage(body=Graph() as other):
                    self.nodes(inner.nodes, other.nodes)
                case _:
                    self.leaf(node, wide)

    def leaf(self, node: Any, wide: Any) -> None:
        """Walk over one node without nodes inside."""
        seen = [self.state(a, b) for a, b in zip(node.code.args, wide.code.args, strict=True)]
        if isinstance(node, Stage) and node.per == "env":
            states: list[State] = [_by_rows(node, seen)] * len(node.code.outs)
        elif isinstance(node, Stage) and node.host:
            states = [PART for _ in node.code.outs]
        elif node.code.equation is None:
            states = list(seen)
        else:
            drawn: list[Any] = []
            states = flow(node.code.equation, wide.code.equation, seen, drawn)
            if drawn:
                self.draws[node.name] = place_of(drawn[0]) or node.source or "tick"
        spoilt = [str(a) for a, s in zip(node.code.args, seen, strict=True) if s is PART]
        cause = next((self.causes[a] for a in spoilt if a in self.causes), node.name)
        for out, state in zip(node.code.outs, states, strict=True):
            if out is not None:
                known = isinstance(state, Rowless) or self.by_shape(out) == state
                self.enter(out, state if known else PART, cause)

    def loop(self, loop: Loop, wide: Loop) -> None:
        """Walk over a loop until the states of what it carries settle."""
        for link in loop.slices:
            state = inside(self.states[link.outer])
            self.enter(link.inner, state, self.causes.get(link.outer, loop.name))
        for carry in loop.carries:
            self.enter(carry.before, self.states[carry.first], self.causes.get(carry.first, ""))
        for _ in range(_MOST_TURNS):
            self.nodes(loop.body.nodes, wide.body.nodes)
            before = [self.states[c.before] for c in loop.carries]
            after = [
                join(b, self.states[c.after]) for b, c in zip(before, loop.carries, strict=True)
            ]
            if before == after:
                break
            for carry, state in zip(loop.carries, after, strict=True):
                self.enter(carry.before, state, self.causes.get(carry.after, loop.name))
        for carry in loop.carries:
            self.enter(carry.final, self.states[carry.before], self.causes.get(carry.before, ""))
        for link in loop.stacks:
            state = outside(self.states[link.inner])
            self.enter(link.outer, state, self.causes.get(link.inner, ""))

    def state(self, ref: Ref, wide: Ref) -> State:
        """The state of an argument; a number that follows the environment count is `PART`."""
        if isinstance(ref, Fixed) and isinstance(wide, Fixed):
            return SAME if same_number(ref.value, wide.value) else PART
        return self.states[str(ref)]

    def marked(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """`nodes` with the places where they draw from a key that replicas would share."""
        return tuple(self.mark(node) for node in nodes)

    def mark(self, node: Node) -> Node:
        """One node, marked; see `marked`."""
        match node:
            case Loop():
                return replace(node, body=replace(node.body, nodes=self.marked(node.body.nodes)))
            case Stage(body=Graph() as body):
                return replace(node, body=replace(body, nodes=self.marked(body.nodes)))
            case Stage() | Glue():
                return replace(node, draws=self.draws.get(node.name, ""))
            case Agree():
                return node


def _by_rows(node: Any, seen: list[State]) -> State:
    """What a stage per environment makes: rows, if rows are all it gets of the environments."""
    if all(s == SAME for s in seen):
        return SAME
    rows = are_rows(node.code.label, len(seen))
    apart = all(s == (0 if is_row else SAME) for s, is_row in zip(seen, rows, strict=True))
    return 0 if apart else PART


def axis_of(narrow: tuple[int, ...], wide: tuple[int, ...], envs: int) -> State:
    """The axis along which two shapes follow the environment count."""
    moved = [i for i, (a, b) in enumerate(zip(narrow, wide, strict=True)) if a != b]
    if not moved:
        return SAME
    (first, *more) = moved
    clean = not more and narrow[first] == envs and wide[first] == 2 * envs
    return first if clean else PART
