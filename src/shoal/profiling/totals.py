"""Sums over spans: by worker, phase, kind and site, with the distribution of durations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shoal.profiling.spans import SPAN, Kind

BINS, LEAST = 96, 5  # of durations: bin i ends at 2 ** (LEAST + (i + 1) / 3) nanoseconds, or 137 s
STARTING, WATCHED, MEASURED = range(3)  # while workers compile; others; synchronised ticks
TOTAL = np.dtype(
    [
        ("site", "<u4"), ("worker", "<u2"), ("kind", "u1"), ("phase", "u1"),
        ("count", "<i8"), ("ns", "<i8"), ("number", "<i8"), ("durations", "<u4", (BINS,)),
    ]
)  # fmt: skip


def bin_of(ns: np.ndarray) -> np.ndarray:
    """The bin of each duration."""
    return np.clip(3 * (np.log2(np.maximum(ns, 1)) - LEAST), 0, BINS - 1).astype(np.int64)


def quantile(durations: np.ndarray, share: float) -> float:
    """The duration in nanoseconds that a share of them is below, to within a bin."""
    sums = np.cumsum(durations)
    if not sums[-1]:
        return 0.0
    return float(2 ** (LEAST + (np.searchsorted(sums, share * sums[-1]) + 0.5) / 3))


class Key(NamedTuple):
    """What is summed together."""

    worker: int
    phase: int
    kind: int
    site: int


class Totals:
    """Sums of all spans so far; the time between two spans of a worker is a gap.

    The spans of a worker come from one thread, so they don't overlap: with the gaps they are all
    its time from its first span to its last.
    """

    def __init__(self) -> None:
        self._rows: dict[Key, np.ndarray] = {}
        self._ends: dict[int, int] = {}  # by worker, when its newest span ended
        self.ticks: dict[int, tuple[int, int]] = {}  # by worker, its first and last after starting

    def add(self, worker: int, spans: np.ndarray, lost: int, since: int, measured: range) -> None:
        """Add new spans of a worker, before which some may have been lost.

        Spans that begin before the time `since` belong to the start of the run.
        """
        if not len(spans):
            return
        ticks, late = spans["tick"], spans["begin"] >= since
        inside = (ticks >= measured.start) & (ticks < measured.stop)
        phases = np.where(late, np.where(inside, MEASURED, WATCHED), STARTING)
        if late.any():
            first, last = int(ticks[late][0]), int(ticks.max())
            before = self.ticks.get(worker, (first, last))
            self.ticks[worker] = before[0], max(before[1], last)
        took = spans["end"] - spans["begin"]
        ended = np.array([self._ends.get(worker, int(spans["begin"][0]))], np.int64)
        before = np.concatenate([ended, spans["end"][:-1]])
        gaps = np.maximum(spans["begin"] - before, 0)
        self._ends[worker] = int(spans["end"][-1])
        self._sum(worker, phases, spans["kind"], spans["site"], took, spans["number"])
        kinds = np.full(len(spans), Kind.GAP, np.uint16)
        if lost:
            kinds[0] = Kind.LOST
        fragments = spans["site"] >> 16 << 16
        self._sum(worker, phases, kinds, fragments, gaps, np.zeros(len(spans), np.int64))
        if lost:
            self._row(Key(worker, int(phases[0]), Kind.LOST, int(fragments[0])))["number"] += lost

    def _sum(
        self,
        worker: int,
        phases: np.ndarray,
        kinds: np.ndarray,
        sites: np.ndarray,
        took: np.ndarray,
        numbers: np.ndarray,
    ) -> None:
        codes = phases << 48 | kinds.astype(np.int64) << 32 | sites.astype(np.int64)
        keys, of = np.unique(codes, return_inverse=True)
        spread = np.bincount(of * BINS + bin_of(took), minlength=len(keys) * BINS)
        for i, code in enumerate(keys.tolist()):
            row = self._row(Key(worker, code >> 48, code >> 32 & 0xFFFF, code & 0xFFFFFFFF))
            mine = of == i
            row["count"] += mine.sum()
            row["ns"] += int(took[mine].sum())
            row["number"] += int(numbers[mine].sum())
            row["durations"] += spread[i * BINS : (i + 1) * BINS].astype(np.uint32)

    def _row(self, key: Key) -> np.ndarray:
        if key not in self._rows:
            row = np.zeros((), TOTAL)
            row["site"], row["worker"] = key.site, key.worker
            row["kind"], row["phase"] = key.kind, key.phase
            self._rows[key] = row
        return self._rows[key]

    def has(self, kind: Kind) -> bool:
        """Whether there is any span of a kind."""
        return any(key.kind == kind for key in self._rows)

    def array(self) -> np.ndarray:
        """All sums."""
        return np.array(list(self._rows.values()), TOTAL).reshape(-1)


class Recent:
    """The newest spans of each worker, so many in all as there is room for."""

    def __init__(self, most: int) -> None:
        self._most, self._parts = most, dict[int, list[np.ndarray]]()

    def add(self, worker: int, spans: np.ndarray) -> None:
        """Add new spans of a worker."""
        self._parts.setdefault(worker, []).append(spans)
        share = self._most // len(self._parts)
        for parts in self._parts.values():
            count = sum(map(len, parts))
            while count - len(parts[0]) >= share:
                count -= len(parts.pop(0))

    def arrays(self) -> Iterator[tuple[int, np.ndarray]]:
        """The newest spans of each worker, in order."""
        share = self._most // max(1, len(self._parts))
        for worker, parts in self._parts.items():
            yield worker, np.concatenate([np.zeros(0, SPAN), *parts])[-share:]
