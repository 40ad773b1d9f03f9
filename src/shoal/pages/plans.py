"""A graph or a plan, as plain data, as an HTML page: the picture above, tables below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape

from shoal.graph.words import Json, Row, count_text, place_text, size_text, value_rows
from shoal.pages.drawing import Drawing, draw_graph, draw_plan, fragment_tones, nodes_of
from shoal.pages.html import document, source_link, table

BODY = """<header class="top">
<div><h1>{title}</h1><p>{summary}</p></div>
</header>
<main>
<section class="picture" data-name="drawing"></section>
<p class="legend">{legend}</p>
{tables}
</main>"""
SCRIPTS = ("theme", "dagre.min", "layout", "picture", "plan")
LEGEND = {
    "env": "stage written for one environment",
    "batch": "stage that sees the whole batch",
    "host": "stage that runs in Python, on the host",
    "solid": "read in the same turn",
    "dash": "read in the next turn",
    "turn": "sizes are bytes a turn",
    "tick": "sizes are bytes a tick on channels, bytes a turn inside",
}


def graph_page(graph: Json) -> str:
    """The page of a traced loop, from `Graph.to_json()`, with `sources` if there are any."""
    stages = list(_stages(graph))
    summary = f"{graph['envs']} environments · {count_text(len(stages), 'stage')}"
    tables = [
        table("Stages", ("stage", "written for", "source"), map(_stage_cells, stages)),
        _carried_table(graph, {}),
    ]
    return _page(graph["title"], summary, _drawn(draw_graph(graph), graph), tables)


def plan_page(plan: Json) -> str:
    """The page of a plan, from `Plan.to_json()`, with `sources` if there are any."""
    graph = plan["graph"]
    total = size_text(sum(channel["bytes"] for channel in plan["channels"]))
    summary = (
        f"<b>{escape(plan['distribution'])}</b> · {graph['envs']} environments · "
        f"{total} a tick between fragments"
    )
    tables = [_fragment_table(plan), _channel_table(plan), _carried_table(graph, plan["owners"])]
    return _page(graph["title"], summary, _drawn(draw_plan(plan), plan), tables)


def _drawn(drawing: Drawing, data: Json) -> Json:
    return {**asdict(drawing), "sources": data.get("sources", {})}


def _page(title: str, summary: str, drawing: Json, tables: Iterable[str]) -> str:
    body = BODY.format(
        title=escape(title),
        summary=summary,
        legend=legend(drawing),
        tables="\n".join(tables),
    )
    return document(title, body, SCRIPTS, {"drawing": {**drawing, "title": title}})


def legend(drawing: Json) -> str:
    """What the colours and lines of a drawing mean."""
    kinds = set(_kinds(drawing))
    shown = {"solid", "dash", "tick" if "fragment" in kinds else "turn", *kinds}
    return "".join(
        f"<span><i class='{k}'></i>{text}</span>" for k, text in LEGEND.items() if k in shown
    )


def _kinds(drawing: Json) -> Iterator[str]:
    for box in drawing["boxes"]:
        yield box["kind"]
        if box["inside"]:
            yield from _kinds(box["inside"])


def _fragment_table(plan: Json) -> str:
    tones = fragment_tones(plan)
    rows = []
    for fragment in plan["fragments"]:
        name = fragment["name"]
        stages = _stages({"nodes": nodes_of(plan["graph"], name, plan["homes"])})
        dot = f"<i class='dot {tones[name]}'></i><b>{escape(name)}</b>"
        held = {stage["stage"]: stage["source"] for stage, _ in stages}
        place = place_text(fragment["places"])
        links = ", ".join(_linked(stage, source) for stage, source in held.items())
        rows.append((dot, _replicas(fragment), escape(place), links))
    return table("Fragments", ("fragment", "#replicas", "place", "stages"), rows)


def _linked(stage: str, source: str) -> str:
    """A stage's name, which leads to its source."""
    return f"<a class='source' href='#source={escape(source)}'>{escape(stage)}</a>"


def _replicas(fragment: Json) -> str:
    return (
        f"{fragment['replicas']} as one" if fragment["one_program"] else str(fragment["replicas"])
    )


def _channel_table(plan: Json) -> str:
    tones, values = fragment_tones(plan), plan["graph"]["values"]
    rows = []
    for channel in plan["channels"]:
        writer, reader = channel["writer"], channel["reader"]
        moved = [{**values[name], "name": name} for name in channel["values"]]
        rows.append(
            (
                f"<i class='dot {tones[writer]}'></i><b>{escape(writer)}</b> → "
                f"<i class='dot {tones[reader]}'></i><b>{escape(reader)}</b>",
                _details(count_text(len(moved), "value"), value_rows(moved)),
                escape(channel["kind"]),
                escape(channel["flow"]),
                str(channel["times"]),
                size_text(channel["bytes"]),
            )
        )
    head = ("channel", "values", "moves", "flow", "#times a tick", "#bytes a tick")
    return table("Channels", head, rows) if rows else "<p>Nothing crosses between fragments.</p>"


def _carried_table(graph: Json, owners: Mapping[str, str]) -> str:
    """The values carried from tick to tick, by the fragment that makes their next version."""
    owned: dict[str, list[Json]] = defaultdict(list)
    for name in graph["inputs"]:
        owned[owners.get(name, "")].append({**graph["values"][name], "name": name})
    rows = [
        (escape(name), f"<code>{escape(spec)}</code>", size, escape(owner))
        for owner, values in owned.items()
        for name, spec, size in value_rows(values)
    ]
    head = ("value", "spec", "#bytes", "owner")
    columns = len(head) if owners else len(head) - 1
    return table("Carried from tick to tick", head[:columns], [row[:columns] for row in rows])


def _stages(body: Json, depth: int = 0) -> Iterator[tuple[Json, int]]:
    for node in body["nodes"]:
        if node["kind"] == "stage":
            yield node, depth
        if node.get("body"):
            yield from _stages(node["body"], depth + (node["kind"] == "stage"))


def _stage_cells(found: tuple[Json, int]) -> tuple[str, ...]:
    stage, depth = found
    per = "one environment" if stage["per"] == "env" else "the whole batch"
    name = f"<b class='deep{depth}'>{escape(stage['stage'])}</b>"
    return name, per, source_link(stage["source"])


def _details(summary: str, rows: Sequence[Row]) -> str:
    items = "".join(
        "<li>" + "".join(f"<span>{escape(cell)}</span>" for cell in row) + "</li>" for row in rows
    )
    return f"<details><summary>{escape(summary)}</summary><ul>{items}</ul></details>"
