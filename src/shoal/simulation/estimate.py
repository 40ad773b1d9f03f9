"""What a plan would do, in closed form: seconds a tick, who is busy, who waits, what limits it.

Within a fragment times add up. Fragments that wait for each other in a tick follow the critical
path; those with a lag, or asynchronous, overlap, and the slowest gives the pace. No host does more
work than its cores can.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shoal.graph.words import size_text
from shoal.planning.plan import Plan
from shoal.planning.policy import Latest, Serve, lag_of, takes_some
from shoal.roles import steps_a_tick
from shoal.simulation.profile import LEVELS
from shoal.simulation.script import Item, Move, Scripts, Step, Turns

TICKS = 4  # that the critical path is followed through; and as many more as there is lag
TURNS = 6  # of a loop that are followed; the rest are like these


@dataclass(frozen=True)
class Estimate:
    """What a plan would do. `busy` and `waits` are shares of a tick, by fragment.

    `low` and `high` are steps a second of a slow and of a fast tick. `lag` is the largest number
    of ticks that values are behind; None if it has no bound. `memory` is in bytes, by place.
    """

    tick_seconds: float
    steps: int
    low: float
    high: float
    busy: Mapping[str, float]
    waits: Mapping[str, float]
    lag: int | None
    memory: Mapping[str, int]
    bottleneck: str

    @property
    def steps_per_second(self) -> float:
        """Steps of all environments a second; turns of rows where nothing steps environments."""
        return self.steps / self.tick_seconds

    def __str__(self) -> str:
        busy = ", ".join(f"{name} {share:.0%}" for name, share in self.busy.items())
        place, most = max(self.memory.items(), key=lambda item: item[1])
        return (
            f"{self.steps_per_second:,.0f} steps/s ({self.low:,.0f} to {self.high:,.0f}), "
            f"{1000 * self.tick_seconds:.3g} ms a tick; busy: {busy}; at most {size_text(most)} of "
            f"memory, on {place}; "
            f"limited by {self.bottleneck}"
        )


def estimate(scripts: Scripts) -> Estimate:
    """What a plan would do, from what its parts cost."""
    plan, load = scripts.plan, Load(scripts)
    limits = dict(load.limits())
    if not load.is_pipelined and len(load.names) > 1:
        limits["the critical path, as fragments wait for each other"] = critical_path(load)
    what, seconds = max(limits.items(), key=lambda item: item[1])
    steps = steps_a_tick(plan) or plan.seen
    busy = {name: min(1.0, load.busy(name) / seconds) for name in load.names}
    slow, fast = load.spread(seconds)
    return Estimate(
        seconds, steps, steps / slow, steps / fast, busy,
        {name: 1 - share for name, share in busy.items()},
        lag_bound(plan), memory(plan), what,
    )  # fmt: skip


def lag_bound(plan: Plan) -> int | None:
    """The largest number of ticks that a value may be behind when it is used; None: no bound."""
    lags: list[int] = [0]
    for channel in plan.channels:
        if channel.reader in plan.observers:
            continue
        if isinstance(channel.flow, Latest):
            if channel.flow.max_lag is None:
                return None
            lags.append(channel.flow.max_lag)
        lags.append(lag_of(channel.flow))
    return max(lags)


def memory(plan: Plan) -> dict[str, int]:
    """Bytes that each place holds of what is carried and received, without what XLA needs."""
    held: Counter[str] = Counter()
    for fragment in plan.distribution.fragments:
        carried = {
            v for v, after in plan.graph.carry
            if fragment.name in plan.sites.holders(after, plan.homes)
        }  # fmt: skip
        taken = {v for c in plan.channels if c.reader == fragment.name for v in c.values}
        for place in plan.places[fragment.name]:
            for name in carried | taken:
                value = plan.graph.values[name]
                held[str(place)] += value.nbytes // (fragment.most if value.axis is not None else 1)
    return dict(held)


@dataclass(frozen=True)
class Load:
    """How a plan loads its machines in a tick."""

    scripts: Scripts
    names: tuple[str, ...] = field(init=False)
    _steps: dict[str, list[tuple[Step | Move, int]]] = field(init=False)
    _stretched: dict[int, float] = field(init=False, default_factory=dict)  # by a step's id

    def __post_init__(self) -> None:
        found = {name: list(flat(script)) for name, script in self.scripts.fragments.items()}
        object.__setattr__(self, "names", tuple(found))
        object.__setattr__(self, "_steps", found)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.scripts.plan

    @property
    def is_pipelined(self) -> bool:
        """Whether fragments overlap: with a lag, asynchronous, or served in rings."""
        late = (lag_of(c.flow) or isinstance(c.flow, Latest | Serve) or takes_some(c.flow)
                for c in self.plan.channels)  # fmt: skip
        return any(late)

    def ends_of_worker(self, fragment: str) -> int:
        """How many endpoints take turns in a worker; a server runs them as one batch."""
        if self.plan.distribution.clients(fragment) is not None:
            return 1
        return self.plan.ends(fragment) // self.plan.workers(fragment)

    def turns(self, fragment: str) -> float:
        """How often an endpoint runs for one tick of the plan."""
        if fragment not in self.plan.asynchronous or fragment in self.plan.observers:
            return 1.0
        return self.plan.seen / self.plan.graph.envs

    def busy(self, fragment: str) -> float:
        """Seconds that a worker is busy for a tick, with all cores and devices to share."""
        times = self.ends_of_worker(fragment) * self.turns(fragment)
        alone = sum(self.seconds(fragment, step) * count for step, count in self._steps[fragment])
        return alone * times

    def seconds(self, fragment: str, step: Step | Move) -> float:
        """Seconds of a step while all replicas of its fragment do the same."""
        if id(step) not in self._stretched:
            self._stretched[id(step)] = step.seconds * self.stretch(fragment, step)
        return self._stretched[id(step)]

    def stretch(self, fragment: str, step: Step | Move) -> float:
        """How much longer a step takes since a fragment's replicas do it at once."""
        if self.on_device(fragment) and not is_python(step):
            return max(Counter(map(str, self.plan.places[fragment])).values())
        cores = max(step.cores, 1.0) if isinstance(step, Step) else 1.0
        worst = 1.0
        for host, count in self.workers_on(fragment).items():
            worst = max(worst, count * cores / self.cores(host))
            if is_python(step) and self.scripts.backend == "threads":
                worst = max(worst, float(count))
        return worst

    def on_device(self, fragment: str) -> bool:
        """Whether a fragment's segments run on accelerators."""
        return self.plan.places[fragment][0].device.kind != "cpu"

    def workers_on(self, fragment: str) -> Counter[str]:
        """How many of a fragment's workers each host has."""
        places = self.plan.places[fragment]
        return Counter(places[i].host for i in range(self.plan.workers(fragment)))

    def cores(self, host: str) -> int:
        """The cores of a host."""
        return next(h.cpus for h in self.plan.cluster.hosts if h.name == host)

    def limits(self) -> Iterator[tuple[str, float]]:
        """What a tick can't be shorter than, each with its reason."""
        for name in self.names:
            if name not in self.plan.observers:
                yield f"`{name}`, which is always busy", self.busy(name)
        work: defaultdict[str, float] = defaultdict(float)
        python: defaultdict[str, float] = defaultdict(float)
        devices: defaultdict[str, float] = defaultdict(float)
        for name in self.names:
            each = self.ends_of_worker(name) * self.turns(name)
            for host, count in self.workers_on(name).items():
                for step, times in self._steps[name]:
                    seconds = step.seconds * times * each * count
                    if is_python(step):
                        python[host] += seconds
                    if not self.on_device(name) or is_python(step):
                        work[host] += seconds * (step.cores if isinstance(step, Step) else 1.0)
                    else:
                        devices[str(self.plan.places[name][0])] += seconds
        yield from (
            (f"the {self.cores(h)} cores of {h}", s / self.cores(h)) for h, s in work.items()
        )
        yield from ((f"the device {place}", seconds) for place, seconds in devices.items())
        if self.scripts.backend == "threads":
            yield from ((f"Python's lock on {h}", s) for h, s in python.items())

    def spread(self, seconds: float) -> tuple[float, float]:
        """Seconds of a slow and of a fast tick: of the quartiles of what takes most of it."""
        steps = [
            (s.seconds * n, s) for v in self._steps.values() for s, n in v if isinstance(s, Step)
        ]
        total = sum(spent for spent, _ in steps)
        if not total:
            return seconds, seconds
        low, high = (
            sum(spent * s.quantiles[LEVELS.index(level)] for spent, s in steps) / total
            for level in (0.25, 0.75)
        )
        return seconds * max(1.0, high), seconds * min(1.0, low)


def is_python(step: Step | Move) -> bool:
    """Whether a step holds the interpreter."""
    return isinstance(step, Move) or step.is_python


def flat(items: Iterable[Item], times: int = 1) -> Iterator[tuple[Step | Move, int]]:
    """Every step, with how often it runs in a tick."""
    for item in items:
        if isinstance(item, Turns):
            yield from flat(item.body, times * item.count)
        else:
            yield item, times


# The critical path


def critical_path(load: Load) -> float:
    """Seconds a tick of fragments that wait for each other; long loops aren't followed whole."""
    few, more = (_followed(load, turns) for turns in (TURNS, 2 * TURNS))
    turns = max((i.count for s in load.scripts.fragments.values() for i in _loops(s)), default=0)
    if turns <= 2 * TURNS:
        return _followed(load, turns)
    return more + (more - few) * (turns - 2 * TURNS) / TURNS


def _loops(items: Iterable[Item]) -> Iterator[Turns]:
    for item in items:
        if isinstance(item, Turns):
            yield item
            yield from _loops(item.body)


def _followed(load: Load, turns: int) -> float:
    """Seconds a tick, if no loop had more turns: each fragment is followed by one endpoint."""
    walkers = {name: _Walker(load, name, turns) for name in load.names}
    ticks = 2 * TICKS
    moves: dict[str, Moves] = {c.name: Moves() for c in load.plan.channels}
    running = {name: walker.run(moves, ticks) for name, walker in walkers.items()}
    ready = deque(running)
    while ready:
        before = sum(len(m.puts) + len(m.takes) for m in moves.values())
        for name in list(ready):
            if next(running[name], None) is None:
                ready.remove(name)
        stuck = before == sum(len(m.puts) + len(m.takes) for m in moves.values())
        assert not (ready and stuck), "fragments of a plan wait for each other for ever"
    ends = [w.ends for name, w in walkers.items() if name not in load.plan.observers]
    return (max(e[-1] for e in ends) - max(e[TICKS - 1] for e in ends)) / TICKS


@dataclass
class Moves:
    """When the messages of a channel were put, and taken."""

    puts: list[float] = field(default_factory=list)
    takes: list[float] = field(default_factory=list)


class _Walker:
    """Follows one endpoint's script in time."""

    def __init__(self, load: Load, name: str, turns: int) -> None:
        self._load, self._name, self._turns = load, name, turns
        self.now, self.ends = 0.0, list[float]()

    def run(self, moves: Mapping[str, Moves], ticks: int) -> Generator[bool]:
        """Walk; yields whenever it has to wait for another."""
        for _ in range(ticks):
            yield from self._items(self._load.scripts.fragments[self._name], moves)
            self.ends.append(self.now)

    def _items(self, items: Iterable[Item], moves: Mapping[str, Moves]) -> Generator[bool]:
        for item in items:
            match item:
                case Step():
                    self.now += self._load.seconds(self._name, item)
                case Turns(count, body):
                    for _ in range(min(count, self._turns)):
                        yield from self._items(body, moves)
                case Move(channel, takes):
                    gate, known = self._load.scripts.specs[channel].gate, moves[channel]
                    if takes:
                        number = len(known.takes) - gate.lag
                        while len(known.puts) <= number:
                            yield True
                        known.takes.append(self.now)
                        sent = known.puts[number] if number >= 0 else 0.0
                        self.now = max(self.now, sent + item.latency)
                        known.takes[-1] = self.now
                        self.now += self._load.seconds(self._name, item)
                    else:
                        number = len(known.puts) + gate.lag - gate.capacity
                        while len(known.takes) <= number:
                            yield True
                        freed = known.takes[number] if number >= 0 else 0.0
                        self.now = max(self.now, freed) + self._load.seconds(self._name, item)
                        known.puts.append(self.now)
