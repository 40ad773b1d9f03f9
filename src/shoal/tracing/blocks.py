"""Functions of many samples in blocks that fit a CPU's cache; elsewhere at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from shoal.graph.layout import REPLICATED, Partial, Sharded
from shoal.tracing.flow import block_layouts
from shoal.tracing.local import Held, Local, Share
from shoal.tracing.rowwise import at_once, in_blocks_p, take_apart, with_consts_first

Bounds = tuple[int, int]


def in_blocks(function: Callable[..., Any], shared: Any, batch: Any, bounds: Bounds) -> Any:
    """`function(shared, batch)`, where `batch` has samples along its leaves' first axes.

    What it returns that is a sum or mean over samples, or made sample by sample, is computed some
    samples at a time on a CPU, which is the same up to rounding. If it returns anything else too,
    it is called once with all samples. `bounds` are the fewest and the most samples of a block.
    """
    leaves, tree = jax.tree.flatten((shared, batch))
    count = len(jax.tree.leaves(shared))
    closed, shape = jax.make_jaxpr(
        lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True
    )(*leaves)
    consts = closed.consts
    first, samples = len(consts) + count, leaves[count].shape[0]
    whole = with_consts_first(closed)
    params = dict(jaxpr=whole, shared=first, samples=samples, bounds=bounds)
    made = in_blocks_p.bind(*consts, *leaves, **params)
    return jax.tree.unflatten(jax.tree.structure(shape), made)


def block_size(samples: int, bounds: Bounds) -> int:
    """The largest block that `samples` divide into evenly, or all of them if none is fit."""
    smallest, largest = bounds
    fit = (size for size in range(largest, smallest - 1, -1) if samples % size == 0)
    return samples if samples <= largest else next(fit, samples)


def _run(*args: Any, jaxpr: Any, shared: int, samples: int, bounds: Bounds) -> list[Any]:
    """All results, for however many of the samples there are: a replica has its own."""
    here = args[shared].shape[0]
    size = block_size(here, bounds)
    outs = block_layouts(jaxpr, shared, samples)
    if outs is None or (size == here == samples):
        return at_once(*args, jaxpr=jaxpr)

    def some(params: Any, block: Any) -> list[Any]:
        """What a block of samples contributes."""
        rows = block[0].shape[0]
        share = Share(samples, rows, samples // rows, _unknown)
        held = [*map(Held, params), *(Held(x, Sharded(0)) for x in block)]
        return [x.array for x in Local(share).jaxpr(jaxpr, held)]

    def by_blocks(params: Any, batch: Any) -> list[Any]:
        blocks = [x.reshape(-1, size, *x.shape[1:]) for x in batch]

        def add(totals: Any, block: Any) -> tuple[Any, Any]:
            made = some(params, block)
            sums = [x for x, out in zip(made, outs, strict=True) if out == Partial()]
            rows = [x for x, out in zip(made, outs, strict=True) if out == Sharded(0)]
            return [a + b for a, b in zip(totals, sums, strict=True)], rows

        specs = jax.eval_shape(some, params, [x[0] for x in blocks])
        zeros = [
            jnp.zeros(s.shape, s.dtype)
            for s, out in zip(specs, outs, strict=True)
            if out == Partial()
        ]
        totals, rows = lax.scan(add, zeros, blocks)
        found, made = iter(totals), (x.reshape(here, *x.shape[2:]) for x in rows)
        same = iter(some(params, [x[0] for x in blocks])) if REPLICATED in outs else iter(())
        return [_next(out, found, made, same) for out in outs]

    def together(params: Any, batch: Any) -> list[Any]:
        return at_once(*params, *batch, jaxpr=jaxpr) if here == samples else some(params, batch)

    halves = list(args[:shared]), list(args[shared:])
    if size == here:
        return together(*halves)
    return lax.platform_dependent(*halves, cpu=by_blocks, default=together)


def _batched(*args: Any, jaxpr: Any, shared: int, samples: int, bounds: Bounds) -> list[Any]:
    """In the loop itself all samples at once; of a share, as many replicas side by side."""
    if args[shared].shape[0] == samples:
        return at_once(*args, jaxpr=jaxpr)
    return _run(*args, jaxpr=jaxpr, shared=shared, samples=samples, bounds=bounds)


def _next(out: Any, totals: Any, rows: Any, same: Any) -> Any:
    """The next result of its kind; what all blocks have the same is taken from one of them."""
    anyway = next(same, None)
    return next(totals) if out == Partial() else next(rows) if out == Sharded(0) else anyway


def _unknown() -> Any:
    raise AssertionError("no block knows which samples it has")


@in_blocks_p.def_abstract_eval
def _spec(*args: Any, jaxpr: Any, shared: int, samples: int, bounds: Bounds) -> list[Any]:
    here = args[shared].shape[0]
    outs = jaxpr.out_avals
    if here == samples:
        return list(outs)
    found = block_layouts(jaxpr, shared, samples)
    assert found is not None, "only what can be divided is run on a share"
    return [
        x.update(shape=(here, *x.shape[1:])) if layout == Sharded(0) else x
        for x, layout in zip(outs, found, strict=True)
    ]


in_blocks_p.def_impl(jax.jit(_run, static_argnames=("jaxpr", "shared", "samples", "bounds")))
mlir.register_lowering(in_blocks_p, mlir.lower_fun(_run, multiple_results=True))
take_apart(in_blocks_p, at_once, _batched)
