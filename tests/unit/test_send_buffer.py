"""The send buffer copies only what may change while it is kept; buffers are split anywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.net.buffers import SendBuffer
from shoal.runtime.net.sockets import MOST_SENT, after, first, send_all


def put(x, *, keeps):
    """A buffer that has prepared a message with this array."""
    target = np.zeros((4, 3), np.float32)
    buffer = SendBuffer([(target, "x", False, None)], keeps=keeps)
    buffer.put({"x": x}, 0, 0)
    return buffer


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_newest_message_is_kept_unchanged_when_its_array_is_overwritten(kind):
    x = np.ones((4, 3), kind)
    buffer = put(x, keeps=True)
    before = b"".join(buffer.views)
    x[...] = -1
    assert b"".join(buffer.views) == before
    assert buffer.length == len(before)


@pytest.mark.parametrize("keeps", [False, True], ids=["sent", "kept"])
def test_only_an_array_that_may_change_while_it_is_kept_is_copied(keeps):
    x = np.ones((4, 3), np.float32)
    y = x.view()
    y.flags.writeable = False  # but x can be written to
    assert np.shares_memory(np.frombuffer(put(y, keeps=keeps).views[0], np.uint8), x) != keeps
    x.flags.writeable = False
    assert np.shares_memory(put(x, keeps=keeps).views[0], x)


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
