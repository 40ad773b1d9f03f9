"""A host stage of arrays in small types, in a module that doesn't load JAX."""

import sys

import numpy as np


def move_in_python(x, w):
    """Half of `w` further; a worker that does nothing else has no use for JAX."""
    spec = sys.modules["__main__"].__spec__
    if (
        spec is not None
        and spec.name == "shoal.runtime.cluster.worker_process"
        and "jax" in sys.modules
    ):
        raise AssertionError("a worker that steps Python alone has loaded JAX")
    return (x.astype(np.float32) + 0.5 * w.astype(np.float32)).astype(x.dtype)
