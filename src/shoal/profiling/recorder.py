"""Records what one endpoint does: called by the runtime around each operation. Needs no JAX."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from shoal.planning.program import Call, Put, Take
from shoal.planning.segments import NumpyWork, Operation, Program, Segment, walk
from shoal.profiling.spans import Kind, code_of, site_of

now = time.monotonic_ns
KINDS: Mapping[type, Kind] = {
    Segment: Kind.SEGMENT, Call: Kind.STAGE, NumpyWork: Kind.NUMPY, Take: Kind.TAKE, Put: Kind.PUT,
}  # fmt: skip


VARIABLE = "SHOAL_SPANS"  # of the environment; "on" lets the workers of all runs record
NUMBER = 0xFFFFFFFF  # the bits of a span's word that have its number
SHORT_NS = 2_000  # a shorter wait for a device is no span of its own


def records_spans() -> bool:
    """Whether the workers of a run that is made now record spans."""
    return os.environ.get(VARIABLE) == "on"


@contextmanager
def recording(*, spans: bool) -> Iterator[None]:
    """Let the workers of runs that are made inside record spans, if they are wanted."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "on" if spans else before or "off"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


class Buffer(Protocol):
    """What spans are written to."""

    def write(self, code: int, begin: int, end: int, detail: int) -> None:
        """Write a span."""
        ...

    def is_measured(self, tick: int) -> bool:
        """Whether a worker is to wait for its device after each segment of this tick."""
        ...


class EndpointRecorder:
    """Records the spans of one endpoint in the buffer of its thread.

    Results of compiled segments are computed while Python continues. Where an operation needs
    them in host memory, the recorder waits for them before it, so that the wait is a span of the
    segment and not of what comes next; it never waits where the operation itself would not.
    """

    def __init__(self, buffer: Buffer, end: int, *, copies: bool) -> None:
        self._buffer, self._end = buffer, end
        self._copies = copies  # whether puts and reports copy to host memory
        self._codes: dict[int, int] = {}
        self._waits: dict[tuple[bool, str], int] = {}
        self._fragment = 0
        self._writes: dict[int, frozenset[str]] = {}  # of segments
        self._reads: dict[int, frozenset[str]] = {}  # of operations that need results on the host
        self._result: Any = None  # of the newest segment; all its results are there at once
        self._results: frozenset[str] = frozenset()
        self._device = 0  # the code of a wait for it
        self.number = 0  # of the message that was taken or put last
        self._turns: Sequence[tuple[int, int]] = ()
        self.tick = 0

    def of(self, program: Program, fragment: int) -> EndpointRecorder:
        """The recorder, for the operations of a program; `fragment` is its number in the plan."""
        self._fragment = fragment
        for index, operation in enumerate(walk(program.operations)):
            if (kind := KINDS.get(type(operation))) is None:
                continue
            site = site_of(fragment, index)
            self._codes[id(operation)] = code_of(kind, site, self._end)
            if isinstance(operation, Segment):
                self._writes[id(operation)] = frozenset(operation.writes)
            elif kind is not Kind.TAKE and (kind is not Kind.PUT or self._copies):
                self._reads[id(operation)] = frozenset(operation.reads)
            if isinstance(operation, Take | Put):
                key = isinstance(operation, Take), operation.channel
                self._waits[key] = code_of(Kind.WAIT, site, self._end)
        return self

    def begin(self, operation: Operation) -> int:
        """The time at which an operation begins, once what it needs on the host is computed."""
        if self._result is not None:
            reads = self._reads.get(id(operation))
            if reads is not None and not self._results.isdisjoint(reads):
                return self._await()
        return now()

    def end(self, operation: Operation, began: int, env: Mapping[str, Any]) -> None:
        """Record an operation that has ended."""
        code = self._codes.get(id(operation))
        if code is None:  # a loop, whose operations are recorded; or of a program without a buffer
            return
        ended = now()
        self._buffer.write(code, began, ended, self.tick << 32 | self.number & NUMBER)
        if self._turns and type(operation) is Take:
            self._write_turns(code, ended)
        if type(operation) is Segment and operation.writes:
            self._result, self._results = env[operation.writes[0]], self._writes[id(operation)]
            self._device = code | Kind.DEVICE << 48
            if self._buffer.is_measured(self.tick):
                self._await()

    def took(self, turns: Sequence[tuple[int, int]]) -> None:
        """Note the messages that are being taken, each as its writer's endpoint and its number."""
        if turns:
            self.number = turns[0][1]
            self._turns = turns if len(turns) > 1 or turns[0][0] != self._end else ()

    def _write_turns(self, code: int, at: int) -> None:
        """Record from whom messages were taken, where that is not the endpoint of same number."""
        site, turns, self._turns = code & NUMBER, self._turns, ()
        for writer, number in turns:
            detail = self.tick << 32 | number & NUMBER
            self._buffer.write(code_of(Kind.TURN, site, writer), at, at, detail)

    def _await(self) -> int:
        """Wait for the results of the newest segment, as a span of it."""
        result, self._result, began = self._result, None, now()
        if (block := getattr(result, "block_until_ready", None)) is not None:
            block()
        if (ended := now()) - began < SHORT_NS:
            return began
        self._buffer.write(self._device, began, ended, self.tick << 32)
        return ended

    def report(self, metrics: Iterable[tuple[str, str]]) -> int:
        """The time at which a report of metrics begins, once they are computed."""
        is_pending = self._result is not None and self._copies
        if is_pending and not self._results.isdisjoint([value for _, value in metrics]):
            return self._await()
        return now()

    def done(self, kind: Kind, began: int, number: int = 0) -> None:
        """Record something that is no operation."""
        code = code_of(kind, site_of(self._fragment, 0), self._end)
        self._buffer.write(code, began, now(), self.tick << 32 | number)

    def served(self, segment: Segment, began: int, size: int) -> None:
        """Record a batch of requests."""
        code = self._codes.get(id(segment), 0) | Kind.BATCH << 48
        self._buffer.write(code, began, now(), self.tick << 32 | size)

    def waited(self, channel: str, began: int, *, takes: bool) -> None:
        """Record a wait for a message, or for room for one."""
        self._buffer.write(self._waits.get((takes, channel), 0), began, now(), self.tick << 32)


class _NoBuffer:
    """Drops spans."""

    def write(self, code: int, begin: int, end: int, detail: int) -> None:
        """Do nothing."""

    def is_measured(self, tick: int) -> bool:
        """Never."""
        return False


UNRECORDED = EndpointRecorder(_NoBuffer(), 0, copies=False)
