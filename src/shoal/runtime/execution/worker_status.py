"""What a worker is doing: how far it is, what it waits for, and which Python it is in."""

from __future__ import annotations

from typing import NamedTuple


class WorkerStatus(NamedTuple):
    """A worker at one moment."""

    tick: int  # ticks it has started; of an asynchronous one, those it has made
    waits_for: str = ""  # where that has lasted for long
    pid: int = 0
    stage: str = ""  # the stage in Python that it is in, if it is in one
    stage_tick: int = 0
    seconds: float = 0.0  # that it has been in the stage

    @property
    def where(self) -> str:
        """The stage it is in and for how long, in words."""
        return f"stage `{self.stage}` at tick {self.stage_tick} for {self.seconds:.0f} s"
