"""The file `spans.bin` of a run folder: sums of all spans, and the newest spans themselves.

After a line that names the format come the lengths of three parts and a checksum, then the parts:
a description as JSON, the sums, and the spans, worker by worker. It is read as data alone.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from shoal.profiling.spans import SPAN
from shoal.profiling.totals import TOTAL
from shoal.shapes import Index, Seconds, ShapeError, Steps, misfit

FILE = "spans.bin"
MAGIC = b"Shoal spans 1\n"
_lengths = struct.Struct("<QQQI")


class WorkerAbout(TypedDict):
    """A worker: its process, the most memory seen to be resident, its ticks once all had begun."""

    name: str
    pid: Index
    memory: Steps
    ticks: list[Index]


class RecordingCost(TypedDict):
    """What recording a span costs: nanoseconds that are in the span, and nanoseconds after it."""

    inside: Seconds
    outside: Seconds


class SiteAbout(TypedDict):
    """A site of the plan, as `shoal.profiling.sites.Site`."""

    number: Index
    fragment: str
    kind: str
    name: str
    stages: list[str]
    category: str


class StageAbout(TypedDict):
    """A stage inside a program: its share of the time that the device is busy."""

    category: str
    share: Seconds
    tick_seconds: Seconds


class DeviceAbout(TypedDict):
    """What was measured inside a plan of one program; the stage "" is what is between stages."""

    kind: str
    ticks: Index
    tick_seconds: Seconds
    attributed: Seconds
    stages: dict[str, StageAbout]


class About(TypedDict):
    """The description in a file of spans."""

    wall: float  # time.time() when the clock of spans was 0
    workers: list[WorkerAbout]
    kept: list[Index]  # the number of spans of each worker
    sites: list[SiteAbout]
    channels: list[dict[str, Any]]
    cost: RecordingCost
    measured: list[Index]  # the first measured tick, and the first after
    device: NotRequired[DeviceAbout]


@dataclass(frozen=True)
class SpanFile:
    """The content of a file of spans."""

    about: About
    totals: np.ndarray
    spans: list[np.ndarray]  # by worker


def write_spans(path: Path, file: SpanFile) -> None:
    """Write a file, which is complete or as it was before."""
    about = json.dumps(file.about).encode()
    parts = (about, file.totals.tobytes(), b"".join(part.tobytes() for part in file.spans))
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    draft = path.with_name(f".{path.name}.tmp")
    with open(draft, "wb") as out:
        out.write(MAGIC + _lengths.pack(*map(len, parts), check))
        for part in parts:
            out.write(part)
    draft.replace(path)


def read_spans(path: Path) -> SpanFile:
    """Read a file; raises `ShapeError` if it is no such file, or a damaged one."""
    data = path.read_bytes()
    begin = len(MAGIC) + _lengths.size
    if not data.startswith(MAGIC):
        old = data.startswith(MAGIC.split()[0])
        raise ShapeError("another version of Shoal wrote it" if old else "it holds no spans")
    if len(data) < begin:
        raise ShapeError("it is cut off")
    *sizes, check = _lengths.unpack_from(data, len(MAGIC))
    if sum(sizes) != len(data) - begin or zlib.crc32(data[begin:]) != check:
        raise ShapeError("it is cut off or damaged")
    parts, view = [], memoryview(data)
    for size in sizes:
        parts.append(view[begin : begin + size])
        begin += size
    return _checked(json.loads(bytes(parts[0])), parts[1], parts[2])


def _checked(about: Any, sums: memoryview, raw: memoryview) -> SpanFile:
    """The content of a file whose checksum is right, though anything may have written it."""
    wrong = misfit(about, About)
    if not wrong and (len(sums) % TOTAL.itemsize or len(raw) != sum(about["kept"]) * SPAN.itemsize):
        wrong = "its parts are of other sizes than it says"
    if wrong:
        raise ShapeError(wrong)
    totals, spans = np.frombuffer(sums, TOTAL), np.frombuffer(raw, SPAN)
    if len(about["kept"]) != len(about["workers"]) or (
        len(totals) and int(totals["worker"].max()) >= len(about["workers"])
    ):
        raise ShapeError("it has spans of workers that it doesn't name")
    ends = np.cumsum(about["kept"])[:-1]
    return SpanFile(about, totals, np.split(spans, ends.astype(int)))
