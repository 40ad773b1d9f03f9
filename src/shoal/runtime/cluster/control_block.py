"""What all processes of a run see besides channels: how far to go, what is kept, what is shown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from shoal.planning.channel_specs import ArraySpec
from shoal.planning.plan import MOST_COPIED, Replica
from shoal.runtime.channels.shared_memory import LINE, FutexWaker, Memory, Room, fence
from shoal.runtime.execution.scheduler import Stopped
from shoal.runtime.execution.snapshot import Asked
from shoal.runtime.execution.worker_status import WorkerStatus

BANKS = 3  # a tick that all kept is in one of them while the others are written
FINAL = BANKS  # the bank for what ends carry when they end
SNAP, START = BANKS + 1, BANKS + 2  # those for snapshots, and for what the run starts from
SHOWN = 32  # ticks of metrics that wait for the driver
MANY = SHOWN // 2  # so many that it should look soon
MOST_LAGS = 1024  # lags of one end in a tick
NOTE = 256  # bytes in which a team may say what it waits for
TICKS, HOLDING, HALT, NUMBER, SNAP_TICK = range(5)


@dataclass(frozen=True)
class Spec:
    """A metric of one end."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the metric."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class EndpointLayout:
    """One end: which of a fragment's it is, how much it holds of a value, and what it shows."""

    replica: Replica
    ends: int
    carried: frozenset[str]
    shown: tuple[Spec, ...]


@dataclass(frozen=True)
class ControlLayout:
    """Where the words, the kept values and the metrics of a run lie in shared memory."""

    words: int
    started: int
    turned: int
    lost: int
    leaves: int
    bells: int
    notes: int
    stages: int
    stage_names: tuple[str, ...]  # of stages in Python
    teams: tuple[tuple[str, int], ...]  # a bell each; one more for the driver
    cells: Mapping[str, ArraySpec]
    rows: int
    kept: tuple[Mapping[str, int], ...]
    marks: int
    flights: int
    posts: Mapping[Replica, EndpointLayout]
    shows: Mapping[Replica, int]

    @staticmethod
    def plan(
        teams: tuple[tuple[str, int], ...],
        cells: Mapping[str, ArraySpec],
        rows: int,
        posts: tuple[EndpointLayout, ...],
        stage_names: tuple[str, ...],
        room: Room,
    ) -> ControlLayout:
        """Take as much room as it all needs."""
        words = room.take(5 * LINE)
        started, turned, lost, leaves = (room.take(len(teams) * LINE) for _ in range(4))
        bells, notes = room.take((len(teams) + 1) * LINE), room.take(len(teams) * NOTE)
        stages = room.take(3 * len(teams) * LINE), stage_names
        few = sum(_size(cell, rows) for cell in cells.values()) <= MOST_COPIED
        kept = tuple(
            {n: room.take(_size(c, rows)) for n, c in cells.items()} if few or bank >= FINAL else {}
            for bank in range(START + 1)
        )
        marks, flights = room.take(len(posts) * (START + 1) * 8), room.take((START + 1) * 8)
        shows = {p.replica: room.take(_show_size(p)) for p in posts}
        named = {p.replica: p for p in posts}
        counts = words, started, turned, lost, leaves
        return ControlLayout(
            *counts, bells, notes, *stages, teams, cells, rows, kept, marks, flights, named, shows
        )

    def span(self, replica: Replica, cell: ArraySpec) -> tuple[slice, ...]:
        """Which part of a value an end holds."""
        if cell.axis is None:
            return (...,)  # type: ignore[return-value]
        rows = self.rows // self.posts[replica].ends
        return (*(slice(None),) * cell.axis, slice(replica[1] * rows, (replica[1] + 1) * rows))


def _size(cell: ArraySpec, rows: int) -> int:
    return prod(cell.rows(rows)) * np.dtype(cell.dtype).itemsize


def _show_size(post: EndpointLayout) -> int:
    """Two counts, and for each tick its number, lags, and metrics."""
    arrays = sum(-(-spec.nbytes // LINE) * LINE for spec in post.shown)
    return 2 * LINE + SHOWN * ((2 + MOST_LAGS) * 8 + LINE + arrays)


class ControlBlock:
    """The board, in this process."""

    def __init__(
        self, board: ControlLayout, memory: Memory, check: Callable[[], None] = lambda: None
    ) -> None:
        self._board, self._memory = board, memory
        self._words = memory.words(board.words, 5)
        self._started = memory.words(board.started, len(board.teams))
        self._turned = memory.words(board.turned, len(board.teams))
        self._lost = memory.words(board.lost, len(board.teams))
        self._leaves = memory.words(board.leaves, len(board.teams))
        self._posts = list(board.posts)
        count = len(self._posts)
        self._marks = memory.packed(board.marks, count * (START + 1))
        self._flights = memory.packed(board.flights, START + 1)
        self._notes = memory.array(board.notes, (len(board.teams), NOTE), "uint8")
        self._stages = memory.words(board.stages, 3 * len(board.teams))
        self._numbers = {name: n for n, name in enumerate(board.stage_names, 1)}
        self._check = check

    def enter_stage(self, team: int, stage: str, tick: int) -> None:
        """Note that a team begins to run a stage in Python."""
        self._stages[3 * team + 1], self._stages[3 * team + 2] = tick, time.monotonic_ns()
        self._stages[3 * team] = self._numbers[stage]

    def leave_stage(self, team: int) -> None:
        """Note that the stage has returned or failed."""
        self._stages[3 * team] = 0

    def bell(self, team: int, spin: float = 0.0) -> FutexWaker:
        """The bell of a team."""
        return FutexWaker(self._memory, self._board.bells + team * LINE, spin, self.check)

    @property
    def driver_bell(self) -> FutexWaker:
        """The bell of the driver, which goes on when the workers are halted."""
        return FutexWaker(self._memory, self._board.bells + len(self._board.teams) * LINE)

    def check(self) -> None:
        """Raise if the run was halted, or whatever else this process looks out for."""
        if self._words[HALT]:
            raise Stopped
        self._check()

    def look_out(self, check: Callable[[], None]) -> None:
        """Let whoever waits here also check something else."""
        before = self._check

        def both() -> None:
            before()
            check()

        self._check = both

    def note(self, team: int, text: str) -> None:
        """Say what a team waits for; nothing, once it goes on."""
        said = text.encode(errors="replace")[: NOTE - 1]
        self._notes[team, : len(said)] = np.frombuffer(said, np.uint8)
        self._notes[team, len(said)] = 0

    def status(self, team: int, pid: int) -> WorkerStatus:
        """What a team is doing, in the process `pid`."""
        note = self._notes[team].tobytes().partition(b"\0")[0].decode(errors="replace")
        ticks = int(self._started[team] or self._turned[team])
        number, tick, since = self._stages[3 * team : 3 * team + 3]
        if not number:
            return WorkerStatus(ticks, note, pid)
        seconds = (time.monotonic_ns() - since) / 1e9
        return WorkerStatus(ticks, note, pid, self._board.stage_names[number - 1], tick, seconds)

    def did_turn(self, team: int) -> None:
        """An end of a team has made a turn."""
        self._turned[team] += 1

    def did_lose(self, team: int, turns: int) -> None:
        """So many turns that a team had under way when it was lost will never come."""
        self._lost[team] += turns

    def dismiss(self, team: int, word: int = 1) -> None:
        """Let a team that turns at its own pace begin no more turns; with 0, let it again."""
        self._leaves[team] = word
        self.bell(team).notify()

    def may_turn(self, team: int) -> bool:
        """Whether a team that turns at its own pace is to stay."""
        return not self._leaves[team]

    def losses(self) -> list[int]:
        """For each team, how many turns were lost with its workers, as far as is known here."""
        return list(self._lost)

    def turns(self, team: int) -> int:
        """How many turns the ends of a team have made, whoever held them."""
        return self._turned[team]

    def begin(self, ticks: int) -> None:
        """Let every team go on up to `ticks`."""
        self._words[TICKS] = ticks

    def halt(self) -> None:
        """Let nobody wait any more."""
        self._words[HALT] = 1
        for team in range(len(self._board.teams)):
            self.bell(team).notify()

    def hold(self) -> int:
        """Let nobody start a tick until `stop_at` or `snap_at`; how many ticks were started."""
        self._words[HOLDING] = 1
        fence()
        return max(self._started, default=0)

    def stop_at(self, tick: int) -> None:
        """Let nobody start `tick` or a later one."""
        self._words[TICKS] = min(self._words[TICKS], tick)
        fence()
        self._words[HOLDING] = 0

    def snap_at(self, tick: int) -> None:
        """Want a snapshot before `tick`, which nobody has started."""
        for replica in self._posts:
            self._marks[self._mark(SNAP, replica)] = 0
        self._words[SNAP_TICK] = tick
        self._words[NUMBER] += 1
        fence()
        self._words[HOLDING] = 0

    @property
    def asked(self) -> Asked:
        """The snapshot that is wanted."""
        return Asked(self._words[NUMBER], self._words[SNAP_TICK])

    def may_start(self, team: int, tick: int) -> bool:
        """Whether a team may start `tick`; it has started it then."""
        self._started[team] = max(self._started[team], tick + 1)
        fence()
        while self._words[HOLDING]:
            self.check()
            time.sleep(1e-4)
        return tick < self._words[TICKS]

    def write(self, bank: int, replica: Replica, tick: int, values: Mapping[str, Any]) -> None:
        """Keep an end's share of what is carried, as it is before `tick`, if there is room."""
        if not self._board.kept[bank]:
            return
        mark = self._mark(bank, replica)
        self._marks[mark] = 0
        for name, x in values.items():
            if name in self._board.cells:
                self._share(bank, replica, name)[...] = x
        self._marks[mark] = tick + 1

    def write_flight(self, bank: int, turns: int) -> None:
        """Keep how many turns at their own pace were under way when a bank was written."""
        self._flights[bank] = turns

    def flights(self) -> list[int]:
        """For each bank, how many turns were under way when it was written."""
        return list(self._flights)

    def forget(self, bank: int, replica: Replica) -> None:
        """Let a bank hold nothing of an end any more."""
        self._marks[self._mark(bank, replica)] = 0

    def hold_ready(self, replica: Replica, name: str, x: Any) -> None:
        """Let an end that is yet to start, start from this."""
        self._share(START, replica, name)[...] = x

    @property
    def teams(self) -> tuple[tuple[str, int], ...]:
        """A fragment and the number of one of its workers, for each team."""
        return self._board.teams

    def shares(self, banks: Mapping[Replica, int]) -> dict[tuple[Replica, str], np.ndarray]:
        """What each end kept, from the bank that is named for it."""
        return {
            (replica, name): np.array(self._share(bank, replica, name))
            for replica, bank in banks.items()
            for name in self._board.cells
            if name in self._board.posts[replica].carried
        }

    def read(self, bank: int) -> dict[str, np.ndarray]:
        """Everything that a bank holds."""
        board = self._board
        return {
            name: self._memory.array(
                first, board.cells[name].rows(board.rows), board.cells[name].dtype
            )
            for name, first in board.kept[bank].items()
        }

    def ticks(self, bank: int) -> dict[Replica, int]:
        """Before which tick each end kept what a bank holds; -1 if it holds nothing."""
        return {r: self._marks[self._mark(bank, r)] - 1 for r in self._posts}

    def _mark(self, bank: int, replica: Replica) -> int:
        return bank * len(self._posts) + self._posts.index(replica)

    def _share(self, bank: int, replica: Replica, name: str) -> np.ndarray:
        board = self._board
        cell = board.cells[name]
        whole = self._memory.array(board.kept[bank][name], cell.rows(board.rows), cell.dtype)
        return whole[board.span(replica, cell)]

    def show(self, replica: Replica) -> MetricsRing:
        """One end's metrics."""
        board = self._board
        return MetricsRing(self._memory, board.shows[replica], board.posts[replica])


@dataclass
class MetricsRing:
    """Metrics of one end on their way to the driver."""

    memory: Memory
    first: int
    post: EndpointLayout
    _slots: list[tuple[memoryview, dict[str, np.ndarray]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._puts, self._takes = (self.memory.words(self.first + i * LINE, 1) for i in range(2))
        room = Room()
        room.take(2 * LINE)
        for _ in range(SHOWN):
            words = self.memory.packed(self.first + room.take((2 + MOST_LAGS) * 8), 2 + MOST_LAGS)
            arrays = {}
            for spec in self.post.shown:
                place = self.first + room.take(spec.nbytes)
                arrays[spec.name] = self.memory.array(place, spec.shape, spec.dtype)
            self._slots.append((words, arrays))

    def is_new(self) -> bool:
        """Whether there are metrics that the driver has yet to look at."""
        return self._takes[0] < self._puts[0]

    @property
    def waiting(self) -> int:
        """Of how many ticks that is."""
        return self._puts[0] - self._takes[0]

    def is_full(self) -> bool:
        """Whether the driver has yet to look at older ones."""
        return self.waiting >= SHOWN

    def put(self, tick: int, metrics: Mapping[str, Any], lags: tuple[int, ...]) -> None:
        """Show a tick's metrics; there must be room."""
        words, arrays = self._slots[self._puts[0] % SHOWN]
        count = min(len(lags), MOST_LAGS)
        words[0], words[1] = tick, count
        for i in range(count):
            words[2 + i] = lags[i]
        for name, room in arrays.items():
            room[...] = np.asarray(metrics[name])
        self._puts[0] += 1

    def take(self) -> Iterator[tuple[int, dict[str, np.ndarray], tuple[int, ...]]]:
        """Metrics that have come, tick by tick."""
        while self._takes[0] < self._puts[0]:
            words, arrays = self._slots[self._takes[0] % SHOWN]
            found = {name: np.array(x) for name, x in arrays.items()}
            lags = tuple(words[2 : 2 + words[1]])
            yield words[0], found, lags
            self._takes[0] += 1


@dataclass
class SharedLimit:
    """How far one team may go, as the board says."""

    board: ControlBlock
    team: int

    @property
    def asked(self) -> Asked:
        """The snapshot that is wanted."""
        return self.board.asked

    def may_turn(self) -> bool:
        """Whether the team may begin another turn, where it turns at its own pace."""
        return self.board.may_turn(self.team)

    def may_start(self, tick: int, count: int = 1) -> int:
        """Whether `tick` may start; the team has started it then."""
        return int(self.board.may_start(self.team, tick))


def watch_parent(parent: int) -> Callable[[], None]:
    """A check that ends this process at once if the one that started it is gone."""

    def check() -> None:
        if os.getppid() != parent:
            os._exit(1)

    return check
