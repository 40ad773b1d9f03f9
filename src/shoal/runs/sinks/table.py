"""A sink that writes `metrics.csv` into the run's folder."""

from __future__ import annotations

import csv
from typing import Any

from shoal.runs.files.folder import write_whole
from shoal.runs.sinks.sink import AXES, About, Point


class Table:
    """Writes a line a point; a scalar that appears later becomes a column of all lines."""

    def __init__(self, about: About) -> None:
        self.path = about.folder / "metrics.csv"
        self._columns: list[str] = []
        if self.path.exists():
            with open(self.path, encoding="utf-8", newline="") as file:
                self._columns = next(csv.reader(file), [])
        self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115

    def see(self, point: Point) -> None:
        """Write a line."""
        row: dict[str, Any] = {axis: getattr(point, axis) for axis in AXES} | point.scalars
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        csv.writer(self._file).writerow([row.get(name, "") for name in self._columns])
        self._file.flush()

    def _widen(self, new: list[str]) -> None:
        """Write the file again with more columns."""
        self._file.close()
        with open(self.path, encoding="utf-8", newline="") as file:
            lines = [*csv.reader(file)][1:]
        self._columns += new
        text = [",".join(self._columns)]
        text += [",".join([*line, *[""] * (len(self._columns) - len(line))]) for line in lines]
        write_whole(self.path, ("\r\n".join(text) + "\r\n").encode())
        self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115

    def close(self) -> None:
        """Close the file."""
        self._file.close()
