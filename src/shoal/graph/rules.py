"""The rules of a valid graph, as a named list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.graph.ir import Graph, Loop, leaves, loops


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and the function that finds what breaks it."""

    name: str
    broken: Callable[[Graph], Iterator[str]]


def made_twice(graph: Graph) -> Iterator[str]:
    """Values that more than one node makes."""
    seen = set(graph.inputs)
    for node in leaves(graph):
        yield from (w for w in node.writes if w in seen)
        seen.update(node.writes)


def read_too_early(graph: Graph) -> Iterator[str]:
    """Values that a node reads before anything made them."""
    yield from _early(graph, set())


def _early(graph: Graph, known: set[str]) -> Iterator[str]:
    known = known | set(graph.inputs)
    for node in graph.nodes:
        if isinstance(node, Loop):
            yield from (c.first for c in node.carries if c.first not in known)
            yield from (link.outer for link in node.slices if link.outer not in known)
            yield from _early(node.body, known)
        else:
            yield from (f"{v} in {node.name}" for v in node.reads if v not in known)
        known = known | set(node.writes)
    yield from (v for v in graph.outputs if v not in known)


def carry_changes(graph: Graph) -> Iterator[str]:
    """Carried values whose next version has another shape or dtype."""
    pairs = [*graph.carry, *((c.before, c.after) for loop in loops(graph) for c in loop.carries)]
    for before, after in pairs:
        old, new = graph.values[before], graph.values[after]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            yield before


RULES = (
    Rule("Every value is made once", made_twice),
    Rule("Every value is made before it is read", read_too_early),
    Rule("What is carried keeps its spec", carry_changes),
)


def check_graph(graph: Graph) -> Graph:
    """Return `graph` if it keeps every rule; a violation is a bug in Shoal, not in the loop."""
    for rule in RULES:
        broken = list(rule.broken(graph))
        assert not broken, f"{rule.name}: {broken}"
    return graph
