"""Simulates a plan: its programs and the runtime's flow control, with a virtual clock."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from shoal.errors import RunError
from shoal.planning.channel_specs import ChannelSpec, Gate
from shoal.planning.plan import Plan, Replica
from shoal.planning.policy import Latest, Serve, is_late, takes_some
from shoal.profiling.spans import SPAN, Kind
from shoal.roles import steps_a_tick
from shoal.runtime.channels.channel import DEPTH, ChannelState, make_bundles
from shoal.runtime.channels.flow_control import NEVER, Counts, Ledger, Turn, waits
from shoal.simulation.estimate import is_python
from shoal.simulation.machines import Accelerator, Clock, Server, SharedCores
from shoal.simulation.profile import LEVELS
from shoal.simulation.script import NUMPY, Item, Move, Scripts, Step, Turns, rows_of

WARM = 3  # a tick's time is measured after a third of the ticks
LUMPED = 32  # endpoints of a fragment that are simulated; each stands for others like it
SPANS = 4096  # that are kept of each worker
KEPT = 64  # messages of an endpoint whose versions are remembered


@dataclass(frozen=True)
class Simulated:
    """What a plan did in a simulation; `lags` counts the messages used by their lag in ticks."""

    ticks: int
    tick_seconds: float
    steps: int
    busy: Mapping[str, float]
    waits: Mapping[str, float]
    lags: Mapping[int, int]
    events: int
    spans: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)  # by worker

    @property
    def steps_per_second(self) -> float:
        """Steps of all environments a second."""
        return self.steps / self.tick_seconds

    def __str__(self) -> str:
        lines = [
            f"{self.steps_per_second:,.0f} steps/s, {1000 * self.tick_seconds:.3g} ms a tick "
            f"({self.ticks} ticks simulated, {self.events:,} events)"
        ]
        lines += [f"  {name}: busy {share:.0%}" for name, share in self.busy.items()]
        lines += [f"  {name} {share:.0%}" for name, share in self.waits.items() if share >= 0.005]
        if set(self.lags) - {0}:
            total = sum(self.lags.values())
            shown = (f"{lag}: {n / total:.0%}" for lag, n in sorted(self.lags.items()))
            lines.append(f"  lag in ticks: {', '.join(shown)}")
        return "\n".join(lines)


def simulate(
    scripts: Scripts, ticks: int, seed: int | None = None, lumped: int = LUMPED
) -> Simulated:
    """Simulate so many ticks; with a seed, steps take as long as single calls did when measured.

    Of each fragment's endpoints at most `lumped` are simulated, each in place of some that are
    exchangeable with it.
    """
    return Simulation(scripts, ticks, None if seed is None else random.Random(seed), lumped).run()


class Simulation:
    """The state of a simulation: workers, channels, machines and the clock."""

    def __init__(
        self, scripts: Scripts, ticks: int, noise: random.Random | None, lumped: int
    ) -> None:
        self.scripts, self.ticks, self.noise, self.clock = scripts, ticks, noise, Clock()
        plan = scripts.plan
        self.stands_for = {
            f.name: _group(plan, f.name, lumped) for f in plan.distribution.fragments
        }
        specs = {name: lump(spec, self.stands_for) for name, spec in scripts.specs.items()}
        self.channels = dict(_states(specs))
        # By channel and turn: the version that a message was computed from, and when it was put.
        self.versions: dict[str, dict[Turn, tuple[int, float]]] = defaultdict(dict)
        self.sent: Counter[tuple[str, int]] = Counter()
        self.lags: Counter[int] = Counter()
        late = [c for c in plan.channels if is_late(c.flow) and c.reader not in plan.observers]
        self.measures = {c.writer for c in late} - plan.asynchronous
        self.finished: dict[int, float] = {}  # by tick: when the last synchronous endpoint ended it
        self._left: Counter[int] = Counter()
        self._servers: dict[tuple[str, str], Server] = {}
        self.workers = list(self._make_workers())
        self._counted = sum(
            len(w.ends) for w in self.workers if w.fragment not in plan.asynchronous
        )
        self._subscribe()
        self._prime()

    def run(self) -> Simulated:
        """Run to the end."""
        for worker in self.workers:
            worker.start()
        self.clock.run(lambda: len(self.finished) >= self.ticks)
        if len(self.finished) < self.ticks:
            raise RunError(
                "the simulated plan is stuck: " + "; ".join(self.waiting()),
                "This is a bug in Shoal's planner: please report it.",
            )
        first = self.ticks // WARM
        begin = self.finished[first - 1] if first else 0.0
        tick = (self.finished[self.ticks - 1] - begin) / (self.ticks - first)
        plan = self.scripts.plan
        return Simulated(
            self.ticks, tick, steps_a_tick(plan) or plan.seen, self._busy(), self._waits(),
            dict(self.lags), self.clock.events, {w.name: w.spans.array() for w in self.workers},
        )  # fmt: skip

    def end_tick(self, fragment: str, tick: int) -> None:
        """Count an endpoint that has ended a tick."""
        if fragment in self.scripts.plan.asynchronous:
            return
        self._left[tick] += 1
        if self._left[tick] == self._counted:
            self.finished[tick] = self.clock.now

    def waiting(self) -> list[str]:
        """What each endpoint that waits is waiting for."""
        gates = {name: state.spec.gate for name, state in self.channels.items()}
        pending = ((w.fragment, end, move) for w in self.workers for end, move in w.waiting.items())
        return list(waits(((f, end), gates[m.channel], m.takes) for f, end, m in pending))

    def server(self, fragment: str, item: Step | Move) -> Server:
        """What does a step's work: a host's cores, its interpreter, or an accelerator.

        Replicas on several hosts share the cores of these hosts alike.
        """
        plan = self.scripts.plan
        places = plan.places[fragment]
        hosts = dict.fromkeys(p.host for p in places)
        where = ",".join(hosts)
        on_cpu = places[0].device.kind == "cpu" or is_python(item)
        if not on_cpu:
            devices = ",".join(dict.fromkeys(map(str, places)))
            count = 1 if plan.one_program(fragment) else len(set(map(str, places)))
            if count == 1:
                return self._servers.setdefault((devices, "device"), Accelerator(self.clock))
            return self._servers.setdefault((devices, "device"), SharedCores(self.clock, count))
        if is_python(item) and self.scripts.backend == "threads":
            return self._servers.setdefault((where, "python"), SharedCores(self.clock, 1.0))
        cores = sum(h.cpus for h in plan.cluster.hosts if h.name in hosts)
        return self._servers.setdefault((where, "cores"), SharedCores(self.clock, cores))

    def seconds(self, fragment: str, item: Step | Move) -> float:
        """How long a step takes this time: of several endpoints, as long as the longest."""
        if self.noise is None or isinstance(item, Move):
            return item.seconds
        u = self.noise.random() ** (1 / self.stands_for[fragment])
        right = min(max(1, bisect_right(LEVELS, u)), len(LEVELS) - 1)
        a, b = LEVELS[right - 1], LEVELS[right]
        low, high = item.quantiles[right - 1], item.quantiles[right]
        return item.seconds * (low + (u - a) / (b - a) * (high - low))

    def _make_workers(self) -> Iterator[Worker]:
        plan = self.scripts.plan
        for fragment, script in self.scripts.fragments.items():
            ends = plan.ends(fragment) // self.stands_for[fragment]
            workers = min(plan.workers(fragment), ends)
            clients = plan.distribution.clients(fragment)
            for w in range(workers):
                mine = range(w * ends // workers, (w + 1) * ends // workers)
                yield Worker(self, fragment, mine, script, clients[1] if clients else None)

    def _subscribe(self) -> None:
        by_end: dict[Replica, Worker] = {(w.fragment, e): w for w in self.workers for e in w.ends}
        for state in self.channels.values():
            gate = state.spec.gate
            readers = [by_end[gate.reader, e] for e in range(state.spec.readers)]
            state.subscribe(readers, [by_end[gate.writer, e] for e in range(state.spec.writers)])

    def _prime(self) -> None:
        for name, state in self.channels.items():
            for end in range(state.spec.writers):
                for number in range(state.spec.gate.lag):
                    self.versions[name][end, number] = 0, -inf
                    self.sent[name, end] += 1
                    state.did_put(end)

    def _busy(self) -> dict[str, float]:
        found: dict[str, list[float]] = defaultdict(list)
        for worker in self.workers:
            found[worker.fragment].append(worker.spent["busy"] / self.clock.now)
        return {name: sum(shares) / len(shares) for name, shares in found.items()}

    def _waits(self) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        count = Counter(w.fragment for w in self.workers)
        for worker in self.workers:
            for what, seconds in worker.spent.items():
                if what != "busy":
                    share = seconds / self.clock.now / count[worker.fragment]
                    total[f"{worker.fragment} waits to {what}"] += share
        return dict(sorted(total.items(), key=lambda item: -item[1]))


Event = Step | Move


class Spans:
    """The newest spans of a worker, as its recorder would have written them."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, ...]] = deque(maxlen=SPANS)

    def add(
        self, kind: Kind, when: tuple[float, float], site: int, end: int, tick: int, number: int = 0
    ) -> None:
        """Add one, with its begin and end in seconds."""
        begin, stop = (int(1e9 * x) for x in when)
        self._found.append((begin, stop, site, end, kind, number, tick))

    def array(self) -> np.ndarray:
        """All of them."""
        return np.array(list(self._found), SPAN)


class Worker:
    """The endpoints of one worker, which run one at a time; it is the waker of its channels."""

    def __init__(
        self, simulation: Simulation, fragment: str, ends: range, script: Sequence[Item],
        serve: Serve | None,
    ) -> None:  # fmt: skip
        self._simulation, self.fragment, self.ends = simulation, fragment, ends
        self._script, self._serve = script, serve
        self._running = {end: self._walk(end) for end in ends}
        self._ready: deque[int] = deque(ends)
        self.waiting: dict[int, Move] = {}
        self._asking: dict[int, Step] = {}
        self._tick = dict.fromkeys(ends, 0)
        self._taken: dict[int, list[Turn]] = {}  # by endpoint, with the take in progress
        self._version = dict.fromkeys(ends, 0)
        self._is_working = self._is_poked = False
        self._idle_since = 0.0
        self.spans = Spans()
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._is_free = fragment in simulation.scripts.plan.asynchronous
        self._counts_lags = fragment in simulation.measures

    @property
    def name(self) -> str:
        """The fragment, and the first of its endpoints."""
        return f"{self.fragment}[{self.ends.start}]"

    def start(self) -> None:
        """Begin."""
        self._next()

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Never called: simulated workers don't sleep."""
        raise AssertionError

    def notify(self) -> None:
        """Look again at what endpoints wait for, when all that happens now has happened."""
        if self._is_poked or self._is_working:
            return
        self._is_poked = True
        self._simulation.clock.at(self._simulation.clock.now, self._look)

    def _look(self) -> None:
        self._is_poked = False
        if not self._is_working:
            self._next()

    def _walk(self, end: int) -> Generator[Event]:
        simulation = self._simulation
        while self._is_free or self._tick[end] < simulation.ticks:
            self._version[end] = NEVER if self._is_free else self._tick[end]
            yield from _steps(self._script)
            simulation.end_tick(self.fragment, self._tick[end])
            self._tick[end] += 1

    def _next(self) -> None:
        """Run the next endpoint that is ready until it works or waits."""
        self._count_idle()
        while True:
            while self._ready:
                if self._advance(self._ready.popleft()):
                    return
            free = [e for e, move in self.waiting.items() if self._may(e, move)]
            for end in free:
                move = self.waiting.pop(end)
                if self._move(end, move):
                    self._ready.extend(e for e in free if e != end and e not in self.waiting)
                    return
            if not self._ready:
                break
        if self._asking:
            self._serve_batch()
            return
        self._idle_since = self._simulation.clock.now

    def _count_idle(self) -> None:
        now = self._simulation.clock.now
        if (idle := now - self._idle_since) > 0 and self.waiting:
            for move in self.waiting.values():
                what = f"{'take' if move.takes else 'put'} {move.channel}"
                self.spent[what] += idle / len(self.waiting)
            end, move = next(iter(self.waiting.items()))
            self.spans.add(Kind.WAIT, (now - idle, now), move.site, end, self._tick[end])
        self._idle_since = now

    def _advance(self, end: int) -> bool:
        """Run an endpoint to its next work or wait; whether it works now."""
        event = next(self._running[end], None)
        if event is None:
            return False
        if isinstance(event, Step):
            if self._serve is not None and not event.is_python:
                self._asking[end] = event
                return False
            self._work([end], event, self._simulation.seconds(self.fragment, event))
            return True
        if not self._may(end, event):
            self.waiting[end] = event
            return False
        return self._move(end, event)

    def _work(self, ends: Sequence[int], item: Event, seconds: float) -> None:
        """Do work that belongs to some endpoints, which are ready when it is done."""
        self._is_working = True
        simulation = self._simulation
        began = simulation.clock.now

        def done() -> None:
            self.spent["busy"] += simulation.clock.now - began
            self._record(ends[0], item, (began, simulation.clock.now))
            self._is_working = False
            if isinstance(item, Move) and not item.takes:
                self._put(ends[0], item)
            self._ready.extend(ends)
            self._idle_since = simulation.clock.now
            self._next()

        demand = max(1.0, item.cores) if isinstance(item, Step) else 1.0
        server = simulation.server(self.fragment, item)
        server.add(seconds, demand * simulation.stands_for[self.fragment], done)

    def _record(self, end: int, item: Event, when: tuple[float, float]) -> None:
        """Record a span, and after a take which messages it took."""
        tick, number = self._tick[end], 0
        if isinstance(item, Move):
            kind = Kind.TAKE if item.takes else Kind.PUT
            number = self._simulation.sent[item.channel, end] if not item.takes else 0
        elif item.is_python:
            kind = Kind.NUMPY if item.name == NUMPY else Kind.STAGE
        else:
            kind = Kind.BATCH if self._serve is not None else Kind.SEGMENT
        self.spans.add(kind, when, item.site, end, tick, number)
        if kind == Kind.TAKE:
            for writer, message in self._taken.get(end, ()):
                self.spans.add(Kind.TURN, (when[1], when[1]), item.site, writer, tick, message)

    def _may(self, end: int, move: Move) -> bool:
        simulation = self._simulation
        state = simulation.channels[move.channel]
        if not move.takes:
            return state.may_put(end)
        return state.may_take(end, self._tick[end]) and self._has_arrived(end, move, state)

    def _has_arrived(self, end: int, move: Move, state: ChannelState) -> bool:
        """Whether messages that were put are here; if not, it looks again when they are."""
        if not move.latency or isinstance(state.spec.gate.flow, Latest):
            return True
        number = state.taken[end]
        turns = (
            state.turns(end, self._tick[end])
            if state.bundle is not None
            else [(w, number) for w in state.spec.gate.sources[end]]
        )
        known, clock = self._simulation.versions[move.channel], self._simulation.clock
        arrives = max(known[turn][1] for turn in turns) + move.latency
        if arrives > clock.now:
            clock.at(arrives, self.notify)
        return arrives <= clock.now

    def _move(self, end: int, move: Move) -> bool:
        """Begin a move that is allowed; a take frees the writer's slots at once."""
        if move.takes:
            self._take(end, move)
        self._work([end], move, move.seconds)
        return True

    def _take(self, end: int, move: Move) -> None:
        simulation, tick = self._simulation, self._tick[end]
        state = simulation.channels[move.channel]
        turns = state.turns(end, tick)
        known = simulation.versions[move.channel]
        versions = [known[turn][0] for turn in turns]
        state.let_go(end, turns)
        self._taken[end] = turns
        self._version[end] = min(self._version[end], *versions)
        if self._counts_lags:
            simulation.lags.update(tick - v for v in versions if v < NEVER)

    def _put(self, end: int, move: Move) -> None:
        simulation = self._simulation
        state, key = simulation.channels[move.channel], (move.channel, end)
        number = simulation.sent[key]
        simulation.sent[key] += 1
        known = simulation.versions[move.channel]
        known[end, number] = self._version[end], simulation.clock.now
        known.pop((end, number - KEPT), None)
        state.did_put(end)

    def _serve_batch(self) -> None:
        """Run pending requests of one kind as a batch, padded to a power of 2 endpoints."""
        assert self._serve is not None
        most = self._serve.max_batch or len(self._asking)
        first = next(iter(self._asking.values()))
        same = [end for end, step in self._asking.items() if step is first][:most]
        for end in same:
            del self._asking[end]
        simulation = self._simulation
        size = 1 << (len(same) - 1).bit_length()
        rows = rows_of(simulation.scripts.plan, self.fragment)
        curve = simulation.scripts.profile.costs[first.name]
        alone = simulation.seconds(self.fragment, first) / first.seconds
        self._work(same, first, curve.at(size * rows) * alone)


def _steps(items: Iterable[Item]) -> Iterator[Event]:
    """Every step of a tick, in order."""
    for item in items:
        if isinstance(item, Turns):
            for _ in range(item.count):
                yield from _steps(item.body)
        else:
            yield item


def _states(specs: Mapping[str, ChannelSpec]) -> Iterator[tuple[str, ChannelState]]:
    """Channels as the runtime has them, without any message."""
    bundles = make_bundles(specs)
    ends = max((max(s.writers, s.readers) for s in specs.values() if s.gate.admits), default=0)
    ledger = Ledger([0] * ends, [0] * ends, [0] * ends, [0] * (ends * DEPTH), DEPTH)
    for name, spec in specs.items():
        counts = Counts([0] * spec.writers, [0] * max(spec.readers, spec.writers))
        counts.ledger = ledger if spec.gate.admits else None
        yield name, ChannelState(spec, counts, bundles.get(name))


# Lumping


def _group(plan: Plan, fragment: str, most: int) -> int:
    """How many endpoints of a fragment one stands for; 1 where they aren't exchangeable."""
    ends = plan.ends(fragment)
    ringed = plan.distribution.fragment(fragment).ring > 1
    if ends <= most or ringed or plan.distribution.clients(fragment):
        return 1
    if any(takes_some(c.flow) or isinstance(c.flow, Latest) for c in plan.channels):
        return 1
    return ends // max(n for n in range(1, most + 1) if ends % n == 0)


def lump(spec: ChannelSpec, stands_for: Mapping[str, int]) -> ChannelSpec:
    """A channel between endpoints that each stand for some that are like it."""
    gate = spec.gate
    writers, readers = stands_for[gate.writer], stands_for[gate.reader]
    if writers == readers == 1:
        return spec
    sources: list[tuple[int, ...]] = []
    for reader in range(0, spec.readers, readers):
        every = {w // writers for r in range(reader, reader + readers) for w in gate.sources[r]}
        sources.append(tuple(sorted(every)))
    made: Gate = replace(gate, sources=tuple(sources))
    return replace(spec, gate=made, writers=spec.writers // writers)
