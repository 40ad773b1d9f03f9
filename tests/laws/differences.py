"""The difference of two arrays, for tests."""

import numpy as np

from shoal.runtime.debug.verify import as_numbers


def difference(a, b):
    """The largest difference of two arrays, relative for values larger than 1."""
    x, y = as_numbers(a), as_numbers(b)
    if not x.size:
        return 0.0
    same_nan = np.isnan(x) & np.isnan(y)
    gap = np.where(same_nan | (x == y), 0.0, np.abs(x - y) / np.maximum(1.0, np.abs(y)))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap)))
