"""Measures what the parts of a plan cost, by running it on the calling thread for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from shoal.search.stopwatch import Stopwatch
from shoal.simulation.profile import Point
from shoal.simulation.script import key_of, message_name, rows_of, segment_name

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

    (segment,) = program.operations
    assert isinstance(segment, Segment)
    key = key_of(plan, segment_name(plan, segment), program.fragment)
    places = {place.device for place in plan.places[program.fragment]}
    watch, size = Stopwatch(len(places)), rows_of(plan, program.fragment)

    def call(count: int) -> float:
        nonlocal carry
        watch.restart()
        began, used = time.perf_counter(), time.process_time()
        results = jax.block_until_ready(list(many(np.int32(count), *carry, *constants)))
        carry = results[: len(carry)]
        watch.add(key, size, began, used, count)
        return time.perf_counter() - began

    call(1)  # compiles
    count = max(1, min(MOST_TICKS, int(CALL_S / max(call(1), 1e-6))))
    until, calls = time.perf_counter() + seconds, 0
    while calls < LEAST_TICKS or (time.perf_counter() < until and calls < MOST_REPEATS):
        call(count)
        watch.next_round()
        calls += 1
    return watch.points()


def _of_fragments(plan: Plan, programs: list[Program], seconds: float) -> dict[str, list[Point]]:
    """The costs of segments and host stages, with all replicas in turn on this thread."""
    clock = Stopwatch()
    start = fresh_start(plan.graph, 0)
    specs = make_channel_specs(plan)
    executors = {p.fragment: Timed(plan, make_executor(plan, p), clock) for p in programs}
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
            clock.restart()
        else:
            clock.next_round()
        ticks += 1
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


class Timed:
    """An executor whose segments and host stages are timed."""

    def __init__(self, plan: Plan, executor: Any, clock: Stopwatch) -> None:
        self._plan, self._executor, self._clock = plan, executor, clock
        self._names: dict[int, str] = {}
        self._messages = {c.name: message_name(c) for c in plan.channels}
        spec: FragmentSpec = executor.spec
        tasks = {
            node: replace(t, call=self._timed(t.stage, t.call)) for node, t in spec.tasks.items()
        }
        self.spec = replace(spec, tasks=tasks)
        self._size = rows_of(plan, spec.name)

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
            name = segment_name(self._plan, segment)
            self._names[id(segment)] = key_of(self._plan, name, self.spec.name)
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
    clock: Stopwatch
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
