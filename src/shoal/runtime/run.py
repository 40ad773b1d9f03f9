"""Run a plan: start its workers, watch its metrics, stop at the first fault, return the state."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from shoal.errors import RunError, ShoalError, UnknownNameError, user_place
from shoal.planning.plan import Plan
from shoal.runtime.collect import Shown
from shoal.runtime.limit import Limit
from shoal.runtime.pieces import Inline, Pieces, Threaded
from shoal.runtime.processes import Processes
from shoal.runtime.program import write_program
from shoal.runtime.whole import Whole
from shoal.runtime.worker import Failure

BACKENDS: dict[str, Callable[..., Going]] = {
    "inline": lambda *plan: Inline(Pieces(*plan)),
    "threads": lambda *plan: Threaded(Pieces(*plan)),
    "processes": Processes,
}
PATIENCE = 1.0  # seconds that workers have to end their tick after Ctrl-C
Watch = Callable[[int, Shown], None]


@dataclass(frozen=True)
class Result:
    """What a run leaves: the carried state, by name and as the algorithm's tree, and its times."""

    values: dict[str, Any]
    state: Any
    ticks: int
    compile_seconds: float
    seconds: float
    interrupted: bool = False


class Going(Protocol):
    """A run under way."""

    def start(self, limit: Limit) -> None:
        """Begin to turn ticks up to the limit."""
        ...

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether there is more to come. Raises a worker's failure."""
        ...

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks, in order."""
        ...

    def final(self) -> tuple[dict[str, Any], int]:
        """The carried state by name, and how many ticks made it."""
        ...

    def close(self) -> None:
        """Leave nothing running, whatever happened."""
        ...


def run(
    plan: Plan,
    backend: str = "threads",
    *,
    ticks: int,
    state: Any = None,
    watch: Watch | None = None,
) -> Result:
    """Run `plan` for `ticks` ticks, from `state` or from a fresh start with seed 0.

    `watch(tick, metrics)` is called in order as metrics arrive; what it raises stops the run.
    Ctrl-C lets workers end the tick they are in; the result then says that it was interrupted.
    """
    check_backend(backend)
    graph = plan.graph
    tree = graph.origin.start(0, graph.envs) if state is None else state
    began = time.perf_counter()
    going, limit = make_run(plan, backend, tree), Limit(ticks)
    shown, interrupted = 0, False
    first = began
    with stoppable(limit) as stop:
        going.start(limit)
        try:
            for tick, metrics in _shown(going, stop):
                first = time.perf_counter() if shown == 0 else first
                shown = tick + 1
                if watch:
                    watch(tick, metrics)
        except Failure as failure:
            raise explain(failure) from failure.error
        except BaseException:
            limit.stop()
            _wait(going, PATIENCE)
            raise
        finally:
            going.close()
        interrupted = stop.is_set()
    values, done = going.final()
    leaves = [values[name] for name in graph.inputs]
    state = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return Result(values, state, done, first - began, time.perf_counter() - first, interrupted)


def check_backend(name: str) -> str:
    """`name` if it is a backend's."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    return name


def make_run(plan: Plan, backend: str, tree: Any) -> Going:
    """Everything that a run needs, ready to start: one program, or pieces."""
    values = dict(zip(plan.graph.inputs, jax.tree.leaves(tree), strict=True))
    programs = [write_program(plan, f.name) for f in plan.distribution.fragments]
    one = programs[0]
    apart = backend == "processes" and plan.distribution.ends(one.fragment) > 1
    if len(programs) == 1 and plan.ends(one.fragment) == 1 and one.compiles_whole and not apart:
        return Whole(plan, one, values)
    return BACKENDS[backend](plan, programs, values)


def _shown(going: Going, stop: threading.Event) -> Iterator[tuple[int, Shown]]:
    """Metrics as they come, until the end; after Ctrl-C no longer than workers may take to stop."""
    until = float("inf")
    while going.alive(0.05):
        yield from going.ready()
        if stop.is_set():
            until = min(until, time.monotonic() + PATIENCE)
            if time.monotonic() >= until:
                return
    yield from going.ready()


def _wait(going: Going, seconds: float) -> None:
    """Give workers time to end, whatever they end with."""
    until = time.monotonic() + seconds
    with suppress(Failure, ShoalError):
        while time.monotonic() < until and going.alive(0.05):
            deque(going.ready(), maxlen=0)


@contextmanager
def stoppable(limit: Limit) -> Iterator[threading.Event]:
    """The first Ctrl-C ends the run after the current tick, a second one at once."""
    stop = threading.Event()

    def on_interrupt(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        limit.stop()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def explain(failure: Failure) -> ShoalError:
    """A worker's error as the user's: which replica, at which tick, from which line."""
    error, (fragment, end) = failure.error, failure.replica
    if isinstance(error, ShoalError):
        return error
    first = str(error).strip().split("\n")[0]
    return RunError(
        f"{fragment}[{end}] failed at tick {failure.tick}: {type(error).__name__}: {first}",
        'Run with --debug for the whole traceback, or with backend="inline" to step through it.',
        user_place(error),
    )
