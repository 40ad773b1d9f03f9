"""Replacing workers that are lost while all others go on: which can be, how often, and from what.

A worker can be replaced if all that it holds is free of the others' progress (`Plan.replaceable`).
What it had under way is taken back, what it had handed over stays, and another process takes its
place from the newest state that it kept. Those whose ends go in step with its own, such as the
environments that a lost inference replica served, begin anew with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import LostError
from shoal.planning.plan import Plan, WorkerId
from shoal.planning.program import Channel
from shoal.planning.restart_groups import Kept, groups, newest_together, worker_groups
from shoal.runtime.channels.shm import Rings
from shoal.runtime.cluster.control_block import ControlLayout
from shoal.runtime.cluster.host_agent import Joins, Left, Shares
from shoal.runtime.cluster.launching import WorkerExit
from shoal.runtime.cluster.worker_config import ProcessSpec
from shoal.runtime.execution.compiled_executor import raw
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.logs import Say

WINDOW = 300.0  # seconds
Party = tuple[int, ...]  # workers that begin anew together
LATER = 5.0  # seconds in which others hear of a worker whose place stays empty


class WorkerFailure(NamedTuple):
    """A worker that was lost, and after how many seconds another had made a turn, if one has."""

    worker: str
    why: str
    lost: int  # turns that it had begun, and that never come, as far as is known
    seconds: float | None = None
    is_new: bool = True

    def __str__(self) -> str:
        some = f"{self.lost} {'turn' if self.lost == 1 else 'turns'} of its lost"
        after = "not back" if self.seconds is None else f"replaced after {self.seconds:.1f} s"
        return f"{self.why}; {after}; {some}"


@dataclass(frozen=True)
class RestartPolicy:
    """How lost workers are replaced: how often each within five minutes, and who hears of it.

    `tell` hears of each loss when it is new, and again when another has made its first turn in
    that place or the run is over; `say` hears of who comes and goes otherwise.
    `fresh` begins anew what could not be kept.
    """

    restarts: int = 0
    fresh: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    tell: Callable[[WorkerFailure], None] = lambda loss: None
    say: Say = lambda line: None


@dataclass
class PendingRestart:
    """Places that are to be taken together: since when, and what others are to start from."""

    loss: WorkerFailure | None  # none if nobody was there
    since: float
    left: Left
    life: int
    fresh: Future[Shares] | None = None
    filled: bool = False
    until: float = 0.0  # when to tell of it, if nobody is to take the place
    back: set[int] = field(default_factory=set)  # those who have made a turn there


@dataclass
class Supervisor:
    """Takes on the losses of one run."""

    plan: Plan
    seats: Sequence[tuple[WorkerId, ...]]
    rings: Rings
    board: ControlLayout
    start: Snapshot
    how: RestartPolicy = field(default_factory=RestartPolicy)
    at: Callable[..., Any] = lambda number, does, *args: None  # what a worker's site is to do
    each: Callable[..., Any] = lambda does: []
    hires: Sequence[ProcessSpec] = ()
    refused: WorkerExit | None = None  # the last that was lost too often
    _opened: int = 0
    _losses: dict[int, list[float]] = field(default_factory=dict)
    _gaps: dict[Party, PendingRestart] = field(default_factory=dict)
    _counted: dict[Party, int] = field(default_factory=dict)  # turns that were told of as lost
    _pool: ThreadPoolExecutor | None = None

    def can(self, number: int) -> bool:
        """Whether a worker is one that can be replaced, with those that begin anew with it.

        Who else it is connected with stays.
        """
        fragments = self._fragments(self._parties[number])
        free, step = self.plan.replaceable, self.plan.in_step
        far = [c for c in self._far(fragments) if step(c.writer) != step(c.reader)]
        return fragments <= free and not any({c.writer, c.reader} <= free for c in far)

    def _fragments(self, party: Party) -> set[str]:
        return {f for n in party for f, _ in self.seats[n]}

    def _far(self, fragments: set[str]) -> list[Channel]:
        """Channels between hosts that fragments have."""
        own = [c for c in self.plan.channels if {c.writer, c.reader} & fragments]
        return [c for c in own if c.name not in self.rings.rings]

    @cached_property
    def _parties(self) -> tuple[Party, ...]:
        return worker_groups(self.plan, self.seats)

    @property
    def empty(self) -> set[int]:
        """Workers whose place is to be taken, and isn't yet."""
        return {number for party in self._gaps for number in party}

    def knows(self, number: int) -> bool:
        """Whether a worker is known to have ended: nobody is in its place yet."""
        gap = self._gaps.get(self._parties[number])
        return gap is not None and not gap.filled

    def loose(self) -> tuple[frozenset[int], ...]:
        """The workers that are to be replaced when they are lost, together where they must be."""
        elastic = {f.name for f in self.plan.distribution.elastic}
        every = [n for n in range(len(self.seats)) if self.can(n)]
        found = [n for n in every if self.how.restarts or self.seats[n][0][0] in elastic]
        return tuple(dict.fromkeys(frozenset(self._parties[n]) for n in found))

    def takes_on(self, number: int, told: WorkerExit, left: Left | None = None) -> bool:
        """Whether a worker that failed is replaced; if it fails again and again, it isn't.

        `left` is what it leaves, where its site can't be asked any more.
        """
        if told.kind != "LostError" or not self.how.restarts or not self.can(number):
            return False
        party = self._parties[number]
        if left is not None and len(party) > 1:
            return False
        now = time.monotonic()
        recent = [then for then in self._losses.get(number, []) if now - then < WINDOW]
        self._losses[number] = [*recent, now]
        if len(recent) >= self.how.restarts:
            times = "once" if len(recent) == 1 else f"{len(recent)} times"
            self.refused = replace(
                told, kind="RunError", what=f"{told.what}, after it was replaced {times}"
            )
            return False
        self._settle(party)  # it may be lost again before it was back
        self._open(party, left or self.clear_up(number, "lost, and being replaced"))
        loss = WorkerFailure(told.worker, told.what, self._lost(party))
        self._gaps[party].loss = loss
        self.how.tell(loss)
        return True

    def clear_up(self, number: int, note: str = "") -> Left:
        """Take back what a worker had under way, and those that begin anew with it.

        One of them is gone, and the others end; what they leave is the newest of one tick.
        """
        party = self._parties[number]
        seats = [seat for n in party for seat in self.seats[n]]
        held = {(f, end) for f, w in seats for end in self.plan.ends_of(f, w)}
        together = [group for group in groups(self.plan) if held.issuperset(group)]
        kept: Kept = {}
        for n in party:
            for bank, ticks in self.at(n, "end", self.hires[n], note).items():
                kept[bank] = kept.get(bank, {}) | ticks
        for n in party:
            self.at(n, "clear_up", self.hires[n], together, self.rings)
        newest = newest_together(kept, together)
        every = [self.at(n, "left", self.hires[n], newest) for n in party]
        ticks = {end: tick for left in every for end, tick in left.ticks.items()}
        return Left(ticks, {of: x for left in every for of, x in left.shares.items()})

    def fill(self, number: int) -> None:
        """Let a worker come to a place that is empty."""
        party = self._parties[number]
        gap = self._gaps.get(party)
        if gap is not None and gap.until:
            self._settle(party)
        if party not in self._gaps:
            self._open(party, self.clear_up(number))

    def _open(self, party: Party, left: Left) -> None:
        self._opened += 1
        gap = self._gaps[party] = PendingRestart(None, time.monotonic(), left, self._opened)
        if any(stage.host for stage in self.plan.graph.stages):
            self._pool = self._pool or ThreadPoolExecutor(1)
            gap.fresh = self._pool.submit(self._anew, gap)

    def give_up(self, number: int) -> None:
        """Leave a place empty; what was lost with who was there may be known only later."""
        gap = self._gaps[self._parties[number]]
        gap.filled, gap.until = True, time.monotonic() + LATER

    def _lost(self, party: Party) -> int:
        """How many turns were lost with workers, as far as is known: others hear of it later."""
        teams = [self.board.teams.index(seat) for n in party for seat in self.seats[n]]
        total = sum(lost[team] for lost in self.each("losses") for team in teams)
        return total - self._counted.get(party, 0)

    def _settle(self, party: Party, seconds: float | None = None) -> None:
        """Tell how a loss ended."""
        gap = self._gaps.pop(party, None)
        if gap is None:
            return
        lost = self._lost(party)
        self._counted[party] = self._counted.get(party, 0) + lost
        if gap.loss is None:
            names = "+".join(f"{f}[{w}]" for n in party for f, w in self.seats[n])
            self.how.say(f"worker {names} has come" if seconds else f"worker {names} has not come")
        else:
            self.how.tell(gap.loss._replace(lost=lost, seconds=seconds, is_new=False))

    def go_on(self, back: Sequence[int]) -> None:
        """Fill what gaps can be filled, and tell of those who are back at work."""
        for party, gap in list(self._gaps.items()):
            if not gap.filled and (gap.fresh is None or gap.fresh.done()):
                self._start_anew(party, gap)
            gap.back |= set(back).intersection(party)
            if gap.until and time.monotonic() >= gap.until:
                self._settle(party)
            if gap.back.issuperset(party):
                self._settle(party, time.monotonic() - gap.since)

    def _start_anew(self, party: Party, gap: PendingRestart) -> None:
        """Let others take places, from what was left or begun anew."""
        shares = gap.left.shares | (gap.fresh.result() if gap.fresh else {})
        fragments = self._fragments(party)
        apart = any({c.writer, c.reader} <= fragments for c in self._far(fragments))
        at = {n: self.at(n, "door", n) for n in party} if apart else {}
        joins = Joins(gap.life, at)
        for number in party:
            held = [(f, end) for f, w in self.seats[number] for end in self.plan.ends_of(f, w)]
            mine = {(end, name): x for (end, name), x in shares.items() if end in held}
            ticks = {end: tick for end, tick in gap.left.ticks.items() if end in held}
            self.at(number, "replace", self.hires[number], mine, ticks, joins)
        gap.filled = True

    def _anew(self, gap: PendingRestart) -> Shares:
        """What a lost worker's ends are to carry of what can't be kept; not the same each time."""
        given = {name: self._given(name) for name in self.plan.graph.inputs}
        tick = max(gap.left.ticks.values(), default=self.start.tick) + gap.life
        fresh = self.how.fresh(Snapshot(tick, given)).values
        return {
            (end, name): raw(fresh[name])[self.board.span(end, self.board.cells[name])]
            for end in gap.left.ticks
            for name in self.board.posts[end].carried
            if name in fresh and fresh[name] is not given[name]
        }

    def _given(self, name: str) -> Any:
        """A carried value of all environments: as it was at the start, or at least its shape."""
        if name in self.start.values:
            return self.start.values[name]
        cell = self.board.cells[name]
        return np.zeros(cell.rows(self.board.rows), cell.dtype)

    def close(self) -> None:
        """Nobody is to be replaced any more; tell of those who were not back."""
        with suppress(LostError):
            for party in list(self._gaps):
                self._settle(party)
        self.how = RestartPolicy()
        if self._pool is not None:
            self._pool.shutdown()
