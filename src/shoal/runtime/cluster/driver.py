"""Plans over processes: the driver of workers on one host or many, and the backend for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Never

import jax
import numpy as np

from shoal.errors import ShoalError
from shoal.planning.channel_specs import make_channel_specs
from shoal.planning.plan import Plan, Replica
from shoal.planning.restart_groups import Kept, groups, newest_together
from shoal.planning.segments import Program
from shoal.runtime.channels.shared_memory import Room
from shoal.runtime.channels.shm import Rings
from shoal.runtime.cluster.assignment import ProcessAssignment
from shoal.runtime.cluster.control_block import BANKS, FINAL, SNAP
from shoal.runtime.cluster.control_layout import make_control_layout
from shoal.runtime.cluster.host_agent import CLOSE_GRACE_S, STOP_GRACE_S, Doors, Left
from shoal.runtime.cluster.hosts import Hosts, LocalHosts, Wanted
from shoal.runtime.cluster.launching import WorkerExit, lost
from shoal.runtime.cluster.replica_set import ReplicaSet
from shoal.runtime.cluster.supervisor import RestartPolicy, Supervisor
from shoal.runtime.debug.blame import bad_metrics, not_finite
from shoal.runtime.execution.compiled_executor import raw, wrapped
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.metrics import Collector, Shown
from shoal.runtime.execution.snapshot import Snapshot, check_complete
from shoal.runtime.execution.worker_status import WorkerStatus
from shoal.runtime.net.codec import Sent, total
from shoal.runtime.net.wiring import divide, make_remote_channels


class ProcessRun:
    """A run of a plan by workers in processes of their own, on any hosts."""

    def __init__(self, plan: Plan, programs: list[Program], start: Snapshot, sites: Hosts) -> None:
        self._plan = plan.over_processes
        self._programs = {p.fragment: p for p in programs}
        self._start, self._sites = start, sites
        self._collector = Collector(self._plan, programs, start.tick)
        self._hiring = ProcessAssignment(self._plan, self._programs, start)
        crowd = self._hiring.crowd
        self._roster = ReplicaSet(self._plan, self._hiring.seats)
        if sites.grows:  # all that there is ever room for, unless somebody says otherwise
            self._roster.wanted = {f.name: f.most for f in plan.distribution.elastic}
        here = [(n, crowd.hosts[n]) for n in sorted(self._roster.present)]
        hosts = list(dict.fromkeys(host for _, host in here))
        self._held = [[n for n, host in here if host == own] for own in hosts]
        roaming = [f.name for f in plan.distribution.elastic] if sites.grows else []
        near, self._far = divide(make_channel_specs(self._plan), crowd, roaming)
        room = Room()
        self._rings = Rings.plan(near, room)
        self._layout = make_control_layout(self._plan, self._programs, room)
        self._mender = Supervisor(self._plan, self._hiring.seats, self._rings, self._layout, start)
        self._mender.at, self._mender.each = self._at, self._each
        wanted = [
            Wanted(host, len(held), len(held) if self._far else 0, self._on_gpu(host))
            for host, held in zip(hosts, self._held, strict=True)
        ]
        self._doors = sites.open(self._layout, room.size, wanted)
        self._limit: Limit | None = None
        self._failure: ShoalError | None = None
        self._asked = 0  # which snapshot the workers were asked for last
        self._awaits: set[Replica] = set()  # ends that have yet to give their part of it
        self._stopped = False
        self._ended: set[int] = set()

    def mend(self, how: RestartPolicy) -> None:
        """Replace workers that are lost, where that can be done while the others go on."""
        self._mender.how = how

    def _on_gpu(self, host: str) -> bool:
        places = [p for places in self._plan.places.values() for p in places]
        return any(p.host == host and p.device.kind == "gpu" for p in places)

    def start(self, limit: Limit) -> None:
        """Start all workers."""
        self._limit = limit
        given = self._given()
        if not self._plan.is_copied:
            self._start = self._start.without(b for b, a in self._plan.graph.carry if a != b)
            self._mender.start = self._start
        at = {number: place for held, doors in zip(self._held, self._doors, strict=True)
              for number, place in zip(held, _places(doors), strict=True)}  # fmt: skip
        every = range(len(self._hiring.seats))
        addresses, meetings = zip(*(at.get(n, (("", 0), "")) for n in every), strict=True)
        parties, absent = self._mender.loose(), self._roster.absent
        lines = make_remote_channels(self._far, self._hiring.crowd, addresses, parties, absent)
        hires = self._hiring.orders(self._rings, self._layout, lines, meetings)
        self._mender.hires, self._ticks = hires, limit.ticks
        loose = frozenset().union(*parties)
        self._sites.loose |= {i for i, held in enumerate(self._held) if set(held) <= loose}
        by_site = [[hires[number] for number in held] for held in self._held]
        count = len(self._held)
        self._pass_on()
        try:
            self._sites.each("start", by_site, [given] * count, [limit.ticks] * count)
        except BaseException:
            self.close()  # those that have started would wait for the others for ever
            raise

    def _given(self) -> dict[str, np.ndarray]:
        """What all start from."""
        given = {**self._start.past, **self._start.values}
        return {name: raw(given[name]) for name in self._layout.cells if name in given}

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether there is more to come.

        Raises a worker's failure, but not before what came in until then could be given back.
        """
        assert self._limit is not None
        if self._failure is not None:
            self._raise(self._failure)
        if self._limit.is_stopping and not self._stopped:
            self._stopped = True
            self._at_once("stop_at", 0)
        self._pass_on()
        return self._hear(seconds) or self._failure is not None

    def _raise(self, failure: ShoalError) -> Never:
        """End with a failure that carries the newest state from which no tick is left out."""
        self._sites.end(STOP_GRACE_S)
        good = self._good(self._collector.told)
        for name, x in (("state", dict(good.values)), ("tick", good.tick), ("snapshot", good)):
            setattr(failure, name, x)
        raise failure

    def _pass_on(self) -> None:
        """Ask the workers for the snapshot that the limit asks for."""
        assert self._limit is not None
        if self._limit.asked.number > self._asked:
            there = self._roster.present - self._mender.empty  # of others, what they kept will do
            self._asked, self._awaits = self._limit.asked.number, self._ends(there)
            self._at_once("snap_at", self._limit.asked.tick)

    def _at_once(self, does: str, tick: int) -> None:
        """Let all sites do something before the same tick, which none of them has started."""
        started = [one for one in self._sites.each("hold") if one is not None]
        self._sites.each(does, [max(tick, *started)] * len(self._held))

    def _hear(self, seconds: float) -> bool:
        """Take in what is new; when all that count ticks have ended, the free ones are stopped."""
        count = len(self._held)
        news = self._sites.each("hear", [seconds / count] * count)
        for site, one in enumerate(news):
            if one is None:
                self._lose_site(site)
                continue
            for shown in one.shown:
                self._collector.show(*shown)
            for number, told in one.ended.items():
                self._lose(number, told)
            self._mender.go_on(one.back)
        if self._failure is not None or self._is_done():
            self._mender.close()
            self._sites.each("halt")
        else:
            self._come_and_go()
        return any(one.running for one in news if one is not None)

    def _lose(self, number: int, told: WorkerExit) -> None:
        """A worker has ended: as it should, or it is replaced, or the run fails with it."""
        if number in self._roster.leaving:
            self._mender.clear_up(number)
            self._leave(number)
            return
        if self._mender.knows(number):
            return
        fails = bool(told.kind) and self._failure is None
        if fails and self._is_done() and self._mender.can(number):
            fails = False  # nobody needs it any more
        if fails and self._mender.takes_on(number, told):
            return
        self._ended.add(number)
        if fails:
            self._failure = (self._mender.refused or told).error

    def _is_done(self) -> bool:
        """Whether all that count ticks have ended."""
        seats = self._hiring.seats
        return {n for n, held in enumerate(seats) if self._counts(held)} <= self._ended

    def _at(self, number: int, does: str, *args: Any) -> Any:
        """Let the site of a worker do something."""
        return self._sites.one(self._site_of(number), does, *args)

    def _site_of(self, number: int) -> int:
        return next(i for i, held in enumerate(self._held) if number in held)

    def _each(self, does: str, *args: Sequence[Any]) -> list[Any]:
        """Let all sites do something; what those answer that are there."""
        return [one for one in self._sites.each(does, *args) if one is not None]

    def _ends(self, numbers: Iterable[int]) -> set[Replica]:
        """The ends of workers."""
        ends, found = self._hiring.crowd.ends, set(numbers)
        return {(f, end) for f, at in ends.items() for end, n in enumerate(at) if n in found}

    def scale(self, wanted: Mapping[str, int]) -> None:
        """Have so many replicas of fragments that may come and go, within their bounds."""
        for line in self._roster.want(wanted):
            self._mender.how.say(line)

    def _come_and_go(self) -> None:
        """Let come and go who is to."""
        for number, comes in self._roster.changes():
            if not comes:
                self._roster.leaving.add(number)
                self._at(number, "dismiss", self._mender.hires[number])
            elif not self._come(number):
                break

    def _come(self, number: int) -> bool:
        """Let a worker come, where there is room; whether there was."""
        site = self._sites.add(self._hiring.crowd.hosts[number])
        if site is None:
            return False
        if site == len(self._held):
            self._held.append([])
            self._sites.one(site, "start", [], self._given(), self._ticks)
            self._sites.loose.add(site)
        for held in self._held:
            held[:] = [n for n in held if n != number]
        self._held[site].append(number)
        self._roster.present.add(number)
        self._ended.discard(number)
        self._mender.fill(number)
        return True

    def _leave(self, number: int) -> None:
        """A worker has left; nobody waits for its part of anything."""
        self._roster.leave([number])
        self._awaits -= self._ends([number])
        self._ended.add(number)
        self._sites.drop(self._site_of(number))

    def _lose_site(self, site: int) -> None:
        """A host is gone: do without its workers, or let them come elsewhere."""
        lost = [n for n in self._held[site] if n in self._roster.present]
        self._held[site] = []
        for number in lost:
            told = lost_with_host(self._hiring.crowd.names[number])
            self._awaits -= self._ends([number])
            spared = self._roster.can_spare(number)
            if not self._mender.takes_on(number, told, Left({}, {})):
                self._failure = self._failure or told.error
            elif spared or not self._come(number):
                self._mender.give_up(number)
                self._roster.leave([number])
                if not spared:
                    self._failure = self._failure or told.error

    def _counts(self, held: Sequence[tuple[str, int]]) -> bool:
        return any(fragment not in self._plan.asynchronous for fragment, _ in held)

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks, in order; raises at the first that has a NaN."""
        for tick, shown in self._collector.ready():
            if bad := bad_metrics(shown):
                raise not_finite(self._plan, self._good(tick), tick, bad)
            yield tick, shown

    def sent(self) -> dict[str, Sent]:
        """What workers that have ended had sent to other hosts, by channel."""
        told = self._each("sent")
        names = dict.fromkeys(name for one in told for name in one)
        return {n: total(one[n] for one in told if n in one) for n in names}

    def statuses(self) -> dict[str, WorkerStatus]:
        """What each worker of a fragment is doing."""
        return {k: v for found in self._each("statuses") for k, v in found.items()}

    def fail(self, worker: str, what: str, fix: str) -> None:
        """End a worker at once: it is lost with this error, and may be replaced."""
        names = [[f"{f}[{w}]" for f, w in held] for held in self._hiring.seats]
        number = next(n for n, held in enumerate(names) if worker in held)
        self._at(number, "fail", number, what, fix)

    def looked(self) -> Iterator[tuple[int, Shown]]:
        """What observers have shown, as far as `ready` has seen it come."""
        return self._collector.looked()

    def snapshots(self) -> Iterator[Snapshot]:
        """The snapshot that was asked for, when every end has given its part."""
        if not self._awaits:
            return
        ticks = self._kept()[SNAP]
        if all(ticks[end] >= 0 for end in self._awaits):
            self._awaits = set()
            yield self._whole(self._banks(SNAP), self._counted(ticks))

    def final(self) -> Snapshot:
        """The state that all ends have reached together, or the last that they all kept."""
        self._sites.end(STOP_GRACE_S if self._stopped else CLOSE_GRACE_S)
        ended = self._kept()[FINAL]
        counted = {r: t for r, t in ended.items() if r[0] not in self._plan.asynchronous}
        if len(set(counted.values())) == 1 and min(counted.values()) >= 0:
            return self._whole(self._banks(FINAL), self._counted(ended))
        good = self._good(min((t for t in counted.values() if t >= 0), default=2**62))
        return check_complete(good, self._plan.graph.inputs)

    def _kept(self) -> Kept:
        """Before which tick each end kept what each bank holds, over all sites."""
        found: Kept = {bank: dict.fromkeys(self._layout.posts, -1) for bank in range(SNAP + 1)}
        for kept in self._each("kept"):
            for bank, ticks in kept.items():
                found[bank] |= ticks
        return found

    def _counted(self, ticks: Mapping[Replica, int]) -> int:
        """The tick of those that count them, or the bank."""
        return next(tick for (f, _), tick in ticks.items() if f not in self._plan.asynchronous)

    def _banks(self, bank: int) -> dict[Replica, int]:
        """For each end, `bank`; for free ones only if it is of use, or else their newest.

        Those that go in step must have kept it before the same tick. Who has left has kept what
        it ended with.
        """
        kept, together = self._kept(), groups(self._plan)
        newest = newest_together({b: kept[b] for b in range(FINAL + 1)}, together)
        mine = newest_together({bank: kept[bank]} if bank >= FINAL else {}, together)
        counted = [r for r in self._layout.posts if r[0] not in self._plan.asynchronous]
        return newest | mine | dict.fromkeys(counted, bank)

    def _good(self, tick: int) -> Snapshot:
        """The newest state that all ends kept at or before `tick`."""
        kept = self._kept()
        counted = [r for r in self._layout.posts if r[0] not in self._plan.asynchronous]
        ticks = [{kept[bank][r] for r in counted} for bank in range(BANKS)]
        usable = {t.copy().pop(): b for b, t in enumerate(ticks) if len(t) == 1 and max(t) >= 0}
        usable = {t: bank for t, bank in usable.items() if t <= tick}
        if not usable:
            return self._start
        best = max(usable)
        return self._whole(self._banks(usable[best]), best)

    def _whole(self, banks: Mapping[Replica, int], tick: int) -> Snapshot:
        """What all ends kept, put together; what nobody has kept is as it was at the start."""
        cells, inputs = self._layout.cells, self._plan.graph.inputs
        given = {**self._start.past, **self._start.values}
        found = {
            name: np.array(raw(given[name])) if name in given
            else np.zeros(cell.rows(self._layout.rows), cell.dtype)
            for name, cell in cells.items()
        }  # fmt: skip
        for shares in self._each("shares", [banks] * len(self._held)):
            for (replica, name), x in shares.items():
                found[name][self._layout.span(replica, cells[name])] = x
        as_jax = {
            name: wrapped(jax.numpy.asarray(x)) if cells[name].is_key else jax.numpy.asarray(x)
            for name, x in found.items()
        }
        past = {name: x for name, x in as_jax.items() if name not in inputs}
        bank = self._counted(banks)
        under_way = max(flights[bank] for flights in self._each("flights"))
        values = {name: as_jax[name] for name in inputs}
        return Snapshot(tick, values, past, under_way=under_way)

    def close(self) -> None:
        """End all workers and give everything back."""
        self._mender.close()
        self._sites.close()


def lost_with_host(worker: str) -> WorkerExit:
    """The exit of a worker whose host is gone."""
    return lost(
        worker, f"worker {worker} is lost with its host", "`ray status` shows what is left."
    )


def _places(doors: Doors) -> Iterator[tuple[Any, str]]:
    """Each worker's address, if it has a door, and where replicas may meet at it."""
    addresses: Sequence[Any] = doors.addresses or [None] * len(doors.meetings)
    yield from zip(addresses, doors.meetings, strict=True)


def processes(plan: Plan, programs: list[Program], start: Snapshot) -> ProcessRun:
    """A run of a plan by processes of this host."""
    return ProcessRun(plan, programs, start, LocalHosts())
