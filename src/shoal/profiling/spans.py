"""Spans: what a worker did from when to when, in a buffer that one thread writes and others read.

A span has 32 bytes. Its site is a number that the plan gives to each operation, so that nothing
has to be looked up while it is written. Needs no JAX.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import numpy as np

SLOTS = 1 << 15
HEAD, FIRST_MEASURED, LAST_MEASURED, PID = range(4)  # words before the slots
HEADER = 64  # bytes
BUFFER_WORDS = HEADER // 8 + SLOTS * 4
SPAN = np.dtype(
    [
        ("begin", "<i8"), ("end", "<i8"),  # nanoseconds of CLOCK_MONOTONIC
        ("site", "<u4"), ("endpoint", "<u2"), ("kind", "<u2"),
        ("number", "<u4"), ("tick", "<u4"),  # the number of a message, or of what was batched
    ]
)  # fmt: skip
OPERATION_BITS = 16  # of a site; the bits above number the fragment
_write = Struct("<qqqq").pack_into


class Kind(IntEnum):
    """What a worker does in a span."""

    SEGMENT = 0  # run a compiled segment: of a device, only start it
    DEVICE = 1  # wait for what a compiled segment computes
    STAGE = 2  # run a stage in Python
    NUMPY = 3  # slice and stack in Python
    TAKE = 4  # copy a message from a channel
    PUT = 5  # copy a message to a channel
    WAIT = 6  # wait until a message may be taken or put
    BATCH = 7  # run a segment for the requests of several endpoints
    LINGER = 8  # wait for more such requests
    CHUNK = 9  # run some ticks of a plan of one program
    REPORT = 10  # give metrics to the driver
    KEEP = 11  # copy the carried state
    TURN = 12  # a message that the take before took; its endpoint is the writer's
    GAP = 13  # between two spans: found when they are read, never written
    LOST = 14  # spans that were overwritten before they were read


def site_of(fragment: int, operation: int) -> int:
    """The number of an operation's site, from its fragment's number."""
    return fragment << OPERATION_BITS | operation


def code_of(kind: Kind, site: int, endpoint: int) -> int:
    """A kind, site and endpoint as the 64-bit word that a span has them in."""
    return kind << 48 | (endpoint & 0xFFFF) << 32 | site


class SpanBuffer:
    """A buffer of spans: one thread writes, and one other, which may be in another process, reads.

    There is no lock: a reader leaves out what may have been overwritten while it read.
    """

    def __init__(self, words: memoryview, fence: Callable[[], None] = lambda: None) -> None:
        self._words, self._fence = words, fence
        self._bytes = words.cast("B")
        self._slots = np.frombuffer(self._bytes, SPAN, SLOTS, HEADER)
        self._head, self._tail = words[HEAD], 0

    @staticmethod
    def own() -> SpanBuffer:
        """A buffer in the memory of this process."""
        return SpanBuffer(memoryview(bytearray(BUFFER_WORDS * 8)).cast("q")).begin()

    def begin(self) -> SpanBuffer:
        """Make this process the writer."""
        self._head, self._words[PID] = self._words[HEAD], os.getpid()
        return self

    def write(self, code: int, begin: int, end: int, detail: int) -> None:
        """Write a span; the oldest is overwritten."""
        head = self._head
        _write(self._bytes, HEADER + (head & SLOTS - 1) * 32, begin, end, code, detail)
        self._head = self._words[HEAD] = head + 1

    def is_measured(self, tick: int) -> bool:
        """Whether a worker is to wait for its device after each segment of this tick."""
        return self._words[FIRST_MEASURED] <= tick < self._words[LAST_MEASURED]

    def measure(self, ticks: range) -> None:
        """Set the ticks at which workers wait for their devices."""
        self._words[FIRST_MEASURED], self._words[LAST_MEASURED] = ticks.start, ticks.stop

    def read(self) -> tuple[np.ndarray, int]:
        """The spans since the last call, and how many before them were lost."""
        head = self._words[HEAD]
        self._fence()
        first = max(self._tail, head - SLOTS)
        found = self._slots[np.arange(first, head) & SLOTS - 1]
        self._fence()
        # The slot of the next span may be half written: it is that of the one SLOTS before.
        whole = max(first, min(head, self._words[HEAD] - SLOTS + 1))
        lost, self._tail = whole - self._tail, head
        return found[whole - first :], lost

    @property
    def pid(self) -> int:
        """The process that writes; 0 before it begins."""
        return self._words[PID]


class NewSpans(NamedTuple):
    """What a worker has recorded since it was read last."""

    spans: np.ndarray
    lost: int
    pid: int
    memory: int  # resident bytes of its process; 0 if unknown


class SpanBuffers:
    """The buffers of several workers, by name."""

    def __init__(self) -> None:
        self._span_buffers: dict[str, SpanBuffer] = {}

    def add(self, name: str, buffer: SpanBuffer) -> SpanBuffer:
        """Add the buffer of a worker; returns it."""
        return self._span_buffers.setdefault(name, buffer)

    def read(self, measured: range) -> dict[str, NewSpans]:
        """The new spans of each worker that has any; sets which ticks are measured."""
        found = {}
        for name, buffer in self._span_buffers.items():
            buffer.measure(measured)
            spans, lost = buffer.read()
            if len(spans) or lost:
                found[name] = NewSpans(spans, lost, buffer.pid, resident(buffer.pid))
        return found


def resident(pid: int) -> int:
    """The resident memory of a process in bytes; 0 if it has ended, or the system doesn't say."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
