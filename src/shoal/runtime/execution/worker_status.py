"""The status of a worker: its tick, what it waits for, and the Python stage that it runs."""

from __future__ import annotations

from typing import NamedTuple


class WorkerStatus(NamedTuple):
    """The status of a worker at one moment."""

    tick: int  # ticks started; if asynchronous, ticks completed
    waits_for: str = ""  # empty unless the wait is a long one
    pid: int = 0
    stage: str = ""  # the Python stage that it runs, if any
    stage_tick: int = 0
    seconds: float = 0.0  # since the stage was called

    @property
    def where(self) -> str:
        """The stage that it runs and for how long, in words."""
        return f"stage `{self.stage}` at tick {self.stage_tick} for {self.seconds:.0f} s"
