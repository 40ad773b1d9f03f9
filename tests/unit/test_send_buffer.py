"""The send buffer keeps messages as they were sent until they are received."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planning.policy import Packed
from shoal.runtime.net.codec import SendBuffer
from shoal.runtime.net.sockets import MOST_SENT, after, first, send_all


def buffer_of(slots, how=()):
    target = np.zeros((4, 3), np.float32)
    return SendBuffer([(target, "x", False, None)], Packed(how, least=0), slots)


def put(buffer, number, x):
    """Send a message: the kept message, and the bytes sent."""
    found = buffer.put({"x": x}, number, number)
    return found, b"".join(found.views)


@pytest.mark.parametrize("slots", [3, 0], ids=["in slots", "as many as there are"])
@pytest.mark.parametrize("how", [(), ("lz4",), ("bfloat16",)], ids=str)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_resent_message_is_unchanged_when_its_array_was_overwritten(how, kind, slots):
    buffer, x, every = buffer_of(slots, how), np.zeros((4, 3), kind), []
    for number in range(5):
        x[...] = number
        every.append(put(buffer, number, x))
    x[...] = -1
    kept = every[-slots:] if slots else every
    assert all(b"".join(found.views) == before for found, before in kept)
    assert len({before for _, before in kept}) == len(kept)


def test_a_read_only_array_is_kept_without_a_copy():
    buffer = buffer_of(2)
    x = np.ones((4, 3), np.float32)
    y = x.view()
    y.flags.writeable = False  # but x can be written to
    found, _ = put(buffer, 0, y)
    assert not np.shares_memory(np.frombuffer(found.views[0], np.uint8), x)
    x.flags.writeable = False
    found, _ = put(buffer, 1, x)
    assert np.shares_memory(found.views[0], x)


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 60))
def test_buffers_are_split_anywhere(views, count):
    whole = b"".join(views)
    assert b"".join(first(views, count)) == whole[:count]
    assert b"".join(after(views, count)) == whole[count:]


def test_large_messages_are_sent_in_pieces():
    pieces = []

    class Sock:
        def sendmsg(self, views, *_):
            pieces.append(b"".join(views))
            return len(pieces[-1])

    rng = np.random.default_rng(0)
    sizes = (40, MOST_SENT - 1, 5, 2 * MOST_SENT + 3)
    views = [memoryview(rng.integers(0, 256, size, np.uint8)) for size in sizes]
    send_all(Sock(), views, sum(sizes), lambda: None)
    assert b"".join(pieces) == b"".join(views)
    assert max(map(len, pieces)) == MOST_SENT
