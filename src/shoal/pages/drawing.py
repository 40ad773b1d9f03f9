"""Turns a graph or a plan, as plain data, into boxes and arrows, without their positions."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.graph.words import Json, Row, name_text, place_text, size_text, value_rows, what_text

Facts = tuple[tuple[str, str], ...]

TONES = 5


@dataclass(frozen=True, slots=True)
class Box:
    """A fragment, a loop, a stage, or a place where replicas agree; it may hold a drawing."""

    id: str
    kind: str
    label: str
    title: str
    facts: Facts = ()
    badge: str = ""
    note: str = ""
    tone: str = ""
    stack: bool = False
    source: str = ""
    inside: "Drawing | None" = None


@dataclass(frozen=True, slots=True)
class Arrow:
    """Values that go from one box to another; `weight` is the width of its line."""

    writer: str
    reader: str
    kind: str
    title: str
    facts: Facts
    values: tuple[Row, ...]
    lines: tuple[str, ...]
    bold: int
    weight: float
    tone: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes side by side and the arrows between them."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def draw_graph(graph: Json) -> Drawing:
    """The loop's stages in their loops; a dashed arrow is what the next turn reads."""
    return _draw_body(graph, graph["values"])


def draw_plan(plan: Json) -> Drawing:
    """The fragments with their stages inside, and the channels between them."""
    tones = fragment_tones(plan)
    boxes = tuple(_fragment_box(plan, fragment, tones) for fragment in plan["fragments"])
    return Drawing(boxes, tuple(_channel_arrow(plan, c, tones) for c in plan["channels"]))


def fragment_tones(plan: Json) -> dict[str, str]:
    """A colour for each fragment."""
    return {f["name"]: f"tone{i % TONES}" for i, f in enumerate(plan["fragments"])}


def nodes_of(body: Json, fragment: str, homes: Mapping[str, Sequence[str]]) -> list[Json]:
    """The part of a loop's body that `fragment` holds, with its part of the loops inside."""
    held = []
    for node in body["nodes"]:
        if node["name"] in homes:
            if {fragment, "*"} & set(homes[node["name"]]):
                held.append(node)
        elif inner := nodes_of(node["body"], fragment, homes):
            held.append({**node, "body": {**node["body"], "nodes": inner}})
    return held


def weight_of(count: float) -> float:
    """The width of an arrow that carries so many bytes."""
    return round(0.8 + 0.42 * math.log10(max(count, 10)), 2)


def _fragment_box(plan: Json, fragment: Json, tones: Mapping[str, str]) -> Box:
    name, replicas, graph = fragment["name"], fragment["replicas"], plan["graph"]
    nodes = nodes_of(graph, name, plan["homes"])
    places = place_text(fragment["places"])
    as_one = " as one" if fragment["one_program"] else ""
    facts = (("replicas", f"{replicas}{as_one}"), ("place", places))
    return Box(
        id=name,
        kind="fragment",
        label=name,
        title=f"fragment {name}",
        facts=(*facts, ("environments", f"{graph['envs'] // replicas} each")),
        badge=f"× {replicas}{as_one}",
        note=places,
        tone=tones[name],
        stack=replicas > 1,
        inside=_draw_body({**graph, "nodes": nodes}, graph["values"]),
    )


def _channel_arrow(plan: Json, channel: Json, tones: Mapping[str, str]) -> Arrow:
    values = [_named(name, plan["graph"]["values"]) for name in channel["values"]]
    times = channel["times"]
    a_tick = f"{times} times a tick" if times > 1 else "once a tick"
    how = [channel["kind"], channel["flow"] if channel["flow"] != "lockstep" else ""]
    how += [f"{times} a tick"] if times > 1 else []
    return Arrow(
        writer=channel["writer"],
        reader=channel["reader"],
        kind="channel",
        title=f"{channel['writer']} → {channel['reader']}",
        facts=(
            ("bytes a tick", size_text(channel["bytes"])),
            ("moves", f"{channel['kind']}, {a_tick}"),
            ("flow", channel["flow"]),
        ),
        values=value_rows(values),
        lines=(
            what_text(values),
            size_text(channel["bytes"]),
            " · ".join(filter(None, how)),
        ),
        bold=1,
        weight=weight_of(channel["bytes"]),
        tone=tones[channel["writer"]],
        name=channel["name"],
    )


def _draw_body(body: Json, values: Json) -> Drawing:
    boxes: dict[str, Box] = {}
    flows = _Flows(body["inputs"])
    for node in body["nodes"]:
        if node["kind"] == "glue":
            flows.pass_on(node)
        else:
            box = _box_of(node, values)
            boxes.setdefault(box.id, box)
            flows.enter(box.id, node)
    arrows = [
        _arrow(ends, kind, [_named(name, values) for name in names])
        for kind, found in (("made", flows.within), ("carried", flows.carried(_carry(body))))
        for ends, names in found.items()
    ]
    return Drawing(tuple(boxes.values()), tuple(arrows))


class _Flows:
    """The values that each box reads from each other box, through the glue between them."""

    def __init__(self, inputs: Iterable[str]) -> None:
        self.within: dict[tuple[str, str], list[str]] = {}
        self._makers: dict[str, set[str]] = defaultdict(set)
        self._inputs: dict[str, set[str]] = defaultdict(set, {name: {name} for name in inputs})
        self._readers: dict[str, set[str]] = defaultdict(set)

    def pass_on(self, glue: Json) -> None:
        """Attribute what glue writes to the boxes that made what it reads."""
        makers = set[str]().union(*(self._makers[name] for name in glue["reads"]))
        inputs = set[str]().union(*(self._inputs[name] for name in glue["reads"]))
        for name in glue["writes"]:
            self._makers[name], self._inputs[name] = makers, inputs

    def enter(self, box: str, node: Json) -> None:
        """Enter a node that is drawn as `box`."""
        for name in node["reads"]:
            for writer in sorted(self._makers[name] - {box}):
                names = self.within.setdefault((writer, box), [])
                names.extend([name] if name not in names else [])
            for source in self._inputs[name]:
                self._readers[source].add(box)
        for name in node["writes"]:
            self._makers[name], self._inputs[name] = {box}, set()

    def carried(self, carry: Iterable[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
        """The values that a turn carries to another box of the next turn."""
        flows: dict[tuple[str, str], list[str]] = defaultdict(list)
        for before, after in carry:
            for writer in sorted(self._makers[after]):
                for reader in sorted(self._readers[before] - {writer}):
                    flows[writer, reader].append(before)
        return flows


def _carry(body: Json) -> Iterator[tuple[str, str]]:
    for before, after in zip(body["inputs"], body["outputs"], strict=False):
        if before != after:
            yield before, after


def _named(name: str, values: Json) -> dict[str, Any]:
    return {**values[name], "name": name}


def _box_of(node: Json, values: Json) -> Box:
    match node["kind"]:
        case "loop":
            return _loop_box(node, _draw_body(node["body"], values))
        case "agree":
            how = node["how"]
            facts = (("replicas agree by", how), ("source", node["source"]))
            return Box(
                f"{how} {node['source']}",
                "agree",
                how,
                f"replicas agree: {how}",
                facts,
                source=node["source"],
            )
        case _:
            body = node.get("body") or {"nodes": []}
            drawn = any(inner["kind"] != "glue" for inner in body["nodes"])
            return _stage_box(node, _draw_body(body, values) if drawn else None)


def _loop_box(node: Json, inside: Drawing) -> Box:
    turns = str(node["length"])
    return Box(
        id=node["name"],
        kind="loop",
        label="loop",
        title=f"loop of {turns} turns",
        facts=(("turns", turns), ("source", node["source"])),
        badge=f"× {turns}",
        source=node["source"],
        inside=inside,
    )


def _stage_box(node: Json, inside: Drawing | None) -> Box:
    per = "one environment" if node["per"] == "env" else "the whole batch"
    runs = (("runs", "on the host, in Python"),) if node["host"] else ()
    return Box(
        id=node["name"],
        kind="host" if node["host"] else node["per"],
        label=node["stage"],
        title=f"stage {node['stage']}",
        facts=(("written for", per), *runs, ("source", node["source"])),
        source=node["source"],
        inside=inside,
    )


def _arrow(ends: tuple[str, str], kind: str, values: Sequence[Json]) -> Arrow:
    writer, reader = ends
    total = sum(value["bytes"] for value in values)
    when = "the next turn" if kind == "carried" else "the same turn"
    return Arrow(
        writer=writer,
        reader=reader,
        kind=kind,
        title=f"{name_text(writer)} → {name_text(reader)}",
        facts=(("read in", when), ("size", size_text(total)), ("values", str(len(values)))),
        values=value_rows(values),
        lines=(size_text(total),),
        bold=0,
        weight=weight_of(total),
    )
