"""How a message's arrays are packed for the way between hosts: as they are, halved, or squeezed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import MissingExtraError
from shoal.planning.policy import Packed
from shoal.runtime.net.handshake import ProtocolError


class Sent(NamedTuple):
    """What was sent on a channel: messages, their bytes, and the bytes that went on the way."""

    messages: int = 0
    plain: int = 0
    packed: int = 0

    @property
    def saved(self) -> int:
        """Bytes that packing saved."""
        return self.plain - self.packed


def total(sent: Iterable[Sequence[int]]) -> Sent:
    """All of these together."""
    return Sent(*map(sum, zip(Sent(), *sent, strict=True)))


def check_packing(packing: Packed) -> Packed:
    """`packing` if what it needs is installed."""
    if "lz4" in packing.how and find_spec("lz4") is None:
        raise MissingExtraError("lz4", "lz4")
    return packing


class Codec:
    """A message as it goes from one end to one worker; all memory it needs is there before."""

    def __init__(self, parts: Sequence[tuple[tuple[int, ...], Any]], packing: Packed) -> None:
        self.plain = sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in parts)
        is_large = self.plain >= packing.least
        self.is_squeezed = is_large and "lz4" in packing.how
        halves = is_large and "bfloat16" in packing.how
        kinds = [_halved() if halves and dtype == np.float32 else dtype for _, dtype in parts]
        sizes = [
            prod(shape) * np.dtype(kind).itemsize
            for (shape, _), kind in zip(parts, kinds, strict=True)
        ]
        self.length = sum(sizes)
        self._whole = np.empty(self.length, np.uint8)
        self._bytes: memoryview = self._whole.data
        ends = np.cumsum([0, *sizes])
        self.arrays: list[np.ndarray] = [
            self._whole[first:last].view(kind).reshape(shape)
            for (shape, _), kind, first, last in zip(parts, kinds, ends, ends[1:], strict=False)
        ]

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and most bytes that it has on the way."""
        return (min(1, self.length) if self.is_squeezed else self.length), self.length

    def lent(self, values: Sequence[np.ndarray]) -> list[Any] | None:
        """These values as they lie, if they may be sent so; None if they have to be packed."""
        for x, room in zip(values, self.arrays, strict=True):
            if x.dtype != room.dtype or x.shape != room.shape or not x.flags.c_contiguous:
                return None
        return None if self.is_squeezed else [raw(x) for x in values]

    def pack(self, values: Sequence[np.ndarray]) -> tuple[list[Any], int]:
        """What is to be sent of these values, and how many bytes that is."""
        for x, room in zip(values, self.arrays, strict=True):
            room[...] = x
        if not self.is_squeezed:
            return [self._bytes], self.length
        import lz4.block

        squeezed = lz4.block.compress(self._whole, store_size=False)
        if len(squeezed) < self.length:
            return [squeezed], len(squeezed)
        return [self._bytes], self.length

    def room(self, length: int) -> np.ndarray:
        """Where a message of so many bytes is to be read to before it is unpacked."""
        return self._whole[:length]

    def unpack(self, length: int) -> None:
        """Let `arrays` be those of the message of so many bytes that was read."""
        if length == self.length:
            return
        import lz4.block

        try:
            plain = lz4.block.decompress(self._whole[:length], uncompressed_size=self.length)
        except lz4.block.LZ4BlockError as error:
            raise ProtocolError(f"a body that can't be unpacked: {error}") from None
        if len(plain) != self.length:
            raise ProtocolError(f"a body of {len(plain)} bytes, which has {self.length}")
        self._whole[:] = np.frombuffer(plain, np.uint8)


def raw(x: np.ndarray) -> np.ndarray:
    """An array as bytes, without a copy."""
    return x.reshape(-1).view(np.uint8)


def _halved() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16
