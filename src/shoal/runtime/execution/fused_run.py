"""Runs a plan of one program: many ticks per XLA call, with metrics read asynchronously."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.planning.plan import Plan
from shoal.planning.segments import Program
from shoal.profiling.recorder import now
from shoal.profiling.spans import Kind, SpanBuffer, SpanBuffers, code_of
from shoal.runtime.execution.compiled_executor import key_data, wrapped
from shoal.runtime.execution.executors import compiled_ticks, segments_of
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.lowering import MOST_TICKS
from shoal.runtime.execution.metrics import Shown
from shoal.runtime.execution.replica_runner import Failure
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.execution.worker_status import WorkerStatus

SECONDS_A_CALL = 0.25


class FusedRun:
    """A run of one program: a thread dispatches many ticks at a time, ahead of their results."""

    def __init__(self, plan: Plan, program: Program, start: Snapshot) -> None:
        self._plan, self._program, self._values = plan, program, dict(start.values)
        self._segments = segments_of(plan, program.fragment)
        self._is_copied = plan.is_copied
        self._uses_up = start.is_owned and not plan.is_copied
        self._carry = [self._place(b) for b, _ in program.carry]
        self._constants = [self._place(c) for c in program.constants]
        if not plan.is_copied:
            self._values = dict(start.without(b for b, _ in program.carry).values)
        self._sent: queue.Queue[tuple[int, int, list[Any], list[Any]]] = queue.Queue(maxsize=2)
        self._first = self._done = start.tick
        self._read: tuple[int, list[Any]] = start.tick, []  # the state before the last call read
        self._in_flight: list[tuple[int, int, list[Any], list[Any]]] = []
        self._snapped: queue.SimpleQueue[tuple[int, list[Any]]] = queue.SimpleQueue()
        self._span_buffers = SpanBuffers()
        self._buffer = self._span_buffers.add(f"{program.fragment}[0]", SpanBuffer.own())
        self.spans = self._span_buffers.read
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def _place(self, name: str) -> Any:
        where = self._segments.sharding(name, 0)
        x = key_data(self._values[name])
        return jax.device_put(x if self._uses_up else jnp.copy(x), where)

    def start(self, limit: Limit) -> None:
        """Start the thread; returns at once."""
        self._thread = threading.Thread(
            target=self._guarded, args=(limit,), daemon=True, name="ticks"
        )
        self._thread.start()

    def _guarded(self, limit: Limit) -> None:
        try:
            self._run(limit)
        except BaseException as error:
            self._fault = Failure((self._program.fragment, 0), self._done, error)

    def _run(self, limit: Limit) -> None:
        many, carried = compiled_ticks(self._segments, self._program), len(self._carry)
        since = now()
        size, begun, sent, answered = 1, 0.0, self._in_flight, 0
        while (count := limit.may_start(self._done, size)) or sent:
            if count:
                asked = limit.asked
                wanted = asked.number > answered and asked.tick == self._done
                copied = self._is_copied or wanted
                before = [jnp.copy(x) for x in self._carry] if copied else []
                if wanted:
                    answered = asked.number
                    self._snapped.put((self._done, before))
                before = before if self._is_copied else []
                results = list(many(np.int32(count), *self._carry, *self._constants))
                self._carry, metrics = results[:carried], results[carried:]
                sent.append((self._done, count, metrics, before))
                self._done += count
            if len(sent) > 1 or not count or sent[0][0] == self._first:
                jax.block_until_ready(sent[0][2])
                at, chunk = time.perf_counter(), code_of(Kind.CHUNK, 0, 0)
                fits = SECONDS_A_CALL * sent[0][1] / max(at - begun, 1e-4)
                size = max(1, min(MOST_TICKS, 4 * size, int(fits))) if begun else 1
                begun = at
                self._buffer.write(chunk, since, now(), sent[0][0] << 32 | sent[0][1])
                since = now()
                self._sent.put(sent.pop(0))

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; raises the failure, if there was one."""
        assert self._thread is not None
        if self._sent.empty():
            self._thread.join(seconds)
        if not self._thread.is_alive() and self._fault:
            raise self._fault
        return self._thread.is_alive()

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics that have arrived, tick by tick."""
        names = [name for name, _ in self._program.metrics]
        while not self._sent.empty():
            first, count, metrics, before = self._sent.get()
            self._read = first, before
            arrays = [np.asarray(x)[:count] for x in metrics]
            for i in range(count):
                shown = {name: x[i] for name, x in zip(names, arrays, strict=True)}
                yield first + i, shown

    def good(self, tick: int) -> Snapshot:
        """The state before the call that computed `tick`, whose metrics `ready` has just read."""
        return Snapshot(self._read[0], self._named(self._read[1]))

    def looked(self) -> Iterator[tuple[int, Shown]]:
        """Nothing: a plan of one program has no observers."""
        return iter(())

    def statuses(self) -> dict[str, WorkerStatus]:
        """Nothing: no stage runs in Python, where it could hang."""
        return {}

    def fail(self, worker: str, what: str, fix: str) -> None:
        """Do nothing: there is no worker that could be lost."""

    def scale(self, counts: Mapping[str, int]) -> None:
        """It has no replicas that could come or go."""

    def sent(self) -> Mapping[str, Any]:
        """Nothing leaves this process."""
        return {}

    def snapshots(self) -> Iterator[Snapshot]:
        """The requested snapshot, once it was taken."""
        while not self._snapped.empty():
            tick, carry = self._snapped.get()
            yield Snapshot(tick, self._named(carry))

    def final(self) -> Snapshot:
        """The state that was reached; if calls are in flight, the copy from before the first."""
        if self._thread and not self._is_copied:
            self._thread.join()  # nothing is kept to go back to
        for first, _, _, before in self._in_flight[:1]:
            return Snapshot(first, self._named(before))
        return Snapshot(self._done, self._named(self._carry))

    def close(self) -> None:
        """Do nothing: the thread ends by itself."""

    def _named(self, carry: list[Any]) -> dict[str, Any]:
        names, values = [b for b, _ in self._program.carry], self._plan.graph.values
        held = zip(names, carry, strict=self._is_copied)
        return self._values | {
            name: wrapped(x) if values[name].dtype.startswith("key<") else x for name, x in held
        }
