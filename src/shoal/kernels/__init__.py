"""Kernels from the graph: parts of a program that Pallas runs on a GPU in one launch each."""

from shoal.kernels import products  # noqa: F401  registers the rule for matrix products
from shoal.kernels.rewrite import Part, launch_on, mode, with_kernels

__all__ = ["Part", "launch_on", "mode", "with_kernels"]
