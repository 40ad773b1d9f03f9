"""How one end's messages go to other workers: packed and kept, sent, and where they come to lie."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.planning.policy import Packed
from shoal.runtime.channels import Message
from shoal.runtime.frames import Frame, Key
from shoal.runtime.packing import Parcel, Sent, raw
from shoal.runtime.rejoining import Resent
from shoal.runtime.shm import Target, key_data

Send = Callable[[Frame, list[Any]], None]


class Shelf:
    """One end's messages, packed as some workers get them, until their room is wanted again.

    All arrays of a message lie in one piece, and can be sent once more if they have to be.
    """

    def __init__(self, parts: list[Target], how: Packed, slots: int, lock: threading.Lock) -> None:
        self._parts = [(name, is_key, rows) for _, name, is_key, rows in parts]
        self._parcels = [parcel_of(parts, how) for _ in range(slots)]
        self._packed: list[tuple[int, int, list[Any], int]] = [(-1, 0, [], 0)] * slots
        self.lock = lock  # held by who puts, and by who sends again
        self.slots, self.plain = slots, self._parcels[0].plain

    def pack(self, message: Message, number: int, version: int) -> None:
        """Put a message on it, unless it is there."""
        slot = number % self.slots
        if self._packed[slot][0] == number:
            return
        values = []
        for name, is_key, rows in self._parts:
            x = message[name]
            x = key_data(x) if is_key and type(x) is not np.ndarray else np.asarray(x)
            values.append(x if rows is None else x[rows])
        views, length = self._parcels[slot].pack(values)
        self._packed[slot] = number, version, views, length

    def frame(self, key: Key, number: int) -> tuple[Frame, list[Any]]:
        """A message that is on it, as it is sent."""
        found, version, views, length = self._packed[number % self.slots]
        assert found == number, "a message was forgotten before it came"
        return Frame(*key, number, version, length), views


class Way:
    """The way of one end's messages to one other worker."""

    def __init__(self, worker: int, key: Key, send: Send, shelf: Shelf) -> None:
        self.worker, self._key, self._send, self._shelf = worker, key, send, shelf
        self.lock, self.count = shelf.lock, 0
        self.sent = Sent()

    def send(self, message: Message, number: int, version: int) -> None:
        """Send a message; it is kept until its reader has taken it."""
        shelf = self._shelf
        shelf.pack(message, number, version)
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


def parcel_of(rooms: list[Target], how: Packed) -> Parcel:
    """What a message is that comes to lie in these arrays, on its way."""
    return Parcel([(room.shape, room.dtype) for room, *_ in rooms], how)
