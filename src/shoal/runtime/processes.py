"""The processes backend: workers in processes of their own, joined by shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax

from shoal.errors import ShoalError
from shoal.planning.plan import Plan
from shoal.runtime.blame import bad_metrics, not_finite
from shoal.runtime.board import BANKS, FINAL, SNAP, Board, OpenBoard, Post, Spec
from shoal.runtime.collect import Collector, Shown
from shoal.runtime.crew import raw, wrapped
from shoal.runtime.fire import Replica
from shoal.runtime.gates import Cell, make_cell, make_sheets
from shoal.runtime.hire import Hiring
from shoal.runtime.limit import Limit
from shoal.runtime.links import listen
from shoal.runtime.machine import check_memory
from shoal.runtime.memory import Memory, Room, join_fences
from shoal.runtime.operations import Program
from shoal.runtime.orders import Orders
from shoal.runtime.pieces import lagged, past_names
from shoal.runtime.rebuilt import environment
from shoal.runtime.shm import Rings
from shoal.runtime.snapshot import Snapshot, value_of
from shoal.runtime.spawn import PATIENCE, Child, spawn, told_error
from shoal.runtime.wiring import divide, make_lines


class Processes:
    """A run of a plan over processes."""

    def __init__(self, plan: Plan, programs: list[Program], start: Snapshot) -> None:
        self._plan = replace(plan, apart=True)
        self._programs = {p.fragment: p for p in programs}
        self._start, self._print = start, str(plan)
        self._collector = Collector(self._plan, programs, start.tick)
        self._hiring = Hiring(self._plan, self._programs, self._print, start)
        near, self._far = divide(make_sheets(self._plan), self._hiring.crowd)
        room = Room()
        self._rings = Rings.plan(near, room)
        self._layout = Board.plan(
            tuple((f, w) for f in self._programs for w in range(self._plan.workers(f))),
            self._cells(),
            plan.graph.envs,
            tuple(self._posts()),
            room,
        )
        self._memory = Memory.make(check_memory(room.size))
        self._board = OpenBoard(self._layout, self._memory)
        self._shows = {r: self._board.show(r) for r in self._layout.posts}
        self._bell = self._board.driver_bell
        self._children: list[Child] = []
        self._limit: Limit | None = None
        self._failure: ShoalError | None = None
        self._asked = 0  # which snapshot the workers were asked for last
        self._awaits = False  # whether they have yet to give all of it

    def _cells(self) -> dict[str, Cell]:
        """Everything that is kept: what is carried, and what is on its way to who lags."""
        values = self._plan.graph.values
        found = {name: make_cell(values[name]) for name in self._plan.graph.inputs}
        for line in lagged(self._plan):
            found |= {name: make_cell(values[value_of(name)]) for name in past_names(line)}
        return found

    def _posts(self) -> Iterator[Post]:
        values = self._plan.graph.values
        for fragment, program in self._programs.items():
            ends = self._plan.ends(fragment)
            rows = self._plan.batch(fragment) // ends
            shown = tuple(
                Spec(name, make_cell(values[v]).rows(rows), values[v].dtype)
                for name, v in program.metrics
            )
            lines = [line for line in lagged(self._plan) if line.writer == fragment]
            carried = frozenset(before for before, _ in program.carry)
            carried |= {name for line in lines for name in past_names(line)}
            for end in range(ends):
                yield Post((fragment, end), ends, carried, shown)

    def start(self, limit: Limit) -> None:
        """Start all workers."""
        join_fences()
        self._limit = limit
        given = {**self._start.past, **self._start.values}
        for name, x in self._board.read(SNAP).items():
            if name in given:
                x[...] = raw(given[name])
        self._board.begin(limit.ticks)
        listeners = [listen() for _ in self._hiring.seats] if self._far else []
        lines = make_lines(self._far, self._hiring.crowd, [s.getsockname()[:2] for s in listeners])
        orders = self._hiring.orders(self._rings, self._layout, self._memory.size, lines)
        try:
            for one, listener in zip(orders, listeners or [None] * len(orders), strict=True):
                env = self._environment(one)
                self._children.append(spawn(one, self._memory, env, listener))
        except BaseException:
            self.close()  # those that have started would wait for the others for ever
            raise

    def _environment(self, orders: Orders) -> dict[str, str]:
        places = [self._plan.places[f][w % len(self._plan.places[f])] for f, w in orders.seats]
        threads = str(len(orders.cores) or os.cpu_count() or 1)
        libraries = ("OMP", "OPENBLAS", "MKL")
        found = {f"{name}_NUM_THREADS": threads for name in libraries}
        if any(f not in orders.crews for f, _ in orders.seats):
            kinds = [p.device.kind for p in places]
            found |= environment({kind: kinds.count(kind) for kind in kinds})
        return found

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether there is more to come. Raises a worker's failure."""
        assert self._limit is not None
        if self._limit.is_stopping:
            self._board.stop()
        if self._limit.asked.number > self._asked and self._board.ask(self._limit.asked.tick):
            self._asked, self._awaits = self._limit.asked.number, True
        if not self._news():
            self._bell.wait(self._news, seconds)
        self._look_after()
        if self._failure is not None:
            self.close()
            good = self._good(2**62)
            self._failure.state, self._failure.tick = dict(good.values), good.tick  # type: ignore[attr-defined]
            raise self._failure
        return any(c.process.poll() is None for c in self._children)

    def _news(self) -> bool:
        return any(s.is_new() for s in self._shows.values()) or any(
            c.process.poll() is not None and not c.told for c in self._children
        )

    def _look_after(self) -> None:
        """Hear who has ended; when all that count ticks have, the free ones are stopped."""
        for child in self._children:
            if child.process.poll() is not None and not child.told:
                child.told = self._heard(child)
                if child.told["failed"] and self._failure is None:
                    self._failure = told_error(child)
        counted = [c for c in self._children if any(f not in self._plan.free for f, _ in c.seats)]
        if self._failure is not None or all(c.told for c in counted):
            self._board.halt()

    def _heard(self, child: Child) -> dict[str, Any]:
        line = child.report.readline()
        child.close()
        return {"failed": child.process.returncode != 0, **(json.loads(line) if line else {})}

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks, in order; raises at the first that isn't finite."""
        for replica, show in self._shows.items():
            for tick, metrics, lags in show.take():
                self._collector.show(tick, replica, metrics, lags)
        for tick, shown in self._collector.ready():
            if bad := bad_metrics(shown):
                raise not_finite(self._plan, self._good(tick), tick, bad)
            yield tick, shown

    def looked(self) -> Iterator[tuple[int, Shown]]:
        """What onlookers have shown, as far as `ready` has seen it come."""
        return self._collector.looked()

    def snapshots(self) -> Iterator[Snapshot]:
        """The snapshot that was asked for, when every end has given its part."""
        if self._awaits:
            ticks = self._board.ticks(SNAP)
            if min(ticks.values()) >= 0:
                self._awaits = False
                yield self._whole(dict.fromkeys(ticks, SNAP), self._counted(ticks))

    def final(self) -> Snapshot:
        """The state that all ends have reached together, or the last that they all kept."""
        self.close()
        ended = self._board.ticks(FINAL)
        counted = {r: t for r, t in ended.items() if r[0] not in self._plan.free}
        if len(set(counted.values())) == 1 and min(counted.values()) >= 0:
            banks = {r: FINAL if t >= 0 else self._newest(r) for r, t in ended.items()}
            return self._whole(banks, self._counted(ended))
        return self._good(min((t for t in counted.values() if t >= 0), default=2**62))

    def _counted(self, ticks: Mapping[Replica, int]) -> int:
        """The tick of those that count them."""
        return next(tick for (f, _), tick in ticks.items() if f not in self._plan.free)

    def _newest(self, replica: Replica) -> int:
        return max(range(BANKS), key=lambda bank: self._board.ticks(bank)[replica])

    def _good(self, tick: int) -> Snapshot:
        """The newest state that all ends kept at or before `tick`."""
        kept = [self._board.ticks(bank) for bank in range(BANKS)]
        counted = [r for r in self._layout.posts if r[0] not in self._plan.free]
        ticks = [{k[r] for r in counted} for k in kept]
        usable = {t.copy().pop(): b for b, t in enumerate(ticks) if len(t) == 1 and max(t) >= 0}
        usable = {t: bank for t, bank in usable.items() if t <= tick}
        if not usable:
            return self._start
        best = max(usable)
        banks = {r: usable[best] if r in counted else self._newest(r) for r in self._layout.posts}
        return self._whole(banks, best)

    def _whole(self, banks: Mapping[Replica, int], tick: int) -> Snapshot:
        cells, inputs = self._layout.cells, self._plan.graph.inputs
        # Who was stopped before it kept anything carries what it started from.
        kept = {r: bank for r, bank in banks.items() if self._board.ticks(bank)[r] >= 0}
        found = {
            name: wrapped(jax.numpy.asarray(x)) if cells[name].is_key else jax.numpy.asarray(x)
            for name, x in self._board.gather(kept).items()
        }
        past = {name: x for name, x in found.items() if name not in inputs}
        return Snapshot(tick, {name: found[name] for name in inputs}, past)

    def close(self) -> None:
        """End all workers, gently and then not."""
        self._board.halt()
        until = time.monotonic() + PATIENCE
        for child in self._children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.told = child.told or self._heard(child)
