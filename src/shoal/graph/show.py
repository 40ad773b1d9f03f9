"""A graph as a text table, and as plain JSON data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.graph.ir import Agree, Choice, Glue, Graph, Loop, Node, Stage, Value
from shoal.graph.words import count_text, name_text, size_text

Json = dict[str, Any]


def graph_text(graph: Graph) -> str:
    """Every stage, loop and agreement in order, with what it reads and writes."""
    head = ("node", "per", "reads", "writes", "source")
    rows = list(_rows(graph, graph.nodes, 0))
    carried = [graph.values[name] for name, after in graph.carry]
    lines = [f"{graph.title}: {count_text(graph.envs, 'environment')}", "", *table(head, rows), ""]
    lines.append(f"carried  {summary(carried, 12)}")
    lines.append(f"metrics  {', '.join(m.outer for m in graph.metrics)}")
    return "\n".join(lines)


def _rows(graph: Graph, nodes: Sequence[Node], depth: int) -> Iterator[tuple[str, ...]]:
    """A row for each node; runs of glue, and of agreements, share one."""
    indent, kept = "  " * depth, list(nodes)
    while kept:
        node = kept.pop(0)
        match node:
            case Loop():
                yield f"{indent}{_short(node)} x {node.length}", "", "", "", node.source
                yield from _rows(graph, node.body.nodes, depth + 1)
            case Stage():
                per = "host" if node.host else node.per
                reads, writes = ([graph.values[v] for v in vs] for vs in (node.reads, node.writes))
                yield f"{indent}{_short(node)}", per, summary(reads), summary(writes), node.source
                if node.body is not None:
                    yield from _rows(graph, node.body.nodes, depth + 1)
            case Choice():
                reads, writes = ([graph.values[v] for v in vs] for vs in (node.reads, node.writes))
                named = ", ".join(stage.stage for stage in node.stages)
                label = f"{indent}{node.op} of {named}"
                yield label, "choice", summary(reads), summary(writes), node.source
            case Agree() | Glue():
                run: list[Node] = [node]
                while kept and type(kept[0]) is type(node):
                    run.append(kept.pop(0))
                what = "replicas agree" if isinstance(node, Agree) else "glue"
                made = [graph.values[w] for n in run for w in n.writes]
                yield (
                    f"{indent}({what} x {len(run)})",
                    "",
                    "",
                    size_text(sum(v.nbytes for v in made)),
                    node.source,
                )


def _short(node: Node) -> str:
    return (
        node.name.rpartition("/")[2].partition("#")[0]
        if isinstance(node, Loop)
        else getattr(node, "stage", node.name)
    )


def summary(values: Sequence[Value], most: int = 3) -> str:
    """Values by the prefixes of their names, largest first, with their bytes."""
    sizes: dict[str, int] = {}
    for value in values:
        head = _head(name_text(value.name).rstrip("'"), 2)
        sizes[head] = sizes.get(head, 0) + value.nbytes
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in ordered[:most])
    return shown + (f" + {len(ordered) - most} more" if len(ordered) > most else "")


def _head(name: str, depth: int) -> str:
    parts = name.partition("#")[0].split(".")
    kept = parts[:depth]
    while len(kept) > 1 and kept[-1].isdigit():
        kept = kept[:-1]
    return ".".join(kept)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under a head, columns as wide as they need."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]


def graph_json(graph: Graph) -> Json:
    """The graph as plain JSON data."""
    values = {name: value_json(value) for name, value in graph.values.items()}
    body = _body_json(graph)
    metrics = {m.outer: m.inner for m in graph.metrics}
    return {"title": graph.title, "envs": graph.envs, "values": values, "metrics": metrics} | body


def value_json(value: Value) -> Json:
    """One value as plain data."""
    return {
        "shape": list(value.shape),
        "dtype": value.dtype,
        "bytes": value.nbytes,
        "axis": value.axis,
    }


def _body_json(graph: Graph) -> Json:
    nodes = [_node_json(node) for node in graph.nodes]
    return {"inputs": list(graph.inputs), "outputs": list(graph.outputs), "nodes": nodes}


def _node_json(node: Node) -> Json:
    common = {
        "name": node.name,
        "reads": list(node.reads),
        "writes": list(node.writes),
        "source": node.source,
    }
    match node:
        case Stage():
            own = {
                "kind": "stage",
                "stage": node.stage,
                "per": node.per,
                "host": node.host,
                "on_policy": bool(node.on_policy),
            }
            return own | common | ({"body": _body_json(node.body)} if node.body else {})
        case Choice():
            held = [stage.stage for stage in node.stages]
            return {"kind": "choice", "op": node.op, "stages": held} | common
        case Glue():
            return {"kind": "glue", "op": node.op} | common
        case Agree():
            return {"kind": "agree", "how": node.how} | common
        case Loop():
            return {"kind": "loop", "length": node.length, "body": _body_json(node.body)} | common
