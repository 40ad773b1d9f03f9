"""Kernels from the graph: parts of a program that Pallas runs on a GPU in one launch each."""

from shoal.kernels import operations, products, randomness, reductions  # noqa: F401  their rules
from shoal.kernels.rewrite import Part, launch_on, mode, with_kernels

__all__ = ["Part", "launch_on", "mode", "with_kernels"]
