"""Compares two runs of a loop: the state relative to its change, the metrics to their size.

An optimiser moves a parameter of size 1 by 0.0003 a tick: relative to the parameter, an update that
is completely wrong is a small difference. So carried values are compared relative to their change
since the start, up to floating-point resolution. Metrics have no initial value, and are compared
relative to their size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ULPS = 4  # units in the last place that a different order of additions may cost


def carried_difference(start: Any, got: Any, wanted: Any) -> float:
    """The largest difference of an array, in units of the largest change from `start` to `wanted`.

    Differences within floating-point resolution don't count. Keys, integers and booleans have to
    be equal.
    """
    if is_discrete(wanted):
        return _discrete(got, wanted)
    before, x, y = as_numbers(start), as_numbers(got), as_numbers(wanted)
    size = np.maximum(np.abs(before), np.abs(y))
    return _excess(x, y, ULPS * resolution(wanted) * size, _largest(y - before))


def shown_difference(got: Any, wanted: Any) -> float:
    """The largest difference of a metric over all ticks, in units of its largest value.

    Differences within floating-point resolution, at size 1 for smaller numbers, don't count: a mean
    of values that cancel out is pure rounding.
    """
    if is_discrete(wanted):
        return _discrete(got, wanted)
    x, y = as_numbers(got), as_numbers(wanted)
    return _excess(x, y, ULPS * resolution(wanted) * np.maximum(1.0, np.abs(y)), _largest(y))


def _excess(x: np.ndarray, y: np.ndarray, allowed: np.ndarray, unit: float) -> float:
    """The distance of `x` and `y` beyond `allowed`, in `unit`s; NaNs and infinities are equal."""
    if x.shape != y.shape:
        return float("inf")
    with np.errstate(invalid="ignore", over="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        gap = np.where(same, 0.0, np.abs(x - y))
        gap = np.where(np.isnan(gap), np.inf, gap)
        rounding = np.where(np.isfinite(allowed), allowed, 0.0)
        most = _largest_of(np.where(gap > rounding, gap, 0.0))
    if not most:
        return 0.0
    return most / unit if unit else float("inf")


def _discrete(got: Any, wanted: Any) -> float:
    """0 if two integer arrays are equal, else their largest difference."""
    x, y = raw_numbers(got), raw_numbers(wanted)
    if x.shape == y.shape and np.array_equal(x, y):
        return 0.0
    return max(1.0, _excess(as_numbers(got), as_numbers(wanted), np.zeros(()), 1.0))


def _largest(x: np.ndarray) -> float:
    """The largest finite absolute value of an array."""
    return _largest_of(np.where(np.isfinite(x), np.abs(x), 0.0))


def _largest_of(x: np.ndarray) -> float:
    return float(np.max(x)) if x.size else 0.0


def is_discrete(x: Any) -> bool:
    """Whether an array holds keys, integers or booleans."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def resolution(x: Any) -> float:
    """The machine epsilon of an array's type."""
    return float(jnp.finfo(x.dtype).eps)


def raw_numbers(x: Any) -> np.ndarray:
    """An array, or the key data of PRNG keys, in NumPy."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def as_numbers(x: Any) -> np.ndarray:
    """An array, or the key data of PRNG keys, as float64; complex numbers by their parts."""
    raw = raw_numbers(x)
    if raw.dtype.kind == "c":
        return np.stack([np.real(raw), np.imag(raw)]).astype(np.float64)
    return raw.astype(np.float64)
