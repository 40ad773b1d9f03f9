"""The newest spans of a run as trace events in JSON, which ui.perfetto.dev and Chrome open.

The format needs no package, and has arrows: a flow from the span that put a message to the one
that took it. Perfetto's own format would be smaller, and adds nothing that is used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.profiling.breakdown import OF_KIND, OF_SITE, label
from shoal.profiling.span_file import SiteAbout, SpanFile
from shoal.profiling.spans import Kind

Json = dict[str, Any]
NUMBERS = {
    Kind.TAKE: "message", Kind.PUT: "message", Kind.BATCH: "requests", Kind.CHUNK: "ticks",
}  # fmt: skip


def trace_json(file: SpanFile) -> Json:
    """The newest spans, a track for each worker, with an arrow for each message."""
    return {"traceEvents": list(_events(file)), "displayTimeUnit": "ms"}


def _events(file: SpanFile) -> Iterator[Json]:
    sites = {site["number"]: site for site in file.about["sites"]}
    starts = [int(spans["begin"].min()) for spans in file.spans if len(spans)]
    first = min(starts, default=0)
    for pid, (worker, spans) in enumerate(zip(file.about["workers"], file.spans, strict=True), 1):
        yield {"ph": "M", "pid": pid, "tid": pid, "name": "process_name",
               "args": {"name": worker["name"]}}  # fmt: skip
        for span in spans:
            if int(span["kind"]) in set(Kind) - {Kind.TURN}:
                yield _slice(span, pid, first, sites.get(int(span["site"])))
    yield from _arrows(file, sites, first)


def _slice(span: np.void, pid: int, first: int, site: SiteAbout | None) -> Json:
    """A span as a slice of its worker's track."""
    kind = Kind(int(span["kind"]))
    category = site["category"] if site and kind in OF_SITE else OF_KIND.get(kind, "")
    args = {"tick": int(span["tick"]), "endpoint": int(span["endpoint"])}
    if kind in NUMBERS:
        args[NUMBERS[kind]] = int(span["number"])
    return {
        "ph": "X", "pid": pid, "tid": pid, "name": label(kind, site), "cat": category,
        "ts": (int(span["begin"]) - first) / 1e3,
        "dur": (int(span["end"]) - int(span["begin"])) / 1e3, "args": args,
    }  # fmt: skip


def _arrows(file: SpanFile, sites: dict[int, SiteAbout], first: int) -> Iterator[Json]:
    """A flow for each message whose put and take are both there."""
    put: dict[tuple[str, int, int], tuple[int, np.void]] = {}
    for pid, spans in enumerate(file.spans, 1):
        for span in spans[spans["kind"] == Kind.PUT]:
            if site := sites.get(int(span["site"])):
                put[site["name"], int(span["endpoint"]), int(span["number"])] = pid, span
    number = 0
    for pid, spans in enumerate(file.spans, 1):
        for channel, writer, message, take in _taken(spans, sites):
            found = put.get((channel, writer, message))
            if found is None or found[1]["begin"] > take["end"]:
                continue
            number += 1
            for phase, at, span in (("s", found[0], found[1]), ("f", pid, take)):
                middle = (int(span["begin"]) + int(span["end"])) / 2
                end = {"bp": "e"} if phase == "f" else {}
                yield {
                    "ph": phase, "id": number, "pid": at, "tid": at, "name": channel,
                    "cat": "message", "ts": (middle - first) / 1e3, **end,
                }  # fmt: skip


def _taken(
    spans: np.ndarray, sites: dict[int, SiteAbout]
) -> Iterator[tuple[str, int, int, np.void]]:
    """Each message that was taken: its channel, its writer's endpoint, its number and the take.

    Turns follow the take that took them; without any, the writer is the endpoint of same number.
    """
    moves = spans[np.isin(spans["kind"], (Kind.TAKE, Kind.TURN))]
    for i, span in enumerate(moves):
        site = sites.get(int(span["site"]))
        if site is None or span["kind"] == Kind.TURN:
            continue
        turns = []
        for later in moves[i + 1 :]:
            if later["kind"] != Kind.TURN or later["site"] != span["site"]:
                break
            turns.append(later)
        for turn in turns or [span]:
            yield site["name"], int(turn["endpoint"]), int(turn["number"]), span
