"""Random bits lowered here equal JAX's own."""

import jax
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

import shoal.runtime.execution.threefry  # noqa: F401  registers what is tested

ONES = 0xFFFFFFFF
# Known answers of Salmon et al.: key, counter, bits.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "bits"), KNOWN)
def test_bits_are_those_of_the_paper(key, counter, bits):
    words = [np.uint32([x]) for x in (*key, *counter)]
    found = jax.jit(threefry2x32_p.bind)(*words)
    assert [int(x[0]) for x in found] == list(bits)
