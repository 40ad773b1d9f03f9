"""Gradients and outputs of many samples, in blocks small enough for a CPU's cache."""

from collections.abc import Callable
from typing import Any

import jax

from shoal.tracing.blocks import in_blocks

# At 64-wide layers the activations of a block fit the cache; measured in benchmarks/. In much
# smaller blocks the matrix products themselves become slow. Of images fewer fit.
LIGHT, HEAVY = (128, 512), (16, 32)
HEAVY_BYTES = 4096  # of a sample


def grad_in_blocks(loss: Callable[..., Any], params: Any, batch: Any) -> tuple[Any, Any]:
    """The gradient of `loss(params, batch)` and what else it returns.

    Where all of it is a mean over samples it is taken, on a CPU, over blocks of samples one after
    the other, which is the same up to rounding; otherwise at once.
    """
    return in_blocks(jax.grad(loss, has_aux=True), params, batch, bounds(batch))


def map_in_blocks(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """What `function` makes of each sample of `x`; on a CPU, of some at a time where it is big."""
    if bounds(x) == LIGHT:
        return function(x)
    return in_blocks(lambda _, x: function(x), (), x, bounds(x))


def bounds(batch: Any) -> tuple[int, int]:
    """The smallest and the largest block that is fit for samples like those of `batch`."""
    leaves = jax.tree.leaves(batch)
    heavy = sum(leaf.nbytes for leaf in leaves) > HEAVY_BYTES * leaves[0].shape[0]
    return HEAVY if heavy else LIGHT
