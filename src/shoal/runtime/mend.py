"""Replacing workers that are lost while all others go on: which can be, how often, and from what.

A worker can be replaced if all that it holds is free of the others' progress (`Plan.replaceable`).
What it had under way is taken back, what it had handed over stays, and another process takes its
place from the newest state that it kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.planning.plan import Plan
from shoal.runtime.board import Board
from shoal.runtime.crew import raw
from shoal.runtime.fire import Replica
from shoal.runtime.orders import Seat
from shoal.runtime.shm import Rings
from shoal.runtime.site import Left, Shares
from shoal.runtime.snapshot import Snapshot

WINDOW = 300.0  # seconds


class Loss(NamedTuple):
    """A worker that was lost, and replaced if it took so many seconds until another made a turn."""

    worker: str
    why: str
    lost: int  # turns that it had begun, and that never come
    seconds: float | None = None

    def __str__(self) -> str:
        some = f"{self.lost} {'turn' if self.lost == 1 else 'turns'} of its lost"
        after = "" if self.seconds is None else f"; replaced after {self.seconds:.1f} s"
        return f"{self.why}{after}; {some}"


@dataclass(frozen=True)
class Mending:
    """How lost workers are replaced: how often each within five minutes, and who hears of it.

    `tell` hears of each loss, and again when another has made its first turn in that place.
    `fresh` begins anew what could not be kept.
    """

    restarts: int = 0
    fresh: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    tell: Callable[[Loss], None] = lambda loss: None


@dataclass
class _Gap:
    """A place that is to be taken: since when, and what another is to start from."""

    loss: Loss
    since: float
    ticks: Mapping[Replica, int]
    shares: Shares
    fresh: Future[Shares] | None = None
    filled: bool = False


At = Callable[..., Any]  # the number of a worker, and what its site is to do


@dataclass
class Mender:
    """Takes on the losses of one run."""

    plan: Plan
    seats: Sequence[tuple[Seat, ...]]
    rings: Rings
    board: Board
    start: Snapshot
    how: Mending = field(default_factory=Mending)
    _losses: dict[int, list[float]] = field(default_factory=dict)
    _gaps: dict[int, _Gap] = field(default_factory=dict)
    _pool: ThreadPoolExecutor | None = None

    def can(self, number: int) -> bool:
        """Whether a worker is one that can be replaced, and shares memory with all it speaks to."""
        fragments = {fragment for fragment, _ in self.seats[number]}
        own = [c for c in self.plan.channels if {c.writer, c.reader} & fragments]
        near = all(c.name in self.rings.rings for c in own)
        return fragments <= self.plan.replaceable and near

    def takes_on(self, number: int, told: dict[str, Any], at: At) -> bool:
        """Whether a worker that failed is replaced; if it fails again and again, it isn't."""
        if told["kind"] != "LostError" or not self.how.restarts or not self.can(number):
            return False
        now = time.monotonic()
        recent = [then for then in self._losses.get(number, []) if now - then < WINDOW]
        self._losses[number] = [*recent, now]
        if len(recent) >= self.how.restarts:
            times = "once" if len(recent) == 1 else f"{len(recent)} times"
            told["kind"], told["what"] = (
                "RunError",
                f"{told['what']}, after it was replaced {times}",
            )
            return False
        left: Left = at(number, "clear_up", number, self.rings)
        before = self._gaps.get(number)
        since = before.since if before else now  # it may be lost again before it was back
        gap = _Gap(Loss(told["worker"], told["what"], left.lost), since, left.ticks, left.shares)
        self._gaps[number] = gap
        self.how.tell(gap.loss)
        if any(stage.host for stage in self.plan.graph.stages):
            self._pool = self._pool or ThreadPoolExecutor(1)
            gap.fresh = self._pool.submit(self._anew, gap, sum(map(len, self._losses.values())))
        return True

    def go_on(self, back: Sequence[int], at: At) -> None:
        """Fill what gaps can be filled, and tell of those who are back at work."""
        for number, gap in list(self._gaps.items()):
            if not gap.filled and (gap.fresh is None or gap.fresh.done()):
                shares = gap.shares | (gap.fresh.result() if gap.fresh else {})
                at(number, "replace", number, shares, gap.ticks)
                gap.filled = True
            if number in back:
                del self._gaps[number]
                seconds = time.monotonic() - gap.since
                self.how.tell(gap.loss._replace(seconds=seconds))

    def _anew(self, gap: _Gap, count: int) -> Shares:
        """What a lost worker's ends are to carry of what can't be kept; not the same each time."""
        ends = {replica for replica, _ in gap.shares} | gap.ticks.keys()
        given = {name: self._given(name, gap.shares) for name in self.plan.graph.inputs}
        tick = max(gap.ticks.values(), default=self.start.tick) + count
        fresh = self.how.fresh(Snapshot(tick, given)).values
        return {
            (end, name): raw(fresh[name])[self.board.span(end, self.board.cells[name])]
            for end in ends
            for name in self.board.posts[end].carried
            if name in fresh and fresh[name] is not given[name]
        }

    def _given(self, name: str, shares: Shares) -> Any:
        """A carried value of all environments, for its shape; of a lost worker's, what it kept."""
        if name in self.start.values:
            return self.start.values[name]
        cell = self.board.cells[name]
        return np.zeros(cell.rows(self.board.rows), cell.dtype)

    def gaps(self) -> Iterator[str]:
        """Workers that are lost, and whose place is yet to be taken."""
        return (gap.loss.worker for gap in self._gaps.values())

    def close(self) -> None:
        """Nobody is to be replaced any more."""
        self.how = Mending()
        if self._pool is not None:
            self._pool.shutdown()
