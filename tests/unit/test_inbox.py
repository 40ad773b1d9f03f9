"""What a connection that is made again begins with: a table, however it is divided on the way."""

import socket
from contextlib import suppress

import pytest

from shoal.runtime.net.framing import DATA, TAKEN, Frame, Terms
from shoal.runtime.net.handshake import ProtocolError
from shoal.runtime.net.inbox import Inbox
from shoal.runtime.net.reconnect import packed

NEWS, TOOK = (DATA, 0, 0), (TAKEN, 1, 0)
MANY = [(DATA, channel, 0) for channel in range(2, 60)]  # more than are read ahead
TERMS = Terms.of({NEWS: (3, 3), TOOK: (0, 0), **dict.fromkeys(MANY, (1, 1))}, news=[NEWS, *MANY])


class FrameHandler:
    """Remembers what came."""

    def __init__(self):
        self.frames, self.body = [], bytearray(3)

    def room(self, frame):
        return [memoryview(self.body)[: frame.length]]

    def arrived(self, frame):
        self.frames.append((*frame[:4], bytes(self.body[: frame.length])))


def heard(data, piece):
    """What is heard of a connection that goes on, if so many bytes come at a time."""
    ears, (here, there) = FrameHandler(), socket.socketpair()
    inbox = Inbox(TERMS, ears)
    inbox.resume()
    with here, there:
        for first in range(0, len(data), piece):
            there.sendall(data[first : first + piece])
            with suppress(BlockingIOError):
                while True:
                    inbox.read(here)
    return ears.frames


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("skips", [{NEWS: 7}, {NEWS: 7} | dict.fromkeys(MANY, 3)], ids=len)
def test_numbers_go_on_as_the_table_says(piece, skips):
    news, took = Frame(*NEWS, 7, 0, 3), Frame(*TOOK, 0)
    data = packed(skips) + news.packed() + b"abc" + took.packed()
    assert heard(data, piece) == [(*NEWS, 7, b"abc"), (*TOOK, 0, b"")]


def test_without_skips_all_goes_on_where_it_was():
    assert heard(packed({}) + Frame(*TOOK, 0).packed(), 5) == [(*TOOK, 0, b"")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bytes(12), "no table"),
        (packed({TOOK: 1, (DATA, 99, 0): 1}), "can't go on with 1"),
        (packed({NEWS: 7}) + Frame(*NEWS, 6, 0, 3).packed(), "and 7 is due"),
    ],
)
def test_what_is_not_agreed_is_refused(data, why):
    with pytest.raises(ProtocolError, match=why):
        heard(data, 1 << 16)
