"""Keeps the spans of a run in its folder while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shoal.planning.plan import Plan
from shoal.planning.program import Take
from shoal.planning.segments import Program
from shoal.profiling.recorder import EndpointRecorder, now
from shoal.profiling.sites import sites_of
from shoal.profiling.span_file import (
    FILE,
    About,
    DeviceAbout,
    RecordingCost,
    SpanFile,
    WorkerAbout,
    write_spans,
)
from shoal.profiling.spans import SPAN, Kind, NewSpans, SpanBuffer
from shoal.profiling.totals import Recent, Totals

MOST_SPANS = 1 << 17  # that are kept, of all workers together: 4 MB
READ_S = 0.25  # between readings of the buffers, which hold more than is recorded in that time
WRITE_S = 20.0  # between writings of the file
ReadSpans = Callable[[range], Mapping[str, NewSpans]]


class SpanLog:
    """Reads the spans of a run's workers, and writes them to a file in its folder.

    A failure to write doesn't fail the run: the file is written again later.
    """

    def __init__(self, folder: Path, plan: Plan, measured: range = range(0)) -> None:
        self._path, self._measured = folder / FILE, measured
        self._totals, self._recent = Totals(), Recent(MOST_SPANS)
        self._workers: dict[str, WorkerAbout] = {}
        self._read, self._written = 0.0, time.monotonic()
        names = {f.name for f in plan.distribution.fragments}
        self._start = _Start(frozenset(names - plan.asynchronous), plan.asynchronous)
        self._about: dict[str, Any] = {
            "sites": [asdict(site) | {"stages": list(site.stages)} for site in sites_of(plan)],
            "channels": plan.to_json()["channels"], "cost": recording_cost(),
            "measured": [measured.start, measured.stop],
        }  # fmt: skip

    def read(self, spans: ReadSpans) -> None:
        """Read the workers' buffers if it is time."""
        if (now := time.monotonic()) - self._read >= READ_S:
            self._read = now
            self.add(spans(self._measured))
            if now - self._written >= WRITE_S:
                self._written = now
                self.write()

    def last(self, spans: ReadSpans) -> None:
        """Read the workers' buffers when a run ends, however it does."""
        self.add(spans(self._measured))
        for each in self._start.flush():
            self._sum(*each)
        self.write()

    def add(self, found: Mapping[str, NewSpans]) -> None:
        """Add new spans of workers."""
        for name, new in found.items():
            worker = self._workers.setdefault(
                name, {"name": name, "pid": 0, "memory": 0, "ticks": []}
            )
            worker["pid"], worker["memory"] = new.pid, max(worker["memory"], new.memory)
            self._recent.add(list(self._workers).index(name), new.spans)
        for each in self._start.released(found):
            self._sum(*each)

    def _sum(self, name: str, new: NewSpans, since: int) -> None:
        number = list(self._workers).index(name)
        self._totals.add(number, new.spans, new.lost, since, self._measured)
        self._workers[name]["ticks"] = list(self._totals.ticks.get(number, ()))

    @property
    def is_one_program(self) -> bool:
        """Whether the run is of one program, whose stages have no spans."""
        return self._totals.has(Kind.CHUNK)

    def measured_inside(self, found: DeviceAbout) -> None:
        """Add what was measured inside a plan of one program."""
        self._about["device"] = found
        self.write()

    def write(self) -> None:
        """Write the file, if anything was recorded."""
        if not self._workers:
            return
        kept = dict(self._recent.arrays())
        parts = [kept.get(n, np.zeros(0, SPAN)) for n in range(len(self._workers))]
        self._about |= {
            "wall": time.time() - time.monotonic(),
            "workers": list(self._workers.values()), "kept": [len(part) for part in parts],
        }  # fmt: skip
        about: About = self._about  # type: ignore[assignment]
        with suppress(OSError):
            write_spans(self._path, SpanFile(about, self._totals.array(), parts))


class _Start:
    """Holds spans back until all workers have begun their second tick, which compile in the first.

    Asynchronous workers are not waited for: their first tick may come late.
    """

    def __init__(self, fragments: frozenset[str], asynchronous: frozenset[str]) -> None:
        self._fragments, self._asynchronous = fragments, asynchronous
        self._held: list[tuple[str, NewSpans]] = []
        self._first: dict[str, int] = {}  # by worker, the tick of its first span
        self._second: dict[str, int] = {}  # by worker, when its second tick began
        self._since: int | None = None

    def released(self, found: Mapping[str, NewSpans]) -> list[tuple[str, NewSpans, int]]:
        """The spans that can be summed, and when the start of the run ended."""
        if self._since is not None:
            return [(name, new, self._since) for name, new in found.items()]
        self._held += found.items()
        for name, new in found.items():
            if name.partition("[")[0] not in self._asynchronous and len(new.spans):
                first = self._first.setdefault(name, int(new.spans["tick"][0]))
                later = new.spans["begin"][new.spans["tick"] > first]
                if len(later):
                    self._second.setdefault(name, int(later[0]))
        seen = {name.partition("[")[0] for name in self._second}
        whole = self._fragments <= seen or not seen & self._fragments  # inline: one for all
        if self._second.keys() == self._first.keys() and self._second and whole:
            return self.flush()
        return self.flush() if sum(len(new.spans) for _, new in self._held) > MOST_SPANS else []

    def flush(self) -> list[tuple[str, NewSpans, int]]:
        """All spans that are held back."""
        self._since = max(self._second.values(), default=0) if self._since is None else self._since
        held, self._held = self._held, []
        return [(name, new, self._since) for name, new in held]


def recording_cost(times: int = 400) -> RecordingCost:
    """What it costs on this machine to record a span."""
    take = Take("", ())
    buffer = SpanBuffer.own()
    recorder = EndpointRecorder(buffer, 0, copies=True).of(Program("", (take,), (), (), ()), 0)
    whole = math.inf
    for _ in range(5):
        began = now()
        for _ in range(times):
            recorder.end(take, recorder.begin(take), {})
        whole = min(whole, (now() - began) / times)
    spans, _ = buffer.read()
    inside = float(np.median(spans["end"] - spans["begin"]))
    return {"inside": inside, "outside": max(0.0, whole - inside)}
