"""Learning curves of groups of runs as one SVG: the mean over seeds, and their spread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from shoal.errors import SettingError
from shoal.runs.results.listing import Group, rows_of

WIDTH, HEIGHT = 800, 480
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 24, 56
POINTS = 200  # of a curve
COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#c2255c", "#5c940d", "#495057")
AXES = {"env_steps": "environment steps", "seconds": "seconds", "tick": "ticks"}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}line{stroke:#ddd}rect.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#444}rect.back{fill:#16181d}}"
)


@dataclass(frozen=True)
class Curve:
    """The curve of a group: the mean over its runs, and the least and largest of them."""

    name: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve_of(group: Group, metric: str, axis: str) -> Curve:
    """A metric of a group's runs over an axis, as far as all of them have got."""
    lines = [np.array(list(_known(run.folder, metric, axis))) for run in group.runs]
    if empty := [run.folder for run, x in zip(group.runs, lines, strict=True) if not len(x)]:
        raise SettingError(
            f"{empty[0]} has no `{metric}` over `{axis}`",
            f"Metrics of its first row: {', '.join(_names(group))}.",
        )
    start, end = max(x[0, 0] for x in lines), min(x[-1, 0] for x in lines)
    at = np.linspace(start, max(start, end), POINTS)
    values = np.array([np.interp(at, x[:, 0], x[:, 1]) for x in lines])
    return Curve(group.name, at, values.mean(0), values.min(0), values.max(0))


def plot(groups: Sequence[Group], metric: str, axis: str) -> str:
    """The curves of groups as SVG."""
    curves = [curve_of(each, metric, axis) for each in groups]
    x = _Scale(0.0, max(c.x[-1] for c in curves), LEFT, WIDTH - RIGHT)
    low, high = min(c.low.min() for c in curves), max(c.high.max() for c in curves)
    pad = 0.05 * (high - low) or 1.0
    y = _Scale(float(low - pad), float(high + pad), HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x, y), *_titles(metric, axis)]
    for number, curve in enumerate(curves):
        parts += _drawn(curve, COLOURS[number % len(COLOURS)], x, y)
        runs = len(groups[number].runs)
        parts += _key(number, f"{curve.name} ({runs} {'run' if runs == 1 else 'runs'})")
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join(parts)
    return f'<svg {head} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> Iterator[float]:
        """About five round values."""
        step = 10 ** math.floor(math.log10(max(self.high - self.low, 1e-12) / 5))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 6)
        value = math.ceil(self.low / step) * step
        while value <= self.high:
            yield value
            value += step


def _grid(x: _Scale, y: _Scale) -> Iterator[str]:
    yield f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>'
    for value in x.ticks():
        yield f'<line x1="{x(value)}" y1="{TOP}" x2="{x(value)}" y2="{HEIGHT - BOTTOM}"/>'
        where = f'x="{x(value)}" y="{HEIGHT - BOTTOM + 18}"'
        yield f'<text {where} text-anchor="middle">{_number(value)}</text>'
    for value in y.ticks():
        yield f'<line x1="{LEFT}" y1="{y(value)}" x2="{WIDTH - RIGHT}" y2="{y(value)}"/>'
        yield f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{_number(value)}</text>'


def _titles(metric: str, axis: str) -> Iterator[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{AXES[axis]}</text>'
    where = f'transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"'
    yield f'<text {where} text-anchor="middle">{escape(metric)}</text>'


def _drawn(curve: Curve, colour: str, x: _Scale, y: _Scale) -> Iterator[str]:
    """A curve's line, and the band of its runs."""
    ahead = [f"{x(a)},{y(b)}" for a, b in zip(curve.x, curve.high, strict=True)]
    back = [f"{x(a)},{y(b)}" for a, b in zip(curve.x, curve.low, strict=True)][::-1]
    line = " ".join(f"{x(a)},{y(b)}" for a, b in zip(curve.x, curve.mean, strict=True))
    if (curve.low != curve.high).any():
        yield f'<polygon points="{" ".join(ahead + back)}" fill="{colour}" fill-opacity="0.15"/>'
    yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _key(number: int, text: str) -> Iterator[str]:
    top = TOP + 14 + 20 * number
    colour = COLOURS[number % len(COLOURS)]
    yield f'<rect x="{LEFT + 12}" y="{top - 9}" width="18" height="4" fill="{colour}"/>'
    yield f'<text x="{LEFT + 38}" y="{top - 2}">{escape(text)}</text>'


def _known(folder: object, metric: str, axis: str) -> Iterator[tuple[float, float]]:
    for row in rows_of(folder):  # pyright: ignore[reportArgumentType]
        value, at = row.get(metric), row.get(axis)
        if isinstance(value, int | float) and isinstance(at, int | float):
            yield float(at), float(value)


def _names(group: Group) -> list[str]:
    return sorted(next(iter(rows_of(group.runs[0].folder)), {}))


def _number(value: float) -> str:
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{mark}"
    return f"{value:.6g}"
