"""Shared memory and wakers: no wake-up is lost, every wait can be stopped, and nothing is left."""

import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.lines import HANG, Process, Shared, holders, one_line, until
from shoal.planning.policy import Lockstep
from shoal.runtime.channels.shared_memory import LINE, Allocator, FutexWaker, Memory
from shoal.runtime.execution.scheduler import Stopped

LAW = settings(max_examples=60, deadline=None, derandomize=True)


@LAW
@given(st.lists(st.integers(0, 300), max_size=20))
def test_things_in_a_room_begin_a_cache_line_and_never_overlap(sizes):
    room = Allocator()
    places = [room.take(size) for size in sizes]
    assert all(place % LINE == 0 for place in places)
    for place, size, later in zip(places, sizes, [*places, room.size][1:], strict=True):
        assert place + size <= later


@LAW
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
def test_words_and_arrays_are_the_same_memory_for_all_who_open_it(numbers):
    room = Allocator()
    apart, packed = room.take(len(numbers) * LINE), room.take(len(numbers) * 8)
    mine = Memory.make(room.size)
    other = Memory(os.dup(mine.fd), mine.size)
    assert not any(mine.array(0, (mine.size,), "uint8")), "new memory is all zero"
    for i, number in enumerate(numbers):
        mine.words(apart, len(numbers))[i] = number
        mine.packed(packed, len(numbers))[i] = number
    assert list(other.words(apart, len(numbers))) == numbers
    assert list(other.packed(packed, len(numbers))) == numbers
    np.testing.assert_array_equal(other.array(packed, (len(numbers),), "int64"), numbers)
    np.testing.assert_array_equal(other.array(apart, (len(numbers), 8), "int64")[:, 0], numbers)


def a_bell(check=lambda: None, spin=0.0):
    return FutexWaker(Memory.make(LINE), 0, spin, check)


@pytest.mark.parametrize("spin", [0.0, 1e-3])
def test_waiting_ends_when_ready_and_raises_when_all_is_to_stop(spin):
    a_bell(spin=spin).wait(lambda: True, HANG)
    answers = iter([False, True])
    a_bell(spin=spin).wait(lambda: next(answers, True), HANG)
    a_bell(spin=spin).wait(lambda: False, 0.0)

    def check():
        raise Stopped

    with pytest.raises(Stopped):
        a_bell(check, spin).wait(lambda: False, HANG)


def test_a_halt_between_looking_and_sleeping_is_seen(monkeypatch):
    halted, slept = [], []

    def check():
        if halted:
            raise Stopped

    waker = a_bell(check)
    waker._sleep = slept.append
    # A notifier that saw no sleeper yet, and so notified none.
    monkeypatch.setattr("shoal.runtime.channels.shared_memory.fence", lambda: halted.append(True))
    with pytest.raises(Stopped):
        waker.wait(lambda: False, HANG)
    assert not slept


def rally(hall, me, times):
    """Wait for the other's count, then count and notify; the number of rounds."""
    channel = hall.channels["c"]
    mine, other = ("w", 0), ("r", 0)
    if me == "r":
        mine, other = other, mine
    counts = channel.state.counts
    my, its = (counts.puts, counts.takes) if me == "w" else (counts.takes, counts.puts)
    ahead = 1 if me == "r" else 0
    for turn in range(times):
        while its[0] < turn + ahead:
            hall.wakers[mine].wait(lambda n=turn + ahead: its[0] >= n, HANG)
        my[0] = turn + 1
        hall.wakers[other].notify()
    return times


def test_no_ring_is_lost_in_twenty_thousand_rallies():
    line = Shared(one_line(Lockstep(0), 1, 1))
    players = [Process(line, rally, me, 20_000) for me in "wr"]
    assert [player.result() for player in players] == [20_000] * 2


def test_memory_is_freed_with_its_last_reference():
    memory = Memory.make(1 << 20)
    inode, x = os.fstat(memory.fd).st_ino, memory.array(0, (4,), "int64")
    del memory
    gc.collect()
    assert holders(inode) == {os.getpid()}, "an array keeps the memory it lies in"
    x[0] = 1
    del x
    gc.collect()
    assert holders(inode) == set()


FAMILY = """
import os, signal, subprocess, sys
from shoal.runtime.channels.shared_memory import Memory
if len(sys.argv) == 1:
    memory = Memory.make(1 << 20)
    child = subprocess.Popen(
        [sys.executable, "-c", os.environ["FAMILY"], str(memory.fd)], pass_fds=[memory.fd]
    )
    print(os.fstat(memory.fd).st_ino, child.pid, flush=True)
else:
    memory = Memory(int(sys.argv[1]), 1 << 20)
signal.pause()
"""


def test_memory_is_gone_when_all_who_share_it_are_killed():
    command = [sys.executable, "-c", FAMILY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"FAMILY": FAMILY}, text=True
    ) as parent:
        inode, child = map(int, parent.stdout.readline().split())
        until(lambda: holders(inode) == {parent.pid, child})
        os.kill(child, signal.SIGKILL)
        parent.kill()
    until(lambda: holders(inode) == set())
