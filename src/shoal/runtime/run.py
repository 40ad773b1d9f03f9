"""Run a plan: start its workers, watch its metrics, stop at the first fault, return the state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import RunError, ShoalError, UnknownNameError
from shoal.planning.plan import Plan
from shoal.runtime.blame import not_finite
from shoal.runtime.channels import InProcessChannel, make_gate
from shoal.runtime.collect import Collector, Shown
from shoal.runtime.inline import run_inline
from shoal.runtime.lower import Lowering
from shoal.runtime.program import Program, write_program
from shoal.runtime.threads import run_threads
from shoal.runtime.whole import compile_many
from shoal.runtime.worker import Failure, Worker, make_crew
from shoal.tracing.jaxprs import user_place

BACKENDS = ("inline", "threads")
MOST_TICKS = 64
SECONDS_A_CALL = 0.25
State = dict[str, Any]
Watch = Callable[[int, Shown], None]


@dataclass(frozen=True)
class Result:
    """What a run leaves: the carried state by name and as the algorithm's own tree, and its times."""

    values: State
    state: Any
    ticks: int
    compile_seconds: float
    seconds: float
    interrupted: bool = False


@dataclass
class Clock:
    """When compiling ended and ticks began."""

    started: float = field(default_factory=time.perf_counter)
    first_tick: float | None = None

    def tick(self) -> None:
        """The first tick is done: from now on it is running, not compiling."""
        self.first_tick = self.first_tick or time.perf_counter()

    def times(self) -> tuple[float, float]:
        """Seconds until the first tick was done, and seconds since then."""
        now = time.perf_counter()
        first = self.first_tick or now
        return first - self.started, now - first


def run(
    plan: Plan, backend: str = "threads", *, ticks: int, state: Any = None, seed: int = 0, watch: Watch | None = None
) -> Result:
    """Run `plan` for `ticks` ticks, from `state` or from a fresh start with `seed`.

    `watch(tick, metrics)` is called in order as metrics arrive, and may raise to stop the run.
    Ctrl-C ends the run early; the result then says so.
    """
    if backend not in BACKENDS:
        raise UnknownNameError("backend", backend, BACKENDS)
    graph = plan.graph
    tree = graph.origin.start(seed, graph.envs) if state is None else state
    values = dict(zip(graph.inputs, jax.tree.leaves(tree), strict=True))
    programs = [write_program(plan, f.name) for f in plan.distribution.fragments]
    watch = watch or (lambda tick, metrics: None)
    alone = len(programs) == 1 and plan.endpoints(programs[0].fragment) == 1
    if alone and programs[0].compiles_whole:
        run_ = _Whole(plan, programs[0], values, watch)
    else:
        run_ = _Pieces(plan, programs, values, watch, backend)
    interrupted = False
    try:
        run_.go(ticks)
    except KeyboardInterrupt:
        interrupted = True
    final, done = run_.final()
    compiling, running = run_.clock.times()
    state = jax.tree.unflatten(jax.tree.structure(tree), [final[name] for name in graph.inputs])
    return Result(final, state, done, compiling, running, interrupted)


class _Whole:
    """A plan of one program; many ticks in one call, the next one sent before metrics are read."""

    def __init__(self, plan: Plan, program: Program, values: State, watch: Watch) -> None:
        self._plan, self._program, self._watch = plan, program, watch
        self._lowering = Lowering(plan, program.fragment)
        self._values = values
        self._carry = [self._place(b, values[b]) for b, _ in program.carry]
        self._constants = [self._place(c, values[c]) for c in program.constants]
        self._done = 0
        self.clock = Clock()

    def _place(self, name: str, x: Any) -> Any:
        return jax.device_put(x, self._lowering.sharding(name, 0), may_alias=False)

    def go(self, ticks: int) -> None:
        """Run `ticks` ticks."""
        many = compile_many(self._lowering, self._program, min(MOST_TICKS, ticks))
        size, sent, begun = 1, None, time.perf_counter()
        while self._done < ticks or sent:
            count = min(size, MOST_TICKS, ticks - self._done)
            before = [jnp.copy(x) for x in self._carry] if count else []
            fresh = None
            if count:
                first = self._done
                self._carry, metrics = many(count, self._carry, self._constants)
                for x in metrics:
                    x.copy_to_host_async()
                fresh = first, count, metrics, before
                self._done += count
            if sent:
                self._show(*sent)
                if sent[0] == 0:
                    self.clock.tick()
            if not sent and fresh:
                jax.block_until_ready(fresh[2])
                self.clock.tick()
                begun = time.perf_counter()
            elif sent and sent[1]:
                spent, begun = time.perf_counter() - begun, time.perf_counter()
                size = max(1, min(MOST_TICKS, int(size * SECONDS_A_CALL / max(spent, 1e-4) + 0.5), 4 * size))
            sent = fresh

    def _show(self, first: int, count: int, metrics: list[Any], before: list[Any]) -> None:
        arrays = [np.asarray(x)[:count] for x in metrics]
        names = [name for name, _ in self._program.metrics]
        for i in range(count):
            shown = {name: x[i] for name, x in zip(names, arrays, strict=True)}
            if bad := [name for name, x in shown.items() if not np.all(np.isfinite(x))]:
                start = self._values | {b: x for (b, _), x in zip(self._program.carry, before, strict=True)}
                raise not_finite(self._plan, start, first, first + i, bad)
            self._watch(first + i, shown)

    def final(self) -> tuple[State, int]:
        """The carried state after the last tick."""
        carry = {b: x for (b, _), x in zip(self._program.carry, self._carry, strict=True)}
        return self._values | carry, self._done


class _Pieces:
    """A plan of several workers that meet at channels."""

    def __init__(self, plan: Plan, programs: list[Program], values: State, watch: Watch, backend: str) -> None:
        self._plan, self._watch, self._backend, self._values = plan, watch, backend, values
        lowerings = {p.fragment: Lowering(plan, p.fragment) for p in programs}
        self._channels = {c.name: InProcessChannel(plan, c, lowerings[c.reader]) for c in plan.channels}
        self._gates = {c.name: make_gate(plan, c) for c in plan.channels}
        self._collector = Collector(plan, programs)
        self._workers: list[Worker] = []
        for program in programs:
            crew = make_crew(plan, lowerings[program.fragment], program)
            for end in range(plan.endpoints(program.fragment)):
                self._workers.append(Worker(crew, end, values, self._channels, self._collector.add))
        self._prime()
        self.clock = Clock()

    def _prime(self) -> None:
        """Before the first tick a lagged reader sees what its writer starts from."""
        for channel in self._plan.channels:
            for _ in range(channel.flow.lag):
                for worker in self._workers:
                    if worker.replica[0] == channel.writer:
                        message = {v: worker.carried[v] for v in channel.values}
                        self._channels[channel.name].put(worker.replica[1], message)

    def go(self, ticks: int) -> None:
        """Run `ticks` ticks."""
        if self._backend == "inline":
            try:
                run_inline(self._workers, self._gates, ticks)
            except Failure as failure:
                raise explain(failure) from failure.error
            self._show()
            return
        crossing, threads = run_threads(self._workers, self._gates, ticks)
        try:
            while any(t.is_alive() for t in threads):
                _join(threads, 0.05)
                self._show()
        except BaseException:
            crossing.stop()
            _join(threads, 5.0)
            raise
        if crossing.failure:
            raise explain(crossing.failure) from crossing.failure.error
        self._show()

    def _show(self) -> None:
        for tick, shown in self._collector.ready():
            self.clock.tick()
            if bad := [name for name, x in shown.items() if not np.all(np.isfinite(x))]:
                raise not_finite(self._plan, self._values, 0, tick, bad)
            self._watch(tick, shown)

    def final(self) -> tuple[State, int]:
        """The carried state, joined from all workers, and the ticks that all of them have done."""
        final = dict(self._values)
        for name, after in self._plan.graph.carry:
            if name == after:
                continue
            owner = min(self._plan.sites.holders(after, self._plan.homes))
            ends = [w.carried[name] for w in self._workers if w.replica[0] == owner]
            axis = self._plan.graph.values[name].axis
            alone = axis is None or len(ends) == 1
            final[name] = ends[0] if alone else jnp.concatenate([_home(x) for x in ends], axis)
        return final, min(w.tick for w in self._workers)


def _home(x: Any) -> Any:
    return jax.device_put(x, jax.devices()[0])


def _join(threads: list[threading.Thread], seconds: float) -> None:
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def explain(failure: Failure) -> ShoalError:
    """A worker's error as the user's: which replica, at which tick, from which line."""
    error, (fragment, end) = failure.error, failure.replica
    if isinstance(error, ShoalError):
        return error
    first = str(error).strip().split("\n")[0]
    return RunError(
        f"{fragment}[{end}] failed at tick {failure.tick}: {type(error).__name__}: {first}",
        "Run with --debug for the whole traceback, or with backend=\"inline\" to step through it.",
        user_place(error),
    )


def as_values(names: tuple[str, ...], tree: Any) -> Mapping[str, Any]:
    """A state tree by the names of its leaves."""
    return dict(zip(names, jax.tree.leaves(tree), strict=True))
