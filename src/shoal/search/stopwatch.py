"""Times calls as an idle machine would run them: without the time in which others had the cores."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np

from shoal.simulation.profile import LEVELS, Point

TASKS = Path("/proc/self/task")
LEAST_CORES = 0.1
Key = tuple[str, int]  # a part, and its size


def waited() -> float:
    """Seconds in which threads of this process were ready and had no core; 0 if not known."""
    total = 0
    with suppress(OSError):
        for task in os.listdir(TASKS):
            with suppress(OSError, ValueError, IndexError):  # it has just ended
                total += int((TASKS / task / "schedstat").read_bytes().split()[1])
    return total / 1e9


class Stopwatch:
    """Notes calls by part and round, and takes the round in which all of them were fastest.

    So the parts of a plan add up to a time that it really took. `width` is how many threads
    compute at once: a wait of each of them then delays the round only once.
    """

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self._rounds: list[tuple[float, dict[Key, list[tuple[float, float]]]]] = []
        self.restart()

    def restart(self) -> None:
        """Forget the round that has begun."""
        self._notes: dict[Key, list[tuple[float, float]]] = defaultdict(list)
        self._began = time.perf_counter(), time.process_time(), waited()

    def add(self, key: str, size: int, began: float, used: float, times: int = 1) -> None:
        """Note `times` calls that have just ended, by the clocks when they began."""
        spent = time.perf_counter() - began, time.process_time() - used
        self._notes[key, size].append((spent[0] / times, spent[1] / times))

    def next_round(self) -> None:
        """End a round."""
        wall, cpu, delay = (
            now - then
            for now, then in zip(
                (time.perf_counter(), time.process_time(), waited()), self._began, strict=True
            )
        )
        # Waits of threads at the same time count more than once, but no work is done in no time.
        alone = min(wall, max(wall - delay / self._width, cpu / self._width))
        self._rounds.append((alone / max(wall, 1e-9), dict(self._notes)))
        self.restart()

    def points(self) -> dict[str, list[Point]]:
        """The points of all parts."""
        totals = [
            share * sum(s for calls in notes.values() for s, _ in calls)
            for share, notes in self._rounds
        ]
        order = sorted(range(len(totals)), key=totals.__getitem__)
        found: dict[str, list[Point]] = defaultdict(list)
        for key, size in dict.fromkeys(k for _, notes in self._rounds for k in notes):
            best = next(i for i in order if (key, size) in self._rounds[i][1])
            found[key].append(self._point((key, size), best))
        return found

    def _point(self, key: Key, best: int) -> Point:
        share, notes = self._rounds[best]
        seconds = max(1e-9, share * float(np.mean([s for s, _ in notes[key]])))
        used = float(np.mean([c for _, c in notes[key]]))
        every = [part * s for part, n in self._rounds for s, _ in n.get(key, ())]
        levels = tuple(map(float, (np.quantile(every, LEVELS) / seconds).round(3)))
        return Point(key[1], seconds, max(LEAST_CORES, round(used / seconds, 3)), levels)
