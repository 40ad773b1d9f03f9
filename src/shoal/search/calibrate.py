"""Measures what the parts of a plan cost, by running it on the calling thread for a while."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from shoal.planning.channel_specs import make_channel_specs
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.planning.segments import Program, Segment
from shoal.runtime.channels.in_process import make_channels
from shoal.runtime.execution.compiled_executor import CompiledExecutor, key_data
from shoal.runtime.execution.executors import compiled_ticks, make_executor, segments_of
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.lowering import MOST_TICKS
from shoal.runtime.execution.replica_runner import ReplicaRunner, Runs
from shoal.runtime.execution.scheduler import Scheduler
from shoal.runtime.execution.snapshot import lagged
from shoal.runtime.run import fresh_start
from shoal.simulation.profile import LEVELS, Point
from shoal.simulation.script import key_of, message_name, rows_of, segment_name

Notes = dict[tuple[str, int], list[list[tuple[float, float]]]]
LEAST_TICKS, MOST_REPEATS = 3, 200
CALL_S = 0.03  # of many ticks in one call


def measured(plan: Plan, seconds: float) -> dict[str, list[Point]]:
    """The points of the curves of a plan's parts, after running it for about so many seconds."""
    names = [f.name for f in plan.distribution.fragments]
    programs = [write_program(plan, name) for name in names]
    if len(programs) == 1 and plan.ends(names[0]) == 1 and programs[0].compiles_whole:
        return _of_one_program(plan, programs[0], seconds)
    return _of_fragments(plan, programs, seconds)


def _of_one_program(plan: Plan, program: Program, seconds: float) -> dict[str, list[Point]]:
    """The cost of a tick of a plan that is one program, with many ticks a call as it runs."""
    segments = segments_of(plan, program.fragment)
    values = fresh_start(plan.graph, 0).values

    def placed(name: str) -> Any:
        return jax.device_put(key_data(values[name]), segments.sharding(name, 0))

    carry = [placed(before) for before, _ in program.carry]
    constants = [placed(name) for name in program.constants]
    many = compiled_ticks(segments, program)

    def call(count: int) -> tuple[float, float]:
        nonlocal carry
        began, used = time.perf_counter(), time.process_time()
        results = jax.block_until_ready(list(many(np.int32(count), *carry, *constants)))
        carry = results[: len(carry)]
        return (time.perf_counter() - began) / count, (time.process_time() - used) / count

    call(1)  # compiles
    count = max(1, min(MOST_TICKS, int(CALL_S / max(call(1)[0], 1e-6))))
    until, found = time.perf_counter() + seconds, list[tuple[float, float]]()
    while len(found) < LEAST_TICKS or (time.perf_counter() < until and len(found) < MOST_REPEATS):
        found.append(call(count))
    (segment,) = program.operations
    assert isinstance(segment, Segment)
    name = segment_name(plan, segment)
    key = key_of(plan, name, program.fragment)
    return {key: [_point(rows_of(plan, program.fragment), [[pair] for pair in found])]}


def _of_fragments(plan: Plan, programs: list[Program], seconds: float) -> dict[str, list[Point]]:
    """The costs of segments and host stages, with all replicas in turn on this thread."""
    clock = Clock(plan)
    start = fresh_start(plan.graph, 0)
    specs = make_channel_specs(plan)
    executors = {p.fragment: Timed(make_executor(plan, p), clock) for p in programs}
    places = {name: one.placement for name, one in executors.items()}
    made = make_channels(specs, places)
    channels = {
        c.name: TimedChannel(made[c.name], message_name(c), clock, rows_of(plan, c.reader))
        for c in plan.channels
    }
    runners = [
        ReplicaRunner(executors[p.fragment], end, start, channels, Quiet())
        for p in programs for end in range(plan.ends(p.fragment))
    ]  # fmt: skip
    for line in lagged(plan):
        for runner in runners:
            if runner.replica[0] == line.writer:
                runner.prime(line)
    limit = Limit(2**30, start.tick)
    scheduler = Scheduler(runners, channels, None, None, _run_many(executors.values()))
    until, ticks = 0.0, 0
    while ticks <= LEAST_TICKS or (time.perf_counter() < until and ticks < MOST_REPEATS):
        scheduler.run(OneTick(limit, start.tick + ticks))  # type: ignore[arg-type]
        if ticks == 0:  # it compiled, and opened environments
            until = time.perf_counter() + seconds
            clock.notes.clear()
        ticks += 1
        clock.next_tick()
    return clock.points()


def _run_many(executors: Iterable[Timed]) -> Callable[[list[Runs]], list[list[Any]]]:
    def run_many(asked: list[Runs]) -> list[list[Any]]:
        for executor in executors:
            if executor.has(asked[0].segment):
                return executor.run_many(asked)
        raise AssertionError("no fragment has this segment")

    return run_many


@dataclass(frozen=True)
class OneTick:
    """A limit that lets synchronous endpoints run one tick."""

    limit: Limit
    tick: int

    @property
    def asked(self) -> Any:
        """No snapshot."""
        return self.limit.asked

    def may_turn(self) -> bool:
        """Asynchronous endpoints run as far as flow control lets them."""
        return True

    def may_start(self, tick: int, count: int = 1) -> int:
        """Whether an endpoint may start this tick."""
        return int(tick == self.tick)


@dataclass
class Clock:
    """The seconds, and the seconds of CPU, of each call: by part and size, then by tick."""

    plan: Plan
    notes: Notes = field(default_factory=dict)

    def add(self, key: str, size: int, began: float, used: float) -> None:
        """Note a call that has just ended."""
        spent = time.perf_counter() - began, time.process_time() - used
        self.notes.setdefault((key, size), [[]])[-1].append(spent)

    def next_tick(self) -> None:
        """From now on, calls belong to the next tick."""
        for ticks in self.notes.values():
            ticks.append([])

    def points(self) -> dict[str, list[Point]]:
        """The points of every part."""
        found: dict[str, list[Point]] = defaultdict(list)
        for (key, size), ticks in self.notes.items():
            found[key].append(_point(size, [tick for tick in ticks if tick]))
        return found


def _point(size: int, ticks: list[list[tuple[float, float]]]) -> Point:
    """A point: the mean call of the best tick, and the spread of all calls."""
    means = [(sum(s for s, _ in t) / len(t), sum(c for _, c in t) / len(t)) for t in ticks]
    best, used = min(means)
    every = [s for t in ticks for s, _ in t]
    levels = np.quantile(every, LEVELS) / max(best, 1e-9)
    return Point(
        size, best, max(0.1, round(used / max(best, 1e-9), 3)), tuple(map(float, levels.round(3)))
    )


class Timed:
    """An executor whose segments and host stages are timed."""

    def __init__(self, executor: Any, clock: Clock) -> None:
        self._executor, self._clock = executor, clock
        self._names: dict[int, str] = {}
        self._messages = {c.name: message_name(c) for c in clock.plan.channels}
        spec: FragmentSpec = executor.spec
        tasks = {
            node: replace(t, call=self._timed(t.stage, t.call)) for node, t in spec.tasks.items()
        }
        self.spec = replace(spec, tasks=tasks)
        self._size = rows_of(clock.plan, spec.name)

    @property
    def placement(self) -> Any:
        """Where its messages belong: its devices, or None for NumPy."""
        compiles = isinstance(self._executor, CompiledExecutor) and not self.spec.is_served
        return self._executor.segments if compiles else None

    def _timed(self, stage: str, call: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def timed(*args: Any) -> list[Any]:
            began, used = time.perf_counter(), time.process_time()
            found = call(*args)
            self._clock.add(f"python {stage}", self._size, began, used)
            return found

        return timed

    def _key(self, segment: Segment) -> str:
        if id(segment) not in self._names:
            plan = self._clock.plan
            name = segment_name(plan, segment)
            self._names[id(segment)] = key_of(plan, name, self.spec.name)
        return self._names[id(segment)]

    def run(self, segment: Segment, end: int, args: list[Any]) -> Sequence[Any]:
        """Run a segment, and wait for its results."""
        jax.block_until_ready(args)
        began, used = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(self._executor.run(segment, end, args))
        self._clock.add(self._key(segment), self._size, began, used)
        return found

    def has(self, segment: Segment) -> bool:
        """Whether a segment belongs to this fragment."""
        return isinstance(self._executor, CompiledExecutor) and self._executor.has(segment)

    def run_many(self, asked: list[Runs]) -> list[list[Any]]:
        """Run the segments of several endpoints as a batch."""
        began, used = time.perf_counter(), time.process_time()
        found = self._executor.run_many(asked)
        size = self._size * len(asked)
        self._clock.add(self._key(asked[0].segment), size, began, used)
        return found

    def share(self, name: str, x: Any, end: int, *, is_owned: bool) -> Any:
        """As the executor does."""
        return self._executor.share(name, x, end, is_owned=is_owned)

    def receive(self, channel: str, message: Any, turns: Any) -> Any:
        """As the executor does; timed until it has arrived."""
        began, used = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(self._executor.receive(channel, message, turns))
        self._clock.add(f"receive {self._messages[channel]}", self._size, began, used)
        return found

    def copy(self, x: Any) -> Any:
        """As the executor does."""
        return self._executor.copy(x)


@dataclass(frozen=True)
class TimedChannel:
    """A channel of which the joining of rows is timed, without what the reader does with them."""

    channel: Any
    name: str
    clock: Clock
    size: int

    @property
    def state(self) -> Any:
        """The channel's flow control."""
        return self.channel.state

    def put(self, end: int, message: Any, version: int) -> None:
        """As the channel does."""
        self.channel.put(end, message, version)

    def take(self, end: int, tick: int, receive: Callable[..., Any]) -> Any:
        """As the channel does."""
        began, used = time.perf_counter(), time.process_time()

        def received(message: Any, turns: Any) -> Any:
            jax.block_until_ready(list(message.values()))
            self.clock.add(f"join {self.name}", self.size, began, used)
            return receive(message, turns)

        return self.channel.take(end, tick, received)


class Quiet:
    """Takes the reports of endpoints, and does nothing with them."""

    def show(self, tick: int, replica: Any, metrics: Mapping[str, Any], lags: Any) -> None:
        """Wait for the metrics, and drop them."""
        jax.block_until_ready(list(metrics.values()))

    def keep(self, worker: ReplicaRunner) -> None:
        """Keep no copy."""

    def snap(self, worker: ReplicaRunner) -> None:
        """Take no snapshot."""

    def enter_stage(self, replica: Any, stage: str, tick: int) -> None:
        """Record nothing."""

    def leave_stage(self, replica: Any) -> None:
        """Record nothing."""


def quiet(line: str) -> None:
    """Say nothing."""


def dispatch_seconds() -> float:
    """The least that a call of a compiled program takes, with a few small arrays."""
    step = jax.jit(lambda *xs: [x + 1 for x in xs])
    xs, best = [jax.numpy.zeros(4) for _ in range(8)], 1.0
    for _ in range(200):
        began = time.perf_counter()
        xs = jax.block_until_ready(step(*xs))
        best = min(best, time.perf_counter() - began)
    return best
