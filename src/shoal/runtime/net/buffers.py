"""The buffers of messages between hosts: sent from where they lie, read to where they belong."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.runtime.channels.channel import Message
from shoal.runtime.channels.shm import Target, key_data


def as_bytes(x: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array as a view."""
    return x.reshape(-1).view(np.uint8)


def size_of(targets: list[Target]) -> int:
    """The size in bytes of a message for these target arrays."""
    return sum(target.nbytes for target, *_ in targets)


class SendBuffer:
    """Prepares one endpoint's messages for some workers; of `Latest` it keeps the newest.

    An array is sent as it is, unless it has another layout, or may change while it is kept.
    """

    def __init__(self, targets: list[Target], *, keeps: bool) -> None:
        self._targets, self._keeps = targets, keeps
        self._copies: dict[int, np.ndarray] = {}
        self.number, self.version, self.length = -1, 0, size_of(targets)
        self.views: list[np.ndarray] = []  # the buffers of the message that was put last

    def put(self, message: Message, number: int, version: int) -> None:
        """Prepare a message; does nothing if it is the newest already."""
        if self.number != number:
            self.views = [self._view(i, message) for i in range(len(self._targets))]
            self.number, self.version = number, version

    def _view(self, index: int, message: Message) -> np.ndarray:
        target, name, is_key, rows = self._targets[index]
        x = message[name]
        x = key_data(x) if is_key and type(x) is not np.ndarray else np.asarray(x)
        x = x if rows is None else x[rows]
        is_alike = x.dtype == target.dtype and x.shape == target.shape and x.flags.c_contiguous
        if is_alike and (is_fixed(x) or not self._keeps):
            return as_bytes(x)
        if index not in self._copies:
            self._copies[index] = np.empty(target.shape, target.dtype)
        self._copies[index][...] = x
        return as_bytes(self._copies[index])


class Landing:
    """The buffers of one incoming message; one that isn't contiguous there is copied there."""

    def __init__(self, targets: list[Target]) -> None:
        buffers = [
            (into, into if into.flags.c_contiguous else np.empty(into.shape, into.dtype))
            for into, *_ in targets
        ]
        self.views = [as_bytes(x) for _, x in buffers]
        self._moves = [(into, x) for into, x in buffers if x is not into]

    def settle(self) -> None:
        """Move a complete message to its targets."""
        for into, x in self._moves:
            into[...] = x


def is_fixed(x: Any) -> bool:
    """Whether an array is read-only, such as a JAX array: no copy is needed."""
    while isinstance(x, np.ndarray):
        if x.flags.writeable:
            return False
        x = x.base
    return x is None or (isinstance(x, memoryview) and x.readonly)
