"""Lowers JAX's threefry2x32 on CPUs without the loop that JAX emits there.

JAX emits threefry2x32 on CPUs as a loop of five turns, about 260 small operations for each
environment step; unrolled, XLA fuses it into one (a third of the time of collecting with few
environments, see benchmarks/README.md). The bits are the same.

From JAX 0.11 on, XLA also duplicates it into each operation that uses its bits, through chains of
split keys: programs with many splits took minutes to compile (a first state over 100 s, not 3).
An optimization barrier prevents that; with 0.10 it would cost some 7 % of collecting with 8
environments.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)
_COPIES = jax.__version_info__ >= (0, 11)


def threefry2x32(key1: Any, key2: Any, x1: Any, x2: Any) -> tuple[Any, Any]:
    """Five groups of four rounds of Threefry-2x32 (Salmon et al., 2011)."""
    keys = key1, key2, key1 ^ key2 ^ _PARITY
    x1, x2 = x1 + key1, x2 + key2
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x1 = x1 + x2
            left, right = np.uint32(rotation), np.uint32(32 - rotation)
            x2 = ((x2 << left) | (x2 >> right)) ^ x1
        x1 = x1 + keys[(group + 1) % 3]
        x2 = x2 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return lax.optimization_barrier((x1, x2)) if _COPIES else (x1, x2)


mlir.register_lowering(
    threefry2x32_p, mlir.lower_fun(threefry2x32, multiple_results=True), platform="cpu"
)
