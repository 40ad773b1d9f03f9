"""Kernels from the graph: parts of a program that a GPU runs in one launch each.

Nothing here is imported that makes kernels until one is to be made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.kernels.setting import VARIABLE, Part, Report, launch_on, mode

__all__ = ["VARIABLE", "Part", "launch_on", "mode", "with_kernels"]


def with_kernels(
    work: Callable[..., Any], devices: Sequence[Any], report: Report = lambda part: None
) -> Callable[..., Any]:
    """`work`, which is about to be compiled, with kernels where these devices can run them."""
    launch = launch_on(devices)
    if launch is None:
        return work
    from shoal.kernels.rewrite import rewritten

    return rewritten(work, launch, report)
