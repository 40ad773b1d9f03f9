"""A progress bar for a run: ticks, steps, steps per second, and the mean return."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

MEASURED = 0.2  # seconds of ticks before a rate is shown: they are seen every 0.05


class Progress:
    """Shows the progress of a run; a context manager, so that the bar ends with the run."""

    def __init__(self, ticks: int, steps: int, *, shown: bool) -> None:
        self._steps, self._first = steps, (0, 0.0)  # the first tick here, and when it was seen
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("ticks"),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._bar.add_task("compiling", total=ticks, shown="")

    def see(self, tick: int, mean: float | None, env_steps: int) -> None:
        """Show that a tick is done, and the number of environment steps so far."""
        now = time.perf_counter()
        begun, since = self._first = self._first if self._first[1] else (tick, now)
        rate = self._steps * (tick - begun) / (now - since) if now - since > MEASURED else 0.0
        text = f"{env_steps:,} steps" if self._steps else ""
        text += f"  {rate:,.0f} steps/s" if rate else ""
        text += f"  return {mean:.1f}" if mean is not None else ""
        self._bar.update(self._task, completed=tick + 1, description="training", shown=text)

    def look(self, tick: int, mean: float) -> None:
        """Show an evaluation above the bar."""
        if not self._bar.disable:
            self.say(f"evaluation at tick {tick}: mean return {mean:.1f}")

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
