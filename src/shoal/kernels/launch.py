"""Calling a generated kernel: on a GPU by Triton, anywhere else in Pallas' interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from shoal.errors import first_line
from shoal.kernels.setting import Launch
from shoal.kernels.tiles import IneligibleError


def launched(
    launch: Launch,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    given: Sequence[Any],
    outs: Sequence[jax.ShapeDtypeStruct],
) -> list[Any]:
    """Run a grid of programs on arrays; raises where it can't be compiled."""
    if launch.interpret:
        return list(_call(launch, kernel, grid, tuple(outs))(*given))
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    try:
        call = _call(launch, kernel, grid, tuple(outs))
        lowered = jax.jit(call).trace(*specs).lower(lowering_platforms=("cuda",))
        if launch.is_tried:
            lowered.compile()
    except IneligibleError:
        raise
    except Exception as error:
        raise IneligibleError(
            f"Triton refuses it ({type(error).__name__}: {first_line(error)})"
        ) from error
    return list(call(*given))


def _call(
    launch: Launch,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    outs: tuple[jax.ShapeDtypeStruct, ...],
) -> Callable[..., Any]:
    if launch.interpret:
        return pl.pallas_call(kernel, outs, grid=grid, interpret=True, name=launch.name)
    from jax.experimental.pallas import triton

    options = triton.CompilerParams(num_warps=launch.warps, num_stages=1)
    return pl.pallas_call(kernel, outs, grid=grid, compiler_params=options, name=launch.name)
