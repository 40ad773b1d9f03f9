"""Packing round-trips exactly or to bfloat16, and rejects invalid bytes."""

from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.planning.policy import Packed
from shoal.runtime.channels.channel import Sent, total
from shoal.runtime.net.codec import Codec
from shoal.runtime.net.wire import ProtocolError

pytest.importorskip("lz4")
LAW = settings(max_examples=100, deadline=None, derandomize=True)
WAYS = [Packed(how, least=0) for how in ((), ("lz4",), ("bfloat16",), ("bfloat16", "lz4"))]


@st.composite
def arrays(draw):
    """A few arrays of any shape, with gaps or without, even or noisy."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = draw(st.sampled_from(["float32", "int64", "bool", "uint8"]))
        seed = draw(st.integers(0, 100))
        x = np.random.default_rng(seed).normal(size=shape) * draw(st.sampled_from([0, 1, 1e6]))
        found.append(x.astype(dtype).T if draw(st.booleans()) else x.astype(dtype))
    return found


def carried(values, packing):
    """Send values through a codec: the received arrays, and the number of bytes sent."""
    parts = [(x.shape, x.dtype) for x in values]
    here, there = Codec(parts, packing), Codec(parts, packing)
    views = here.pack(values)
    length = sum(map(len, views))
    data = b"".join(bytes(memoryview(v).cast("B")) if len(v) else b"" for v in views)
    assert len(data) == length
    least, most = there.bounds
    assert least <= length <= most
    there.buffer(length)[:] = np.frombuffer(data, np.uint8)
    there.unpack(length)
    return there.arrays, length


@LAW
@given(values=arrays(), packing=st.sampled_from(WAYS))
def test_packed_arrays_round_trip(values, packing):
    got, _ = carried(values, packing)
    for x, y in zip(values, got, strict=True):
        halved = "bfloat16" in packing.how and x.dtype == np.float32
        wanted = x.astype(ml_dtypes.bfloat16) if halved else x
        np.testing.assert_array_equal(np.asarray(y, x.dtype), np.asarray(wanted, x.dtype))


def test_zeros_are_compressed_and_noise_is_sent_uncompressed():
    noise = np.random.default_rng(0).bytes(10_000)
    assert carried([np.zeros(10_000, np.uint8)], WAYS[1])[1] < 200
    assert carried([np.frombuffer(noise, np.uint8)], WAYS[1])[1] == 10_000


def test_small_messages_are_sent_uncompressed():
    assert carried([np.zeros(100, np.float32)], Packed(("bfloat16", "lz4")))[1] == 400


@LAW
@given(data=st.binary(min_size=1, max_size=99))
def test_noise_is_rejected_or_fills_exactly_the_buffer(data):
    codec = Codec([((100,), np.dtype("uint8"))], WAYS[1])
    codec.buffer(len(data))[:] = np.frombuffer(data, np.uint8)
    with suppress(ProtocolError):
        codec.unpack(len(data))
    assert codec.arrays[0].nbytes == 100


def test_unavailable_packings_are_rejected():
    with pytest.raises(shoal.ShoalError, match="can't be packed by `zip`"):
        Packed(("zip",))


def test_bytes_are_added_up():
    assert total([Sent(1, 10, 4), Sent(2, 20, 5)]) == Sent(3, 30, 9)
    assert total([]) == Sent()
    assert Sent(3, 30, 9).saved == 21
