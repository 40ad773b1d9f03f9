"""The clocks of hosts: spans of another host are moved to the time of this one."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.profiling.spans import NewSpans


class HostSpans(NamedTuple):
    """The new spans of a host's workers, the host's clock, and its time in nanoseconds."""

    workers: dict[str, NewSpans]
    clock: str
    now: int


def host_spans(workers: dict[str, NewSpans]) -> HostSpans:
    """Spans that were read on this host, with its time."""
    return HostSpans(workers, this_clock(), time.monotonic_ns())


def this_clock() -> str:
    """What identifies the clock of this machine: it starts when the machine does."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class HostClocks:
    """The offsets of other hosts' clocks, each from the reply that took the shortest time."""

    def __init__(self) -> None:
        self._own = this_clock()
        self._offsets: dict[str, tuple[int, int]] = {}  # by clock: nanoseconds to the reply, offset

    def in_local_time(self, found: HostSpans, asked: int) -> dict[str, NewSpans]:
        """The spans of a host that was asked at `asked` and has just replied."""
        if found.clock == self._own:
            return found.workers
        replied = time.monotonic_ns()
        took, offset = replied - asked, (asked + replied) // 2 - found.now
        best = min(self._offsets.get(found.clock, (took, offset)), (took, offset))
        self._offsets[found.clock] = best
        for one in found.workers.values():
            one.spans["begin"] += best[1]
            one.spans["end"] += best[1]
        return found.workers
