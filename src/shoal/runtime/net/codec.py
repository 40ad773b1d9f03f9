"""Encodes messages between hosts: unchanged, as bfloat16, or compressed with lz4.

Also the buffers of incoming messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np

from shoal.errors import MissingExtraError
from shoal.planning.policy import Packed
from shoal.runtime.channels.channel import Message
from shoal.runtime.channels.shm import Target, key_data
from shoal.runtime.net.wire import ProtocolError


def check_packing(packing: Packed) -> Packed:
    """`packing`, if the packages that it needs are installed."""
    if "lz4" in packing.how and find_spec("lz4") is None:
        raise MissingExtraError("lz4", "lz4")
    return packing


class Codec:
    """Packs and unpacks the messages to one worker, in memory that is allocated once."""

    def __init__(self, parts: Sequence[tuple[tuple[int, ...], Any]], packing: Packed) -> None:
        self.plain = sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in parts)
        is_large = self.plain >= packing.least
        self.is_compressed = is_large and "lz4" in packing.how
        narrows = is_large and "bfloat16" in packing.how
        kinds = [_bfloat16() if narrows and dtype == np.float32 else dtype for _, dtype in parts]
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
        """The minimum and maximum size in bytes of a packed message."""
        return (min(1, self.length) if self.is_compressed else self.length), self.length

    def lent(self, values: Sequence[np.ndarray]) -> list[Any] | None:
        """Buffers of these values without a copy; None if they have to be packed."""
        for x, target in zip(values, self.arrays, strict=True):
            if x.dtype != target.dtype or x.shape != target.shape or not x.flags.c_contiguous:
                return None
        return None if self.is_compressed else [as_bytes(x) for x in values]

    def pack(self, values: Sequence[np.ndarray]) -> list[Any]:
        """Pack values; returns the buffers to send."""
        for x, target in zip(values, self.arrays, strict=True):
            target[...] = x
        if not self.is_compressed:
            return [self._bytes]
        import lz4.block

        compressed = lz4.block.compress(self._whole, store_size=False)
        return [compressed if len(compressed) < self.length else self._bytes]

    def buffer(self, length: int) -> np.ndarray:
        """The buffer for a message of `length` bytes before it is unpacked."""
        return self._whole[:length]

    def unpack(self, length: int) -> None:
        """Unpack a message of `length` bytes into `arrays`."""
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


def as_bytes(x: np.ndarray) -> np.ndarray:
    """The bytes of an array as a view."""
    return x.reshape(-1).view(np.uint8)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


class SendBuffer:
    """Prepares one endpoint's messages for some workers; of `Latest` it keeps the newest.

    Read-only arrays are sent and kept as they are, others are copied if they are kept.
    """

    def __init__(self, parts: list[Target], packing: Packed, *, keeps: bool) -> None:
        self._parts = [(name, is_key, rows) for _, name, is_key, rows in parts]
        self._codec, self._keeps = codec_of(parts, packing), keeps
        self.views: list[Any] = []  # the buffers of the message that was put last
        self.number, self.version, self.length = -1, 0, 0
        self.plain = self._codec.plain

    def put(self, message: Message, number: int, version: int) -> None:
        """Prepare a message; does nothing if it is the newest already."""
        if self.number == number:
            return
        values = []
        for name, is_key, rows in self._parts:
            x = message[name]
            x = key_data(x) if is_key and type(x) is not np.ndarray else np.asarray(x)
            values.append(x if rows is None else x[rows])
        is_lent = not self._keeps or all(map(is_fixed, values))
        views = self._codec.lent(values) if is_lent else None
        self.views = views if views is not None else self._codec.pack(values)
        self.number, self.version, self.length = number, version, sum(map(len, self.views))


class Landing:
    """The buffers of one incoming message; packed arrays are unpacked to their targets."""

    def __init__(self, targets: list[Target], packing: Packed) -> None:
        self._targets = [target for target, *_ in targets]
        self._codec = codec_of(targets, packing)
        pairs = list(zip(self._targets, self._codec.arrays, strict=True))
        direct = [into.flags.c_contiguous and into.dtype == x.dtype for into, x in pairs]
        self._moves = [pair for pair, is_direct in zip(pairs, direct, strict=True) if not is_direct]
        self._views = [
            as_bytes(into if is_direct else x)
            for (into, x), is_direct in zip(pairs, direct, strict=True)
        ]

    def views(self, length: int) -> list[Any]:
        """The buffers for a body of `length` bytes."""
        return [self._codec.buffer(length)] if self._codec.is_compressed else self._views

    def settle(self, length: int) -> None:
        """Unpack a complete message to its targets."""
        if self._codec.is_compressed:
            self._codec.unpack(length)
            for into, x in zip(self._targets, self._codec.arrays, strict=True):
                into[...] = x
            return
        for into, x in self._moves:
            into[...] = x


def is_fixed(x: Any) -> bool:
    """Whether an array is read-only, such as a JAX array: no copy is needed."""
    while isinstance(x, np.ndarray):
        if x.flags.writeable:
            return False
        x = x.base
    return x is None or (isinstance(x, memoryview) and x.readonly)


def codec_of(targets: list[Target], packing: Packed) -> Codec:
    """The codec of messages for these target arrays."""
    return Codec([(target.shape, target.dtype) for target, *_ in targets], packing)
