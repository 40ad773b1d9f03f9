"""The status of a worker: its tick, what it waits for, and the Python stage that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

NOTHING: Mapping[str, float] = MappingProxyType({})


def activities(stages: Iterable[str], channels: Iterable[str]) -> tuple[str, ...]:
    """What a worker's time is counted by: stages in Python, and waits to take or put."""
    return (
        *(f"in {stage}" for stage in stages),
        *(f"{verb} {channel}" for channel in channels for verb in ("take", "put")),
    )


class WorkerStatus(NamedTuple):
    """The status of a worker at one moment."""

    tick: int  # ticks started; if asynchronous, ticks completed
    waits_for: str = ""  # empty unless the wait is a long one
    pid: int = 0
    stage: str = ""  # the Python stage that it runs, if any
    stage_tick: int = 0
    seconds: float = 0.0  # since the stage was called
    spent: Mapping[str, float] = NOTHING  # seconds so far, by activity; the rest it computed

    @property
    def where(self) -> str:
        """The stage that it runs and for how long, in words."""
        return f"stage `{self.stage}` at tick {self.stage_tick} for {self.seconds:.0f} s"
