"""Reads bytes that arrive in pieces through an inbox, without a socket."""

from shoal.runtime.net.connection import Inbox
from shoal.runtime.net.wire import ProtocolError


class Pieces:
    """A socket that delivers bytes in pieces of given sizes."""

    def __init__(self, data, sizes):
        self.rest, self._sizes = memoryview(data), sizes

    def recvmsg_into(self, views, ancillary, flags):
        """Fill these buffers with the next piece, or as much as there is room for."""
        done, most = 0, next(self._sizes)
        for view in views:
            into = memoryview(view)
            some = self.rest[: min(len(into), most - done)]
            into[: len(some)] = some
            self.rest, done = self.rest[len(some) :], done + len(some)
        return done, [], 0, None


class FrameRecorder:
    """Records the received frames with their bodies."""

    def __init__(self):
        self.frames, self._body = [], bytearray()

    def buffers(self, frame):
        self._body = bytearray(frame.length)
        half = frame.length // 2  # in two pieces, as arrays are
        return [memoryview(self._body)[:half], memoryview(self._body)[half:]][half == 0 :]

    def arrived(self, frame):
        self.frames.append((frame, bytes(self._body[: frame.length])))


def read(data, incoming, sizes, signing=None):
    """The frames in these bytes, with their bodies, and the error for the rest, if any."""
    recorder = FrameRecorder()
    inbox = Inbox(incoming, recorder, signing)
    sock = Pieces(data, sizes)
    try:
        while sock.rest:
            inbox.read(sock)
    except ProtocolError as error:
        return recorder.frames, str(error)
    return recorder.frames, ""


def sent(talk):
    """Frames with their bodies, as bytes."""
    return b"".join(frame.pack() + body for frame, body in talk)
