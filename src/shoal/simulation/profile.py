"""A profile: what the parts of a loop cost on a machine, as curves over sizes, kept as JSON."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, TypedDict

from shoal.errors import SettingError
from shoal.shapes import Between, ShapeError, read_json, why_unreadable

FORM = 1
LEVELS = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)  # of the quantiles of a point
PLAIN = (1.0,) * len(LEVELS)
Positive = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of one call at one size.

    `seconds` is the mean of the best repetition, `cores` how many cores it keeps busy.
    `quantiles` are those of single calls, over `seconds`.
    """

    size: int
    seconds: float
    cores: float = 1.0
    quantiles: tuple[float, ...] = PLAIN


@dataclass(frozen=True)
class Curve:
    """A cost by size (the number of environments): piecewise linear, and never falling."""

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.points, key=lambda p: p.size)
        rising = accumulate((p.seconds for p in ordered), max)
        points = (replace(p, seconds=s) for p, s in zip(ordered, rising, strict=True))
        object.__setattr__(self, "points", tuple(points))

    def at(self, size: float) -> float:
        """Seconds of a call at this size; beyond the points, it never falls below proportion."""
        points = self.points
        if len(points) == 1:
            return points[0].seconds * size / points[0].size
        right = min(max(1, bisect_right([p.size for p in points], size)), len(points) - 1)
        a, b = points[right - 1], points[right]
        line = a.seconds + (size - a.size) * (b.seconds - a.seconds) / (b.size - a.size)
        return max(line, a.seconds * size / a.size) if size < a.size else line

    def nearest(self, size: float) -> Point:
        """The point whose size is nearest."""
        return min(self.points, key=lambda p: abs(p.size - size))

    def has(self, size: int) -> bool:
        """Whether this very size was measured."""
        return any(p.size == size for p in self.points)

    def joined(self, points: Iterable[Point]) -> Curve:
        """The curve with more points; of two at the same size, the faster one stays."""
        best: dict[int, Point] = {}
        for point in (*self.points, *points):
            known = best.setdefault(point.size, point)
            best[point.size] = min(known, point, key=lambda p: p.seconds)
        return Curve(tuple(best.values()))


@dataclass(frozen=True, slots=True)
class Message:
    """The cost of a message: seconds for a small one, and bytes a second."""

    seconds: float
    rate: float = 1e10

    def of(self, size: float) -> float:
        """Seconds for a message of `size` bytes."""
        return self.seconds + size / self.rate


@dataclass(frozen=True)
class Profile:
    """What a loop costs on a machine.

    `costs` has a curve for each part by its name (`script.py`). `messages` are by where they
    travel: threads, processes or network. `dispatch` is the least that a compiled call takes.
    """

    loop: str
    machine: str
    costs: Mapping[str, Curve] = field(default_factory=dict)
    messages: Mapping[str, Message] = field(default_factory=dict)
    dispatch: float = 2e-5

    def joined(self, costs: Mapping[str, Iterable[Point]]) -> Profile:
        """The profile with more points."""
        empty = Curve(())
        found = {name: self.costs.get(name, empty).joined(ps) for name, ps in costs.items()}
        return replace(self, costs={**self.costs, **found})

    def save(self, path: Path) -> None:
        """Write it to a JSON file, which is whole whatever happens."""
        costs = {
            name: [[p.size, p.seconds, p.cores, list(p.quantiles)] for p in curve.points]
            for name, curve in self.costs.items()
        }
        messages = {name: [m.seconds, m.rate] for name, m in self.messages.items()}
        data = {"form": FORM, "loop": self.loop, "machine": self.machine, "costs": costs,
                "messages": messages, "dispatch": self.dispatch}  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> Profile:
        """Read a file that `save` wrote; a SettingError if it is no profile."""
        try:
            data = read_json(path, ProfileFile, FORM)
            rows = {name: [_point(row) for row in rows] for name, rows in data["costs"].items()}
        except (OSError, ShapeError) as error:
            raise SettingError(
                f"{path} is no profile: {why_unreadable(error)}",
                "Make one with shoal plan ... --auto, or remove it.",
            ) from error
        messages = {name: Message(*pair) for name, pair in data["messages"].items()}
        plain = Profile(data["loop"], data["machine"], {}, messages, data["dispatch"])
        return plain.joined({name: points for name, points in rows.items() if points})

    def misfit(self, loop: str, machine: str) -> str:
        """Why the profile says nothing of this loop on this machine; empty if it does."""
        if self.machine != machine:
            return f"it was made on another machine ({self.machine}), and this is {machine}"
        if self.loop != loop:
            return "it was made with another loop, or with other settings of it"
        return ""


class ProfileFile(TypedDict):
    """The JSON file of a profile."""

    form: int
    loop: str
    machine: str
    costs: dict[str, list[tuple[Annotated[int, Between(1)], Positive, Positive, list[Positive]]]]
    messages: dict[str, tuple[Positive, Annotated[float, Between(1, 1e18)]]]
    dispatch: Positive


def _point(row: tuple[int, float, float, list[float]]) -> Point:
    if len(row[3]) != len(LEVELS):
        raise ShapeError(f"it has {len(row[3])} quantiles for a point, not {len(LEVELS)}")
    return Point(row[0], row[1], row[2], tuple(row[3]))
