"""What the workers of a run spent their time on, by category, site and channel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from shoal.profiling.sites import CATEGORIES
from shoal.profiling.span_file import SiteAbout, SpanFile
from shoal.profiling.spans import Kind
from shoal.profiling.totals import MEASURED, STARTING, WATCHED, quantile

Json = dict[str, Any]
COPYING, WAITING, FRAMEWORK = "copying", "waiting", "framework"
PROGRAM = "one program"  # simulation, inference and learning, compiled together
RECORDING, UNRECORDED = "recording", "not recorded"
ORDER = (*CATEGORIES, PROGRAM, COPYING, WAITING, FRAMEWORK, RECORDING, UNRECORDED)
OF_SITE = (Kind.SEGMENT, Kind.DEVICE, Kind.STAGE, Kind.BATCH)
OF_KIND = {
    Kind.CHUNK: PROGRAM, Kind.NUMPY: COPYING, Kind.TAKE: COPYING, Kind.PUT: COPYING,
    Kind.WAIT: WAITING, Kind.LINGER: WAITING, Kind.REPORT: FRAMEWORK, Kind.KEEP: FRAMEWORK,
    Kind.TURN: FRAMEWORK, Kind.GAP: FRAMEWORK, Kind.LOST: UNRECORDED,
}  # fmt: skip


NO_SITES = (Kind.GAP, Kind.LOST, Kind.TURN, Kind.CHUNK, Kind.LINGER, Kind.REPORT, Kind.KEEP)
LABELS = {
    Kind.DEVICE: "{} on the device", Kind.BATCH: "batches of {}", Kind.TAKE: "take {}",
    Kind.PUT: "put {}", Kind.LINGER: "wait for more requests", Kind.CHUNK: "ticks of one program",
    Kind.REPORT: "report metrics", Kind.KEEP: "keep the state",
}  # fmt: skip


def label(kind: Kind, site: SiteAbout | None) -> str:
    """What a span is, in words."""
    name = site["name"] if site else ""
    if kind is Kind.WAIT:
        return f"wait for {name}" if site and site["kind"] == "take" else f"wait for room in {name}"
    return LABELS.get(kind, "{}").format(name)


@dataclass(frozen=True, slots=True)
class Item:
    """The spans of one kind at one site of one worker."""

    worker: str
    kind: Kind
    site: SiteAbout | None
    count: int
    seconds: float  # without the cost of recording
    recording: float  # seconds that recording them took
    number: int  # requests of batches, ticks of chunks, or spans that were lost
    durations: np.ndarray

    @property
    def fragment(self) -> str:
        """The fragment that it belongs to."""
        return self.site["fragment"] if self.site else self.worker.partition("[")[0]

    @property
    def category(self) -> str:
        """What the time went to."""
        if self.kind in OF_SITE and self.site:
            return self.site["category"]
        return OF_KIND.get(self.kind, FRAMEWORK)


@dataclass(frozen=True)
class Breakdown:
    """The time of the workers of a run, once all had begun."""

    file: SpanFile
    phases: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def workers(self) -> list[str]:
        """The names of the workers that recorded anything."""
        return list(dict.fromkeys(item.worker for item in self.items))

    def seconds(self, worker: str) -> float:
        """The time from the first span of a worker to its last."""
        return sum(i.seconds + i.recording for i in self.items if i.worker == worker)

    def categories(self, worker: str, fragment: str = "") -> dict[str, float]:
        """The seconds of each category, in order; of one fragment, if several share the worker."""
        found: dict[str, float] = {}
        for item in self.items:
            if item.worker == worker and fragment in ("", item.fragment):
                found[item.category] = found.get(item.category, 0.0) + item.seconds
                found[RECORDING] = found.get(RECORDING, 0.0) + item.recording
        return {name: found[name] for name in ORDER if found.get(name)}

    def fragments(self) -> dict[str, list[str]]:
        """The workers of each fragment."""
        found: dict[str, dict[str, None]] = {}
        for item in self.items:
            found.setdefault(item.fragment, {})[item.worker] = None
        return {fragment: list(workers) for fragment, workers in found.items()}

    def shares(self, fragment: str) -> dict[str, float]:
        """The mean share of each category in the time of a fragment's workers."""
        workers = self.fragments()[fragment]
        found = [(self.categories(worker, fragment), self.seconds(worker)) for worker in workers]
        names = [name for name in ORDER if any(name in one for one, _ in found)]
        return {n: fmean(one.get(n, 0.0) / max(s, 1e-9) for one, s in found) for n in names}

    def waits(self, worker: str) -> dict[tuple[str, str], float]:
        """The share of a worker's time that it waited to take from, or to put to, each channel."""
        waits: dict[tuple[str, str], float] = {}
        for item in self.items:
            if item.worker == worker and item.kind is Kind.WAIT and item.site:
                key = item.site["kind"], item.site["name"]
                waits[key] = waits.get(key, 0.0) + item.seconds / self.seconds(worker)
        return waits

    def ticks(self, worker: str) -> int:
        """How many ticks a worker began in this time; of one program, how many it ran."""
        chunks = sum(i.number for i in self.items if i.worker == worker and i.kind is Kind.CHUNK)
        about = next(one for one in self.file.about["workers"] if one["name"] == worker)
        return chunks or (about["ticks"][1] - about["ticks"][0] + 1 if about["ticks"] else 0)

    @property
    def is_after_start(self) -> bool:
        """Whether the time in which workers compile and start is left out."""
        return STARTING not in self.phases

    def sites(self) -> Iterator[Json]:
        """What all workers did at each site: what it is, and how long its spans took."""
        sums: dict[tuple[Kind, int], list[Item]] = {}
        for item in self.items:
            if item.site is not None and item.kind not in NO_SITES:
                sums.setdefault((item.kind, item.site["number"]), []).append(item)
        for (kind, _), items in sums.items():
            site = items[0].site
            assert site is not None
            yield {
                "fragment": site["fragment"], "kind": kind.name.lower(), "site": site["kind"],
                "name": site["name"], "what": label(kind, site), "stages": site["stages"],
                "category": items[0].category, **_times(items),
            }  # fmt: skip

    @property
    def lost(self) -> int:
        """The number of spans that were overwritten before they were read."""
        return sum(item.number for item in self.items if item.kind is Kind.LOST)


def breakdown(file: SpanFile, phases: tuple[int, ...] = (WATCHED, MEASURED)) -> Breakdown:
    """The breakdown of some phases of a run; of all, if it ended while it was starting."""
    if not np.isin(file.totals["phase"], phases).any():
        phases = (STARTING, *phases)
    return Breakdown(file, phases, tuple(_items(file, phases)))


def _items(file: SpanFile, phases: tuple[int, ...]) -> Iterator[Item]:
    sites = {site["number"]: site for site in file.about["sites"]}
    workers = [one["name"] for one in file.about["workers"]]
    inside, outside = file.about["cost"]["inside"] / 1e9, file.about["cost"]["outside"] / 1e9
    sums: dict[tuple[int, int, int], Any] = {}
    for row in file.totals[np.isin(file.totals["phase"], phases)]:
        key = int(row["worker"]), int(row["kind"]), int(row["site"])
        sums.setdefault(key, []).append(row)
    for (worker, kind, site), rows in sums.items():
        if kind not in set(Kind):
            continue
        count, seconds = (sum(int(row[x]) for row in rows) for x in ("count", "ns"))
        seconds, is_gap = seconds / 1e9, kind == Kind.GAP
        cost = min(seconds, count * (outside if is_gap else inside))
        if kind in (Kind.TURN, Kind.LOST):
            cost = 0.0
        yield Item(
            workers[worker], Kind(kind), sites.get(site) if not is_gap or site in sites else None,
            count, seconds - cost, cost, sum(int(row["number"]) for row in rows),
            np.array([row["durations"] for row in rows], np.int64).sum(0),
        )  # fmt: skip


def breakdown_json(found: Breakdown, plan: Mapping[str, Any]) -> Json:
    """A breakdown as JSON data, which docs/profiling.md describes."""
    return {
        "form": 1,
        "workers": [_worker_json(found, name) for name in found.workers],
        "fragments": {
            name: {
                "places": next((f["places"] for f in plan["fragments"] if f["name"] == name), []),
                "workers": workers, "shares": _rounded(found.shares(name)),
            }
            for name, workers in found.fragments().items()
        },
        "sites": list(found.sites()),
        "channels": [_channel_json(found, channel) for channel in found.file.about["channels"]],
        "recording": {**found.file.about["cost"], "lost": found.lost},
        **({"device": found.file.about["device"]} if "device" in found.file.about else {}),
    }  # fmt: skip


def _worker_json(found: Breakdown, name: str) -> Json:
    about = next(one for one in found.file.about["workers"] if one["name"] == name)
    seconds, categories = found.seconds(name), found.categories(name)
    ticks = found.ticks(name)
    return {
        "name": name, "pid": about["pid"], "memory_bytes": about["memory"],
        "seconds": round(seconds, 6), "ticks": ticks,
        "tick_seconds": round((seconds - categories.get(RECORDING, 0.0)) / max(1, ticks), 9),
        "categories": _rounded(categories),
        "waits": [[how, what, round(s, 6)] for (how, what), s in found.waits(name).items()],
    }  # fmt: skip


def _channel_json(found: Breakdown, channel: Mapping[str, Any]) -> Json:
    kinds = {"put": Kind.PUT, "take": Kind.TAKE, "wait": Kind.WAIT}
    items = {
        name: [
            i for i in found.items if i.kind is k and i.site and i.site["name"] == channel["name"]
        ]
        for name, k in kinds.items()
    }
    return {
        "name": channel["name"], "writer": channel["writer"], "reader": channel["reader"],
        "bytes_a_tick": channel["bytes"], **{name: _times(of) for name, of in items.items()},
    }  # fmt: skip


def _times(items: list[Item]) -> Json:
    """How often and how long, with quantiles of single durations."""
    count, seconds = sum(i.count for i in items), sum(i.seconds for i in items)
    durations = np.sum([i.durations for i in items], axis=0) if items else np.zeros(1)
    return {
        "count": count, "seconds": round(seconds, 6), "number": sum(i.number for i in items),
        "mean": round(seconds / max(1, count), 9),
        **{f"p{p}": round(quantile(durations, p / 100) / 1e9, 9) for p in (10, 50, 90, 99)},
    }  # fmt: skip


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 6) for name, share in shares.items()}
