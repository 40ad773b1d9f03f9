"""Records what one endpoint does: called by the runtime around each operation. Needs no JAX."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from shoal.planning.program import Call, Put, Take
from shoal.planning.segments import NumpyWork, Operation, Program, Segment, walk
from shoal.profiling.spans import Kind, code_of, site_of

now = time.monotonic_ns
KINDS: Mapping[type, Kind] = {
    Segment: Kind.SEGMENT, Call: Kind.STAGE, NumpyWork: Kind.NUMPY, Take: Kind.TAKE, Put: Kind.PUT,
}  # fmt: skip


NUMBER = 0xFFFFFFFF  # the bits of a span's word that have its number
SHORT_NS = 2_000  # a shorter wait for a device is no span of its own


def records_spans() -> bool:
    """Whether workers record spans: unless the environment variable SHOAL_SPANS is "off"."""
    return os.environ.get("SHOAL_SPANS") != "off"


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
        self._device = 0  # the code of a wait for the newest segment; 0 if none is pending
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
            if isinstance(operation, Take | Put):
                key = isinstance(operation, Take), operation.channel
                self._waits[key] = code_of(Kind.WAIT, site, self._end)
        return self

    def begin(self, operation: Operation, env: Mapping[str, Any]) -> int:
        """The time at which an operation begins, once what it reads is in host memory."""
        kind = type(operation)
        if self._device and (kind is Call or kind is NumpyWork or (kind is Put and self._copies)):
            return self._await(env[name] for name in operation.reads if name in env)
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
        if type(operation) is Segment:
            self._device = code | Kind.DEVICE << 48
            if self._buffer.is_measured(self.tick):
                self._await(env[name] for name in operation.writes)

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

    def _await(self, values: Iterable[Any]) -> int:
        """Wait for values that a device computes, as a span of the newest segment."""
        began = now()
        for x in values:
            if (block := getattr(x, "block_until_ready", None)) is not None:
                block()
        if (ended := now()) - began < SHORT_NS:
            return began
        self._buffer.write(self._device, began, ended, self.tick << 32)
        return ended

    def report(self, values: Iterable[Any]) -> int:
        """The time at which a report of these values begins, once they are in host memory."""
        return self._await(values) if self._device and self._copies else now()

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
