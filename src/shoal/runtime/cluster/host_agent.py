"""One host's share of a run: the memory its workers share, the workers, and news of them."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.planning.plan import Replica
from shoal.planning.restart_groups import Group, Kept
from shoal.runtime.channels.channel import take_back
from shoal.runtime.channels.shared_memory import Memory, join_fences
from shoal.runtime.channels.shm import Rings
from shoal.runtime.channels.traffic import Sent, total
from shoal.runtime.cluster.control_block import (
    FINAL,
    MANY,
    SNAP,
    START,
    ControlBlock,
    ControlLayout,
)
from shoal.runtime.cluster.launching import (
    WorkerExit,
    WorkerProcess,
    kill_marked,
    lost,
    name_of,
    spawn,
)
from shoal.runtime.cluster.worker_config import ProcessSpec
from shoal.runtime.execution.worker_status import WorkerStatus
from shoal.runtime.net.sockets import LOOPBACK, Address, listen

GATHER = 0.05  # seconds that news may wait for more: each telling takes time, on a cluster most
CLOSE_GRACE_S = 5.0  # for workers to close their environments and end
STOP_GRACE_S = 1.0  # the same after a stop or a failure
Shares = dict[tuple[Replica, str], np.ndarray]


class News(NamedTuple):
    """What has happened at a site since it was last heard of."""

    shown: list[tuple[int, Replica, dict[str, np.ndarray], tuple[int, ...]]]
    ended: dict[int, WorkerExit]  # workers that have ended, by number, and how
    running: int
    back: tuple[int, ...] = ()  # workers that took a lost one's place, and have made a turn


class Left(NamedTuple):
    """What a lost worker leaves: the newest that its ends kept, and before which tick of theirs."""

    ticks: dict[Replica, int]
    shares: Shares


class Joins(NamedTuple):
    """How one joins that takes another's place: the how manieth, and where those are with it."""

    life: int
    party: Mapping[int, Address]


@dataclass(frozen=True)
class Doors:
    """For each of a site's workers: where others reach it, and where replicas may meet at it."""

    addresses: tuple[Address, ...]
    meetings: tuple[str, ...]


class HostAgent:
    """The workers of one host. The driver may be in this process or anywhere else."""

    def __init__(self, board: ControlLayout, size: int) -> None:
        self._layout, self._memory = board, Memory.make(size)
        self._board = ControlBlock(board, self._memory)
        self._bell = self._board.driver_bell
        self._host, self._doors = LOOPBACK, list[socket.socket]()
        self._late: dict[int, socket.socket] = {}  # doors of workers that are to come
        self._workers: dict[int, WorkerProcess] = {}
        self._known = set[int]()  # workers whose end the driver knows of
        self._mark = uuid.uuid4().hex
        self._cores: dict[int, tuple[int, ...]] = {}
        self._awaited: dict[int, dict[int, int]] = {}  # workers to be back: turns of their teams
        self._shows: dict[Replica, Any] = {}

    def open(self, doors: int, workers: int, host: str = LOOPBACK) -> Doors:
        """So many doors at an address of this host, and a meeting place for each worker."""
        self._host = host
        self._doors = [listen(host) for _ in range(doors)]
        addresses = tuple(door.getsockname()[:2] for door in self._doors)
        return Doors(addresses, tuple(f"{host}:{free_port(host)}" for _ in range(workers)))

    def start(
        self, hires: Sequence[ProcessSpec], given: Mapping[str, np.ndarray], ticks: int
    ) -> None:
        """Start workers, from what they carry at first, to go on up to `ticks`."""
        join_fences()
        for name, x in self._board.read(START).items():
            if name in given:
                x[...] = given[name]
        self._board.begin(ticks)
        cores = share_cores(hires)
        doors = self._doors or [None] * len(hires)
        try:
            for one, own, door in zip(hires, cores, doors, strict=True):
                self._cores[one.number] = own
                self._show(one)
                self._workers[one.number] = spawn(one, own, self._memory, self._mark, door)
        except BaseException:
            self.close(0.0)  # those that have started would wait for the others for ever
            raise

    def hear(self, seconds: float) -> News:
        """What is new, at once or when something is, after `seconds` at the latest."""
        if not self._is_new():
            self._bell.wait(self._is_new, seconds)
        until = time.monotonic() + GATHER
        while not self._is_pressing() and (left := until - time.monotonic()) > 0:
            self._bell.wait(self._is_pressing, left)
        ended = {n: exit for n in self._workers if n not in self._known and (exit := self._exit(n))}
        self._known |= ended.keys()
        shown = [
            (tick, replica, metrics, lags)
            for replica, show in self._shows.items()
            for tick, metrics, lags in show.take()
        ]
        running = len(self._workers) - len(self._known)
        return News(shown, ended, running, tuple(self._back()))

    def _back(self) -> Iterator[int]:
        for number, turns in list(self._awaited.items()):
            if all(self._board.turns(team) > before for team, before in turns.items()):
                del self._awaited[number]
                yield number

    def end(self, hire: ProcessSpec, note: str) -> Kept:
        """End a worker at once, if it hasn't ended; before which ticks its ends kept what."""
        if hire.number in self._workers:
            exit = self._exit(hire.number)
            grace = CLOSE_GRACE_S if exit and not exit.kind else 0.0
            self._workers[hire.number].close(time.monotonic() + grace)
            self._known.add(hire.number)
        for seat in hire.seats:
            self._board.note(self._layout.teams.index(seat), note)
        every = {bank: self._board.ticks(bank) for bank in range(SNAP + 1)}
        return {bank: {e: ticks[e] for e in self._ends(hire)} for bank, ticks in every.items()}

    def clear_up(self, hire: ProcessSpec, together: Sequence[Group], rings: Rings) -> None:
        """Take back what these ends had under way, so that nobody on this host waits for it."""
        states = [channel.state for channel in rings.open(self._memory).values()]
        for group in together:
            fragment, end = group[0]
            lost = take_back(states, {f for f, _ in group}, end)
            self._board.did_lose(hire.ends[fragment][end], lost)
        for team in range(len(self._layout.teams)):
            self._board.bell(team).notify()

    def left(self, hire: ProcessSpec, newest: Mapping[Replica, int]) -> Left:
        """What a worker's ends kept, from the bank that is named for each.

        What they kept later is forgotten: others would take it for what is to come.
        """
        kept = {bank: self._board.ticks(bank) for bank in range(SNAP + 1)}
        mine = [end for end in self._ends(hire) if end in newest]
        ticks = {end: kept[newest[end]][end] for end in mine}
        shares = self._board.shares({end: newest[end] for end in mine})
        for end in self._ends(hire):
            for bank in kept:
                if kept[bank][end] > ticks.get(end, -1):
                    self._board.forget(bank, end)
        snapped = self._board.ticks(SNAP)
        for end in mine:
            if snapped[end] < 0:  # who wants a snapshot needn't wait for the next
                own = {name: x for (of, name), x in shares.items() if of == end}
                self._board.write(SNAP, end, ticks[end], own)
        return Left(ticks, shares)

    def door(self, number: int) -> Address:
        """A door for a worker that is to come; where those reach it that come with it."""
        self._late[number] = listen(self._host)
        return self._late[number].getsockname()[:2]

    def flights(self) -> list[int]:
        """For each bank, how many turns were under way when who uses them wrote to it."""
        return self._board.flights()

    def losses(self) -> list[int]:
        """For each team, how many turns were lost with its workers, as far as is known here."""
        return self._board.losses()

    def replace(
        self, hire: ProcessSpec, given: Shares, ticks: Mapping[Replica, int], joins: Joins
    ) -> None:
        """Start a worker in a place that is empty, from what its ends are to carry."""
        own = sorted(os.sched_getaffinity(0))
        cores = self._cores.setdefault(hire.number, (own[hire.number % len(own)],))
        self._show(hire)
        for (replica, name), x in given.items():
            self._board.hold_ready(replica, name, x)
        for end in self._ends(hire):
            self._board.forget(FINAL, end)
        marks = [self._board.ticks(SNAP)[end] >= 0 for end in self._ends(hire)]
        snapped = self._board.asked.number - (not all(marks))
        teams = [self._layout.teams.index(seat) for seat in hire.seats]
        self._awaited[hire.number] = {team: self._board.turns(team) for team in teams}
        for team in teams:
            self._board.note(team, "")
            self._board.dismiss(team, 0)
        again = {
            "ticks": [(*end, tick) for end, tick in ticks.items()], "snapped": snapped,
            "life": joins.life, "party": list(joins.party.items()),
        }  # fmt: skip
        door = self._late.pop(hire.number, None)
        self._known.discard(hire.number)
        self._workers[hire.number] = spawn(hire, cores, self._memory, self._mark, door, again)

    def dismiss(self, hire: ProcessSpec) -> None:
        """Let a worker that turns at its own pace end after the turn that it is in."""
        for seat in hire.seats:
            self._board.dismiss(self._layout.teams.index(seat))

    def _show(self, hire: ProcessSpec) -> None:
        """Look at what a worker's ends show."""
        for end in self._ends(hire):
            if end not in self._shows:
                self._shows[end] = self._board.show(end)

    def _ends(self, hire: ProcessSpec) -> list[Replica]:
        """The ends that a worker holds."""
        teams = {self._layout.teams.index(seat) for seat in hire.seats}
        ends = [(f, e, team) for f, of in hire.ends.items() for e, team in enumerate(of)]
        return [(fragment, end) for fragment, end, team in ends if team in teams]

    def _is_new(self) -> bool:
        return self._has_ended() or any(s.is_new() for s in self._shows.values())

    def _has_ended(self) -> bool:
        """Whether some worker has, and nobody knows."""
        return any(n not in self._known and self._exit(n) for n in self._workers)

    def _exit(self, number: int) -> WorkerExit | None:
        """How a worker ended, if it has."""
        return self._workers[number].poll(self._doing(number))

    def _doing(self, number: int) -> str:
        """The stage in Python that a worker is in, and at which tick, in words."""
        for seat in self._workers[number].seats:
            status = self._board.status(self._layout.teams.index(seat), 0)
            if status.stage:
                return f"stage `{status.stage}` at tick {status.stage_tick}"
        return ""

    def _is_pressing(self) -> bool:
        """Whether there is nothing to hear, or so much that somebody may soon have to wait."""
        many = any(show.waiting >= MANY for show in self._shows.values())
        return many or self._has_ended() or not self._is_new()

    def statuses(self) -> dict[str, WorkerStatus]:
        """What each worker of a fragment is doing."""
        running = [w for n, w in self._workers.items() if n not in self._known]
        return {
            name_of((seat,)): self._board.status(self._layout.teams.index(seat), one.process.pid)
            for one in running
            for seat in one.seats
        }

    def fail(self, number: int, what: str, fix: str) -> None:
        """End a worker at once, and report that it is lost with this error."""
        worker = self._workers[number]
        if not worker.exit:
            worker.kill(lost(worker.name, what, fix))

    def hold(self) -> int:
        """Let nobody start a tick for a moment; how many ticks were started."""
        return self._board.hold()

    def stop_at(self, tick: int) -> None:
        """Let nobody start `tick` or a later one, and the others go on."""
        self._board.stop_at(tick)

    def snap_at(self, tick: int) -> None:
        """Want a snapshot before `tick`, and let all go on."""
        self._board.snap_at(tick)

    def halt(self) -> None:
        """Let nobody wait any more."""
        self._board.halt()

    def kept(self) -> Kept:
        """Before which tick each end of this site kept what each bank holds."""
        return {
            bank: {r: t for r, t in self._board.ticks(bank).items() if r in self._shows}
            for bank in range(SNAP + 1)
        }

    def shares(self, banks: Mapping[Replica, int]) -> Shares:
        """What ends of this site kept, from the bank that is named for each, if it holds any."""
        kept = {r: bank for r, bank in banks.items() if r in self._shows}
        kept = {r: bank for r, bank in kept.items() if self._board.ticks(bank)[r] >= 0}
        return self._board.shares(kept)

    def sent(self) -> dict[str, Sent]:
        """What workers of this site that have ended had sent to other hosts, by channel."""
        told = [one.exit.sent for one in self._workers.values() if one.exit]
        names = dict.fromkeys(name for one in told for name in one)
        return {n: total(one[n] for one in told if n in one) for n in names}

    def close(self, grace: float = CLOSE_GRACE_S) -> None:
        """End all workers, after a grace period by force, and all that they have started."""
        self._board.halt()
        until = time.monotonic() + grace
        for number, worker in self._workers.items():
            worker.close(until, self._doing(number))
        if self._workers:
            kill_marked(self._mark)
        for door in (*self._doors, *self._late.values()):
            door.close()


def free_port(host: str = LOOPBACK) -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def share_cores(hires: Sequence[ProcessSpec]) -> list[tuple[int, ...]]:
    """The cores of each process: one for each of many alike, what is left for the others.

    Where there are fewer cores than processes, those that are alone may use all; so may those that
    compute on another device, since they need cores only to compile.
    """
    cores = sorted(os.sched_getaffinity(0))
    alike = [one for one in hires if one.alike]
    rest = cores[len(alike) :] if len(cores) > len(alike) else cores
    turn = iter(range(len(hires)))
    return [
        (cores[next(turn) % len(cores)],) if one.alike else tuple(rest if one.on_cpu else cores)
        for one in hires
    ]
