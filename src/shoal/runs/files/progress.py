"""The progress of a run: a bar in a terminal, or a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

MEASURED = 0.2  # seconds of ticks before a rate is shown: they are seen every 0.05
PLAIN_EVERY_S = 10.0  # between lines where output is redirected
NOTEBOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Standing:
    """How far a run is."""

    tick: int
    ticks: int
    env_steps: int
    rate: float  # steps a second; ticks where nothing is stepped; 0 until it is known
    mean: float | None
    elapsed: float
    left: float | None  # seconds, once they can be estimated

    def __str__(self) -> str:
        """In at most 64 characters."""
        parts = [f"{short(self.tick)}/{short(self.ticks)}"]
        if self.env_steps:
            parts.append(f"{short(self.env_steps)} steps")
        if self.rate:
            parts.append(f"{short(self.rate)}/s")
        if self.mean is not None:
            parts.append(f"return {self.mean:.1f}")
        times = clock(self.elapsed)
        return "  ".join([*parts, times if self.left is None else f"{times} <{clock(self.left)}"])


class Face(Protocol):
    """How the progress is shown."""

    def see(self, standing: Standing) -> None:
        """Show how far the run is."""
        ...

    def say(self, line: str) -> None:
        """Write a line that stays."""
        ...

    def start(self) -> None:
        """Begin to show."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


class Nothing:
    """Shows only lines that stay."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def see(self, standing: Standing) -> None:
        """Show nothing."""

    def say(self, line: str) -> None:
        """Write a line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def start(self) -> None:
        """Nothing to begin."""

    def stop(self) -> None:
        """Nothing to end."""


class Drawn:
    """A bar in a terminal."""

    def __init__(self, console: Console, ticks: int) -> None:
        self._bar = Bar(
            TextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[shown]}", table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=ticks, shown="compiling")

    def see(self, standing: Standing) -> None:
        """Draw the bar again."""
        self._bar.update(self._task, completed=standing.tick, shown=str(standing))

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def start(self) -> None:
        """Draw the bar."""
        self._bar.start()

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


class Plain:
    """A line every few seconds, in a file or a log."""

    def __init__(self, every: float = PLAIN_EVERY_S, end: str = "\n") -> None:
        self._every, self._end, self._last, self._newest = every, end, time.monotonic(), ""

    def see(self, standing: Standing) -> None:
        """Write a line, if it is time."""
        self._newest = str(standing)
        if time.monotonic() - self._last >= self._every:
            self._write()

    def _write(self) -> None:
        self._last = time.monotonic()
        start = "\r\x1b[K" if self._end == "" else ""
        print(f"{start}{self._newest}", end=self._end, file=sys.stderr, flush=True)  # noqa: T201
        self._newest = ""

    def say(self, line: str) -> None:
        """Write a line."""
        start = "\r\x1b[K" if self._end == "" else ""
        print(f"{start}{line}", file=sys.stderr, flush=True)  # noqa: T201

    def start(self) -> None:
        """Begin to count the seconds."""
        self._last = time.monotonic()

    def stop(self) -> None:
        """Write how far it got."""
        if self._newest:
            self._write()
        if self._end == "":
            print(file=sys.stderr)  # noqa: T201


class Progress:
    """Shows the progress of a run; a context manager, so that the bar ends with the run."""

    def __init__(self, ticks: int, steps: int, *, shown: bool | None) -> None:
        self._ticks, self._steps = ticks, steps
        self._began, self._first = time.perf_counter(), (0, 0.0)
        console = Console(stderr=True)
        self._face = face(console, ticks, shown=console.is_jupyter if shown is None else shown)

    def see(self, tick: int, mean: float | None, env_steps: int) -> None:
        """Show that a tick is done, and the number of environment steps so far."""
        now = time.perf_counter()
        begun, since = self._first = self._first if self._first[1] else (tick, now)
        speed = (tick - begun) / (now - since) if now - since > MEASURED else 0.0
        left = (self._ticks - tick - 1) / speed if speed else None
        rate = speed * (self._steps or 1)
        standing = Standing(
            tick + 1, self._ticks, env_steps if self._steps else 0, rate, mean,
            now - self._began, left,
        )  # fmt: skip
        self._face.see(standing)

    def look(self, tick: int, mean: float) -> None:
        """Show an evaluation."""
        if not isinstance(self._face, Nothing):
            self.say(f"evaluation at tick {tick}: mean return {mean:.1f}")

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self._face.say(line)

    def __enter__(self) -> Progress:
        self._face.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._face.stop()


def face(console: Console, ticks: int, *, shown: bool) -> Face:
    """How progress is shown here: drawn, in one line of a notebook, in plain lines, or not."""
    if not shown:
        return Nothing(console)
    if console.is_jupyter:
        return Plain(NOTEBOOK_EVERY_S, end="")
    return Drawn(console, ticks) if console.is_terminal else Plain()


def short(count: float) -> str:
    """A count in at most five characters."""
    for size, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{mark}"
    return f"{count:.0f}"


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
