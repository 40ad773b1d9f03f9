"""How one end's messages go to other workers: packed and kept, sent, and where they come to lie."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.planning.policy import Packed
from shoal.runtime.channels.channel import Message
from shoal.runtime.channels.shm import Target, key_data
from shoal.runtime.net.codec import Codec, Sent, raw
from shoal.runtime.net.framing import Frame, Key
from shoal.runtime.net.reconnect import Resent

Send = Callable[[Frame, list[Any]], None]
_Message = tuple[int, int, list[Any], int]  # number, version, bytes, and how many


class SendBuffer:
    """One end's messages, packed as some workers get them, until their room is wanted again.

    All arrays of a message lie in one piece, and can be sent once more if they have to be.
    """

    def __init__(self, parts: list[Target], how: Packed, slots: int, lock: threading.Lock) -> None:
        self._parts = [(name, is_key, rows) for _, name, is_key, rows in parts]
        self._parcels = [parcel_of(parts, how) for _ in range(slots)]
        self._packed: list[_Message] = [(-1, 0, [], 0)] * slots
        self._shown: _Message | None = None  # what is being sent
        self._values: list[np.ndarray] = []  # its arrays, if they are sent from where they lie
        self.lock = lock  # held by who puts, and by who sends again
        self.slots, self.plain = slots, self._parcels[0].plain

    def show(self, message: Message, number: int, version: int) -> None:
        """Take a message to be sent: from where it lies, if it lies as it is sent."""
        if self._shown and self._shown[0] == number:
            return
        self._values = []
        for name, is_key, rows in self._parts:
            x = message[name]
            x = key_data(x) if is_key and type(x) is not np.ndarray else np.asarray(x)
            self._values.append(x if rows is None else x[rows])
        parcel = self._parcels[number % self.slots]
        views, length = parcel.lent(self._values), parcel.length
        if views is None:
            views, length = parcel.pack(self._values)
            self._values = []
        elif all(map(is_fixed, self._values)):
            self._values = []
        self._shown = number, version, views, length

    def keep(self) -> None:
        """Once it is sent: keep it, so that it can be sent again after its maker has changed it."""
        if self._shown is None:
            return
        number, version, views, length = self._shown
        slot = number % self.slots
        if self._values:
            views, length = self._parcels[slot].pack(self._values)
        self._packed[slot] = number, version, views, length
        self._shown, self._values = None, []

    def frame(self, key: Key, number: int) -> tuple[Frame, list[Any]]:
        """A message that is on it, as it is sent."""
        shown = self._shown
        kept = shown if shown and shown[0] == number else self._packed[number % self.slots]
        found, version, views, length = kept
        assert found == number, "a message was forgotten before it came"
        return Frame(*key, number, version, length), views


class Outbound:
    """The way of one end's messages to one other worker."""

    def __init__(self, worker: int, key: Key, send: Send, shelf: SendBuffer) -> None:
        self.worker, self._key, self._send, self._shelf = worker, key, send, shelf
        self.lock, self.count = shelf.lock, 0
        self.sent = Sent()

    def send(self, message: Message, number: int, version: int) -> None:
        """Send a message."""
        shelf = self._shelf
        shelf.show(message, number, version)
        frame, views = shelf.frame(self._key, number)
        self.count = number + 1
        self._send(frame, views)
        count, plain, packed = self.sent
        self.sent = Sent(count + 1, plain + shelf.plain, packed + frame.length)

    def send_newest(self) -> None:
        """Send the newest message once more, if there is any, to who takes another's place."""
        if self.count:
            self._send(*self._shelf.frame(self._key, self.count - 1))

    def since(self, number: int) -> list[Resent]:
        """What was sent from this number on; of news only the newest."""
        first = max(number, self.count - self._shelf.slots)
        return [Resent(*self._shelf.frame(self._key, n)) for n in range(first, self.count)]


class Room:
    """Where one message comes to lie; what lies otherwise on the way is read beside it."""

    def __init__(self, rooms: list[Target], how: Packed) -> None:
        self._rooms = [room for room, *_ in rooms]
        self._parcel = parcel_of(rooms, how)
        parts = list(zip(self._rooms, self._parcel.arrays, strict=True))
        direct = [room.flags.c_contiguous and room.dtype == x.dtype for room, x in parts]
        self._moves = [pair for pair, is_direct in zip(parts, direct, strict=True) if not is_direct]
        pairs = zip(parts, direct, strict=True)
        self._views = [raw(room if is_direct else x) for (room, x), is_direct in pairs]

    def views(self, length: int) -> list[Any]:
        """Buffers for so many bytes."""
        return [self._parcel.room(length)] if self._parcel.is_squeezed else self._views

    def settle(self, length: int) -> None:
        """All has come: unpack it, and move what is to lie elsewhere."""
        if self._parcel.is_squeezed:
            self._parcel.unpack(length)
            for room, x in zip(self._rooms, self._parcel.arrays, strict=True):
                room[...] = x
            return
        for room, x in self._moves:
            room[...] = x


def is_fixed(x: Any) -> bool:
    """Whether nobody can write to an array, as to those of JAX: it is kept without a copy."""
    while isinstance(x, np.ndarray):
        if x.flags.writeable:
            return False
        x = x.base
    return x is None or (isinstance(x, memoryview) and x.readonly)


def parcel_of(rooms: list[Target], how: Packed) -> Codec:
    """What a message is that comes to lie in these arrays, on its way."""
    return Codec([(room.shape, room.dtype) for room, *_ in rooms], how)
