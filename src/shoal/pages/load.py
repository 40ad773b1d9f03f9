"""Where the time of a run's workers went, and what limits the run.

This is the one place that reads `load.jsonl` and `status.json`. A profile with spans has the same
shares by stage: a reader of it makes the same `Load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from shoal.pages.tails import number

Json = dict[str, Any]
Row = Mapping[str, Any]

SATURATED = 0.85  # of its time: a worker that computes so much is what others wait for
WAITS = 0.10  # of its time: a wait that matters
BEHIND = 0.25  # how much more than its peers a single slow worker computes
MOST_POINTS = 160  # of a timeline
MOST_LINES = 64  # workers that have a timeline of their own


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The shares of a worker's time: in stages in Python, waiting, and all that it didn't wait."""

    name: str
    python: Mapping[str, float]
    waits: Mapping[tuple[str, str], float]  # ("take" or "put", channel)
    tick: int = 0

    @property
    def fragment(self) -> str:
        """The fragment that it runs a replica of."""
        return self.name.partition("[")[0]

    @property
    def busy(self) -> float:
        """The share of its time that it doesn't wait."""
        return max(0.0, 1.0 - sum(self.waits.values()))


@dataclass(frozen=True, slots=True)
class Load:
    """What the workers of a run did in a span of time."""

    seconds: float
    workers: tuple[WorkerLoad, ...]

    def of(self, fragment: str) -> list[WorkerLoad]:
        """The workers of a fragment."""
        return [worker for worker in self.workers if worker.fragment == fragment]

    def busy(self, fragment: str) -> float:
        """The mean share of their time that a fragment's workers don't wait."""
        return fmean([worker.busy for worker in self.of(fragment)] or [0.0])

    def waits(self, how: str, channel: str, fragment: str) -> float:
        """The mean share of their time that a fragment's workers wait to take or to put."""
        return fmean([w.waits.get((how, channel), 0.0) for w in self.of(fragment)] or [0.0])

    def python(self, fragment: str) -> dict[str, float]:
        """The mean share of each Python stage in a fragment's workers."""
        workers = self.of(fragment)
        names = dict.fromkeys(stage for worker in workers for stage in worker.python)
        return {name: fmean([w.python.get(name, 0.0) for w in workers]) for name in names}


def load_between(before: Row, after: Row) -> Load | None:
    """The load in the time between two rows; None if it is none.

    Workers that were restarted in between count from 0: they are left out.
    """
    passed = number(after.get("at"), 0.0) - number(before.get("at"), 0.0)
    if passed <= 0:
        return None
    found = []
    for name, now in _workers(after).items():
        then = _workers(before).get(name)
        if then is None or any(now.get(key, 0.0) < then[key] for key in then):
            continue
        shares = {key: min(1.0, (now[key] - then.get(key, 0.0)) / passed) for key in now}
        found.append(_worker(name, shares, int(now.get("tick", 0))))
    return Load(passed, tuple(found)) if found else None


def _worker(name: str, shares: Mapping[str, float], tick: int) -> WorkerLoad:
    split = {tuple(key.split(" ", 1)): share for key, share in shares.items() if " " in key}
    python = {what: share for (how, what), share in split.items() if how == "in"}
    waits = {(how, what): share for (how, what), share in split.items() if how != "in"}
    total = sum(waits.values())
    if total > 1:  # a wait that began before is counted when it ends
        waits = {key: share / total for key, share in waits.items()}
    return WorkerLoad(name, python, waits, tick)


def _workers(row: Row) -> dict[str, dict[str, float]]:
    """The counts of each worker in a row of `load.jsonl`, or of `status.json`."""
    workers = row.get("workers")
    found = {}
    for name, counts in workers.items() if isinstance(workers, dict) else ():
        if isinstance(counts, dict):
            spent = counts.get("spent", counts)
            spent = spent if isinstance(spent, dict) else {}
            found[str(name)] = {
                key: value
                for key, x in {**spent, "tick": counts.get("tick", 0)}.items()
                if (value := number(x, None)) is not None
            }
    return found


def first_working(rows: Sequence[Row]) -> int:
    """The first row from which on every worker has begun a tick; what is before is starting."""
    for index, row in enumerate(rows):
        counts = _workers(row).values()
        if counts and all(one.get("tick", 0) >= 1 for one in counts):
            return index
    return max(0, len(rows) - 1)


@dataclass(frozen=True, slots=True)
class Finding:
    """What limits a run: its kind, the fragment, worker or channel, and why, in a sentence."""

    kind: str  # "fragment", "stage", "worker", "queue", "turns", "none"
    target: str
    text: str

    def data(self) -> Json:
        """As JSON data."""
        return {"kind": self.kind, "target": self.target, "text": self.text}


def find_bottleneck(load: Load, plan: Json) -> Finding:
    """What limits a run, from who waits for whom."""
    counted = [f["name"] for f in plan["fragments"] if load.of(f["name"])]
    writers = {channel["writer"] for channel in plan["channels"]}
    named = [name for name in counted if name in writers] or counted  # none waits for an observer
    if not named:
        return Finding("none", "", "There is no count of what the workers do.")
    by_load = sorted(named, key=lambda name: -_heaviest(load, name).busy)
    busiest = by_load[0]
    if _heaviest(load, busiest).busy < SATURATED:
        return _unsaturated(load, plan, by_load)
    worker, peers = _heaviest(load, busiest), _peers(load, busiest)
    waiting = _waiting_for(load, plan, busiest)
    if peers is not None and worker.busy - peers > BEHIND:
        text = (
            f"{worker.name} is slower than the other replicas of {busiest}: it is busy "
            f"{_percent(worker.busy)} of the time, they {_percent(peers)}{waiting}."
        )
        return Finding("worker", worker.name, text)
    python = load.python(busiest)
    stage = max(python, key=python.__getitem__, default="")
    busy = load.busy(busiest)
    if stage and python[stage] >= busy / 2:
        text = (
            f"Stage {stage} of {busiest}, in Python, takes {_percent(python[stage])} of the time"
            f"{waiting}."
        )
        return Finding("stage", f"{busiest}/{stage}", text)
    return Finding("fragment", busiest, f"{busiest} is busy {_percent(busy)} of the time{waiting}.")


def _unsaturated(load: Load, plan: Json, by_load: Sequence[str]) -> Finding:
    """What limits a run in which every worker waits for others."""
    queues = []
    for channel in plan["channels"]:
        full = load.waits("put", channel["name"], channel["writer"])
        empty = load.waits("take", channel["name"], channel["reader"])
        if min(full, empty) >= WAITS:
            queues.append((min(full, empty), channel, full, empty))
    if queues:
        _, channel, full, empty = max(queues, key=lambda found: found[0])
        writer, reader = channel["writer"], channel["reader"]
        text = (
            f"The queue from {writer} to {reader} is often full and often empty: {writer} waits "
            f"{_percent(full)} of the time for room in it, {reader} {_percent(empty)} for "
            "messages. A larger one would let both continue."
        )
        return Finding("queue", channel["name"], text)
    if len(by_load) == 1:
        text = f"{by_load[0]} is busy {_percent(load.busy(by_load[0]))} of the time."
        return Finding("fragment", by_load[0], text)
    shares = [f"{name} is busy {_percent(load.busy(name))}" for name in by_load]
    text = (
        f"The fragments take turns: {', '.join(shares)} of the time. A lag would let them overlap."
    )
    return Finding("turns", by_load[0], text)


def _heaviest(load: Load, fragment: str) -> WorkerLoad:
    return max(load.of(fragment), key=lambda worker: worker.busy)


def _peers(load: Load, fragment: str) -> float | None:
    """What the other workers of a fragment compute, in the middle; None if there are none."""
    others = sorted(worker.busy for worker in load.of(fragment))[:-1]
    return median(others) if others else None


def _waiting_for(load: Load, plan: Json, fragment: str) -> str:
    """Who waits for a fragment most, as the end of a sentence."""
    waits = []
    for channel in plan["channels"]:
        writer, reader, name = channel["writer"], channel["reader"], channel["name"]
        if writer == fragment != reader:
            waits.append((load.waits("take", name, reader), reader, "what it sends"))
        if reader == fragment != writer:
            waits.append((load.waits("put", name, writer), writer, "room to send"))
    share, who, what = max(waits, default=(0.0, "", ""))
    return f"; {who} waits {_percent(share)} of the time for {what}" if share >= WAITS else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def load_data(load: Load, plan: Json) -> Json:
    """A load as JSON data: workers, fragments, waits by channel, and what limits the run."""
    workers = [
        {
            "name": worker.name, "fragment": worker.fragment, "busy": _share(worker.busy),
            "python": {name: _share(share) for name, share in worker.python.items()},
            "waits": [[how, what, _share(share)] for (how, what), share in worker.waits.items()],
        }
        for worker in load.workers
    ]  # fmt: skip
    names = [fragment["name"] for fragment in plan["fragments"]]
    fragments = {
        name: {
            "busy": _share(load.busy(name)),
            "python": {stage: _share(share) for stage, share in load.python(name).items()},
            "workers": [_share(worker.busy) for worker in load.of(name)],
        }
        for name in names
        if load.of(name)
    }
    channels = {
        c["name"]: {
            "take": _share(load.waits("take", c["name"], c["reader"])),
            "put": _share(load.waits("put", c["name"], c["writer"])),
        }
        for c in plan["channels"]
    }
    limit = find_bottleneck(load, plan).data()
    return {
        "seconds": round(load.seconds, 1), "workers": workers, "fragments": fragments,
        "channels": channels, "bottleneck": limit,
    }  # fmt: skip


def timeline(rows: Sequence[Row]) -> Json:
    """What each worker computed over the run, as shares between few enough rows."""
    step = max(1, -(-len(rows) // MOST_POINTS))
    chosen = [*rows[:-1:step], *rows[-1:]]
    found = [
        (after, load) for before, after in pairwise(chosen) if (load := load_between(before, after))
    ]
    names = dict.fromkeys(w.name for _, load in found for w in load.workers)
    busy: dict[str, list[float | None]] = {}
    for name in list(names)[:MOST_LINES]:
        busy[name] = [_busy_of(load.workers, name) for _, load in found]
    return {"seconds": [number(after.get("seconds"), 0.0) for after, _ in found], "busy": busy}


def _busy_of(workers: Iterable[WorkerLoad], name: str) -> float | None:
    return next((_share(worker.busy) for worker in workers if worker.name == name), None)


def _share(share: float) -> float:
    return round(share, 4)
