"""How often checkpoints are written."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import SettingError

LONGEST_S = 1e9  # that may lie between two checkpoints


@dataclass(frozen=True)
class Pace:
    """An interval in ticks or seconds; neither: only when a run ends."""

    ticks: int = 0
    seconds: float = 0.0


def pace(text: str | int) -> Pace:
    """`100` or "100" (ticks), "60s" (seconds), or "end" (only when the run ends)."""
    said = str(text).strip()
    try:
        if said == "end":
            return Pace()
        found = Pace(seconds=float(said[:-1])) if said.endswith("s") else Pace(int(said))
        if 0 < max(found.ticks, found.seconds) <= LONGEST_S:
            return found
    except ValueError:
        pass
    raise SettingError(
        f"checkpoints can't be written every `{said}`",
        'Say a number of ticks (100), of seconds (60s), or "end".',
    )
