"""Gradients of a mean over many samples, in blocks small enough for a CPU's cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# At 64-wide layers the activations of a block fit the cache; measured in benchmarks/. In much
# smaller blocks the matrix products themselves become slow. Of images fewer fit.
LIGHT, HEAVY = (128, 512), (16, 32)
HEAVY_BYTES = 4096  # of a sample


def grad_in_blocks(loss: Callable[..., Any], params: Any, batch: Any) -> tuple[Any, Any]:
    """The gradient of `loss(params, batch)` and what else it returns.

    `loss` must be a mean over samples, as must be all it returns. On a CPU it is taken over blocks
    of samples one after the other, which is the same up to rounding; elsewhere at once.
    """
    grad = jax.grad(loss, has_aux=True)
    samples = jax.tree.leaves(batch)[0].shape[0]
    size = block_size(samples, bounds(batch))
    if size == samples:
        return grad(params, batch)

    def in_blocks(params: Any, batch: Any) -> Any:
        blocks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)

        def add(total: Any, block: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(params, block)), None

        spec = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], blocks))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)
        total, _ = lax.scan(add, zeros, blocks)
        return jax.tree.map(lambda x: x * (size / samples), total)

    return lax.platform_dependent(params, batch, cpu=in_blocks, default=grad)


def map_in_blocks(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """What `function` makes of each sample of `x`; on a CPU, of some at a time where it is big."""
    samples = x.shape[0]
    size = block_size(samples, bounds(x))
    if size == samples or bounds(x) == LIGHT:
        return function(x)

    def in_blocks(x: jax.Array) -> jax.Array:
        made = lax.map(function, x.reshape(-1, size, *x.shape[1:]))
        return made.reshape(samples, *made.shape[2:])

    return lax.platform_dependent(x, cpu=in_blocks, default=function)


def bounds(batch: Any) -> tuple[int, int]:
    """The smallest and the largest block that is fit for samples like those of `batch`."""
    leaves = jax.tree.leaves(batch)
    heavy = sum(leaf.nbytes for leaf in leaves) > HEAVY_BYTES * leaves[0].shape[0]
    return HEAVY if heavy else LIGHT


def block_size(samples: int, bounds: tuple[int, int] = LIGHT) -> int:
    """The largest block that `samples` divide into evenly, or all of them if none is fit."""
    smallest, largest = bounds
    fit = (size for size in range(largest, smallest - 1, -1) if samples % size == 0)
    return samples if samples <= largest else next(fit, samples)
