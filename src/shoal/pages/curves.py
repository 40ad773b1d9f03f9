"""Columns of `metrics.jsonl`, downsampled: least, mean and largest value of each span of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.pages.tails import Tail, number, parsed, sampled

BUCKETS = 1024  # spans of rows, at most; a power of two
MOST_COLUMNS = 400
AXES = ("tick", "env_steps", "seconds")  # columns that others are drawn over
LONG = 8_000_000  # bytes of a file from which on a sample is shown until it is read

Row = Mapping[str, Any]
Json = dict[str, Any]


@dataclass
class Column:
    """The least, the largest and the sum of a metric's values in each span, and their number."""

    low: np.ndarray = field(default_factory=lambda: np.full(BUCKETS, np.nan))
    high: np.ndarray = field(default_factory=lambda: np.full(BUCKETS, np.nan))
    total: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS))
    count: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS))

    def add(self, spans: np.ndarray, values: np.ndarray) -> None:
        """Add values to spans; those that aren't finite are left out."""
        known = np.isfinite(values)
        spans, values = spans[known], values[known]
        np.fmin.at(self.low, spans, values)
        np.fmax.at(self.high, spans, values)
        np.add.at(self.total, spans, values)
        np.add.at(self.count, spans, 1)

    def halve(self) -> None:
        """Join each two spans into one."""
        for values, join in (
            (self.low, np.fmin),
            (self.high, np.fmax),
            (self.total, np.add),
            (self.count, np.add),
        ):
            values[: BUCKETS // 2] = join(values[::2], values[1::2])
            values[BUCKETS // 2 :] = 0 if join is np.add else np.nan

    def means(self, spans: slice) -> np.ndarray:
        """The mean of each span; NaN where there is no value."""
        count = self.count[spans]
        found = np.full(len(count), np.nan)
        return np.divide(self.total[spans], count, out=found, where=count > 0)


class Curves:
    """Downsampled columns of rows that are added; with more rows, each span holds more of them."""

    def __init__(self) -> None:
        self.rows, self.width = 0, 1  # rows so far, rows of a span
        self.columns: dict[str, Column] = {}
        self.last: Row = {}

    @property
    def spans(self) -> int:
        """The number of spans that have rows."""
        return -(-self.rows // self.width)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows."""
        if not rows:
            return
        while self.rows + len(rows) > BUCKETS * self.width:
            for column in self.columns.values():
                column.halve()
            self.width *= 2
        spans = (self.rows + np.arange(len(rows))) // self.width
        for name in dict.fromkeys(name for row in rows for name in row):
            if name in self.columns or len(self.columns) < MOST_COLUMNS:
                values = np.array([number(row.get(name), math.nan) for row in rows])
                if name in self.columns or np.isfinite(values).any():
                    self.columns.setdefault(name, Column()).add(spans, values)
        self.rows, self.last = self.rows + len(rows), rows[-1]

    def data(self, first: int = 0) -> Json:
        """The spans from `first` on as JSON data.

        Each column is its means, and the least and largest values where a span has several rows.
        On an axis, a span lies where its last row does.
        """
        spans, columns = slice(first, self.spans), {}
        for name, column in self.columns.items():
            if name in AXES:
                columns[name] = [_plain(column.high[spans])]
                continue
            parts = [column.means(spans)]
            if self.width > 1:
                parts += [column.low[spans], column.high[spans]]
            columns[name] = [_plain(part) for part in parts]
        return {"first": first, "width": self.width, "rows": self.rows, "columns": columns}


def _plain(values: np.ndarray) -> list[float | None]:
    """Numbers with the digits that a picture can show; None for NaN."""
    return [float(f"{x:.6g}") if x == x else None for x in values.tolist()]


class GrowingCurves:
    """The curves of a file that grows. Of a long file, a sample is shown until all is read."""

    def __init__(self, path: Path) -> None:
        self._tail, self._curves, self._sample = Tail(path), Curves(), None
        self.epoch = 0  # changes when all spans have changed
        if self._tail.check() or self._tail.size > LONG:
            self._sample = Curves()
            self._sample.add(sampled(path))

    @property
    def shown(self) -> Curves:
        """The curves to show now."""
        return self._sample or self._curves

    @property
    def part_read(self) -> float:
        """The part of the file that has been read."""
        return self._tail.offset / self._tail.size if self._tail.size else 1.0

    def read(self) -> bool:
        """Read the next part of the file; whether there is more."""
        if self._tail.check():
            self._curves, self._sample, self.epoch = Curves(), None, self.epoch + 1
        self._curves.add(parsed(self._tail.lines()))
        if self._sample is not None and not self._tail.is_behind:
            self._sample, self.epoch = None, self.epoch + 1
        return self._tail.is_behind
