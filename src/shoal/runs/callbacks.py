"""Callbacks of a run: functions of the user that see ticks, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import SettingError

Row = dict[str, Any]


class Stop:
    """The type of `shoal.STOP`, which a callback returns to end the run."""

    def __repr__(self) -> str:
        """As users write it."""
        return "shoal.STOP"


STOP = Stop()


@dataclass
class Callbacks:
    """Calls the functions that a user gave, on the thread that called `shoal.train`.

    After one of them has returned `STOP`, the ticks that are in flight are logged, and no function
    is called for them.
    """

    on_tick: Callable[[Row], Any] | None = None
    on_evaluation: Callable[[Row], Any] | None = None
    on_checkpoint: Callable[[Path], Any] | None = None
    stopped_by: str = ""

    def is_stopped(self) -> bool:
        """Whether a callback has ended the run."""
        return bool(self.stopped_by)

    def tick(self, row: Row) -> None:
        """Report a tick: its row of metrics.jsonl."""
        if self.on_tick is not None and not self.stopped_by:
            self._see("on_tick", self.on_tick(dict(row)))

    def evaluation(self, row: Row) -> None:
        """Report an evaluation: its row of evaluation.jsonl."""
        if self.on_evaluation is not None and not self.stopped_by:
            self._see("on_evaluation", self.on_evaluation(dict(row)))

    def checkpoint(self, folder: Path) -> None:
        """Report a checkpoint that is complete: its folder."""
        if self.on_checkpoint is not None:
            self._see("on_checkpoint", self.on_checkpoint(folder))

    def _see(self, name: str, answer: Any) -> None:
        if answer is STOP:
            self.stopped_by = self.stopped_by or name
        elif isinstance(answer, bool):
            raise SettingError(
                f"{name} returned {answer}, which ends the run in some libraries only",
                "Return shoal.STOP to end the run, and nothing to continue.",
            )
