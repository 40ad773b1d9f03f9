"""What is kept of messages until they have come: what they were when they were put."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planning.policy import Packed
from shoal.runtime.net.framing import DATA
from shoal.runtime.net.outbound import Outbound, SendBuffer
from shoal.runtime.net.sockets import MOST_SENT, after, first, send_all

KEY = (DATA, 0, 0)


def way_of(slots, how=()):
    room = np.zeros((4, 3), np.float32)
    shelf = SendBuffer([(room, "x", False, None)], Packed(how, least=0), slots, threading.Lock())
    sent = []
    return Outbound(1, KEY, lambda frame, views: sent.append(b"".join(views)), shelf), shelf, sent


def put(way, shelf, number, x):
    way.send({"x": x}, number, number)
    shelf.keep()


@pytest.mark.parametrize("how", [(), ("lz4",), ("bfloat16",)], ids=str)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_what_is_sent_again_is_what_was_put_whatever_became_of_the_array(how, kind):
    way, shelf, sent = way_of(3, how)
    x = np.zeros((4, 3), kind)
    for number in range(5):
        x[...] = number
        put(way, shelf, number, x)
    x[...] = -1
    again = way.since(2)
    assert [one.frame.number for one in again] == [2, 3, 4]
    assert [b"".join(one.body) for one in again] == sent[2:]


def test_an_array_that_nobody_can_write_to_is_kept_without_a_copy():
    way, shelf, _ = way_of(2)
    x = np.ones((4, 3), np.float32)
    y = x.view()
    y.flags.writeable = False  # but x can be written to
    put(way, shelf, 0, y)
    assert not np.shares_memory(way.since(0)[0].body[0], x)
    x.flags.writeable = False
    put(way, shelf, 1, x)
    assert np.shares_memory(way.since(1)[0].body[0], x)


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 60))
def test_buffers_are_parted_anywhere(views, count):
    whole = b"".join(views)
    assert b"".join(first(views, count)) == whole[:count]
    assert b"".join(after(views, count)) == whole[count:]


def test_what_is_large_is_sent_in_pieces_that_leave_the_other_side_time_to_answer():
    pieces = []

    class Sock:
        def sendmsg(self, views):
            pieces.append(b"".join(views))
            return len(pieces[-1])

    rng = np.random.default_rng(0)
    sizes = (40, MOST_SENT - 1, 5, 2 * MOST_SENT + 3)
    views = [memoryview(rng.integers(0, 256, size, np.uint8)) for size in sizes]
    send_all(Sock(), views, sum(sizes), lambda: None)
    assert b"".join(pieces) == b"".join(views)
    assert max(map(len, pieces)) == MOST_SENT
