"""A worker on another host dies while it sends: readers get whole messages and its name."""

import pytest

from conformance.lines import (
    PROCESSES,
    Meeting,
    die,
    made,
    make_channel_spec,
    read,
    wait_put,
    write,
)
from conformance.wired import SIDES
from shoal.errors import RunError
from shoal.planning.policy import Lockstep, Queue
from shoal.runtime.net import connection


class Half:
    """A socket that kills the process after half of a send."""

    def __init__(self, sock):
        self._sock = sock

    def sendmsg(self, views, *_):
        data = b"".join(bytes(view) for view in views)
        self._sock.sendall(data[: len(data) // 2])
        die()


def send_and_die(hall, end, whole, point):
    """Put some messages, and die at a point of the next."""
    write(hall, end, 0, whole)
    wait_put(hall, end)
    channel = hall.channels["c"]
    if point == "half sent":
        for link in channel.writer(end).links.links.values():
            link.sock = Half(link.sock)
    if point != "before":
        channel.put(end, made(channel.spec, end, whole), whole)
    die()


def read_on(hall, end):
    """Take every message."""
    connection.ERROR_GRACE_S = 0.1
    return read(hall, end, 10**9)


def read_and_die(hall, end, whole):
    """Take some messages and die."""
    read(hall, end, whole)
    die()


def write_on(hall, end):
    """Put whenever there is a free slot."""
    connection.ERROR_GRACE_S = 0.1
    return write(hall, end, 0, 10**9)


SIDES |= {"send_and_die": "w", "read_on": "r", "read_and_die": "r", "write_on": "w"}
LOST = r"the connection to worker {}\[0\] is lost: (the other side closed it|it was cut off)"


@pytest.mark.parametrize("point", ["before", "half sent", "after"])
@pytest.mark.parametrize("flow", [Lockstep(0), Queue(8), Queue(2, 1)], ids=str)
def test_a_reader_takes_only_whole_messages_of_a_dead_writer_and_names_it(flow, point):
    meeting = Meeting(PROCESSES, "tcp", {"c": make_channel_spec(flow, 1, 1)})
    victim = meeting.start(send_and_die, 0, 5, point)
    reader = meeting.start(read_on, 0)
    assert victim.gone() == -9
    with pytest.raises(RunError, match=LOST.format("w")):
        reader.result()
    taken = meeting.stile.counts.takes[0]
    # What was sent and not read when the kernel closed the connection may be lost with it.
    assert taken <= 5 + (point == "after")
    if isinstance(flow, Lockstep):
        assert taken >= 5 - meeting.stile.spec.gate.capacity


@pytest.mark.parametrize("flow", [Lockstep(0), Queue(8)], ids=str)
def test_a_writer_fails_when_its_reader_dies(flow):
    meeting = Meeting(PROCESSES, "tcp", {"c": make_channel_spec(flow, 1, 1)})
    victim = meeting.start(read_and_die, 0, 5)
    writer = meeting.start(write_on, 0)
    assert victim.gone() == -9
    with pytest.raises(RunError, match=LOST.format("r")):
        writer.result()
