"""An endpoint is killed at any point: others receive only whole messages, and nothing is left."""

import gc
import os

import pytest

from conformance.lines import (
    PROCESSES,
    Meeting,
    die,
    holders,
    made,
    make_channel_spec,
    one_line,
    read,
    until,
    wait_put,
    wait_take,
    write,
)
from shoal.planning.policy import Latest, Lockstep, Queue, takes_some


class Deadly:
    """A value that kills the process that copies it."""

    def __array__(self, dtype=None, copy=None):
        die()


def put_and_die(hall, end, whole, point):
    """Put some messages, and die at a point of the next."""
    write(hall, end, 0, whole)
    wait_put(hall, end)
    channel = hall.channels["c"]
    message = made(channel.state.spec, end, whole)
    match point:
        case "before":
            die()
        case "filling":
            message[list(message)[-1]] = Deadly()
        case "counting":
            channel.state.did_put = die
        case "notifying":
            for waker in channel.state.readers[end]:
                waker.notify = die
    channel.put(end, message, whole)
    die()


def take_and_die(hall, end, whole, point):
    """Take some messages, and die at a point of the next."""
    read(hall, end, whole)
    wait_take(hall, end, whole)
    channel = hall.channels["c"]
    match point:
        case "before":
            die()
        case "letting go":
            channel.state.let_go = die
        case "notifying":
            for waker in channel.state.writers[end]:
                waker.notify = die
    channel.take(end, whole, die if point == "looking" else lambda m, _: m)
    die()


@pytest.mark.parametrize("point", ["before", "filling", "counting", "notifying", "after"])
@pytest.mark.parametrize("flow", [Lockstep(0), Queue(2, 1), Latest(0)], ids=str)
def test_a_reader_takes_only_whole_messages_of_a_killed_writer(flow, point):
    spec = make_channel_spec(flow, 2, 1)
    meeting = Meeting(PROCESSES, "shared", {"c": spec})
    victim = meeting.start(put_and_die, 0, 5, point)
    other = meeting.start(write, 1, 0, 9)
    reader = meeting.start(read, 0, 10**9)
    assert victim.gone() == -9
    whole = 5 + (point in ("notifying", "after"))
    takes = meeting.stile.counts.takes
    if takes_some(flow):
        until(lambda: (takes[0], takes[1]) == (whole, 9))
    else:
        until(lambda: takes[0] == whole)
    until(lambda: meeting.line.is_asleep(("r", 0)))
    meeting.hall.halt()
    got, _ = reader.result(), other.result()
    if takes_some(flow):
        every = sorted(turn for turns in got.turns for turn in turns)
        assert every == [(0, n) for n in range(whole)] + [(1, n) for n in range(9)]
    elif isinstance(flow, Lockstep):
        assert [turns[0][1] for turns in got.turns] == list(range(whole))
    else:
        numbers = [turns[0][1] for turns in got.turns]
        assert numbers == sorted(numbers)
        assert numbers[-1] == whole - 1


@pytest.mark.parametrize("point", ["before", "looking", "letting go", "notifying", "after"])
@pytest.mark.parametrize("flow", [Lockstep(0), Queue(3)], ids=str)
def test_a_reader_that_is_killed_keeps_its_slots_and_others_continue(flow, point):
    spec = make_channel_spec(flow, 1, 2)
    meeting = Meeting(PROCESSES, "shared", {"c": spec})
    victim = meeting.start(take_and_die, 0, 5, point)
    other = meeting.start(read, 1, 10**9)
    writer = meeting.start(write, 0, 0, 10**9)
    assert victim.gone() == -9
    puts = spec.gate.capacity + 5 + (point in ("notifying", "after"))
    until(lambda: meeting.stile.counts.puts[0] == puts and meeting.stile.counts.takes[1] == puts)
    until(lambda: all(meeting.line.is_asleep(end) for end in (("w", 0), ("r", 1))))
    meeting.hall.halt()
    assert writer.result() == puts
    assert other.result().turns == [[(0, n)] for n in range(puts)]


def killed_at_work():
    """Kill all endpoints while they run; the inode of their shared memory."""
    meeting = Meeting(PROCESSES, "shared", one_line(Lockstep(0), 2, 2))
    inode = os.fstat(meeting.line.memory.fd).st_ino
    jobs = [meeting.start(read, end, 10**9) for end in range(2)]
    jobs += [meeting.start(write, end, 0, 10**9) for end in range(2)]
    until(lambda: min(meeting.stile.counts.takes) > 5)
    assert holders(inode) == {os.getpid(), *(job.process.pid for job in jobs)}
    for job in jobs:
        with open(f"/proc/{job.process.pid}/maps") as maps:
            assert not [line for line in maps if "/dev/shm" in line], "only nameless memory"
        job.process.kill()
    assert {job.gone() for job in jobs} == {-9}
    assert holders(inode) == {os.getpid()}
    return inode


def test_when_all_ends_are_killed_no_memory_and_no_process_is_left():
    inode = killed_at_work()
    gc.collect()
    assert holders(inode) == set()
