"""Gradients of a mean over many samples, in blocks small enough for a CPU's cache."""

from collections.abc import Callable
from typing import Any

import jax

BLOCK = 512  # at 64-wide layers a block's activations fit the cache; measured in benchmarks/


def grad_in_blocks(loss: Callable[..., Any], params: Any, batch: Any) -> tuple[Any, Any]:
    """The gradient of `loss(params, batch)` and what else it returns.

    `loss` must be a mean over samples, as must be all it returns. On a CPU it is taken over blocks
    of samples one after the other, which is the same up to rounding; elsewhere at once.
    """
    grad = jax.grad(loss, has_aux=True)
    samples = jax.tree.leaves(batch)[0].shape[0]
    if samples <= BLOCK or samples % BLOCK:
        return grad(params, batch)

    def in_blocks(params: Any, batch: Any) -> Any:
        blocks = jax.tree.map(lambda x: x.reshape(-1, BLOCK, *x.shape[1:]), batch)

        def add(total: Any, block: Any) -> tuple[Any, None]:
            return jax.tree.map(jax.numpy.add, total, grad(params, block)), None

        spec = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], blocks))
        zeros = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), spec)
        total, _ = jax.lax.scan(add, zeros, blocks)
        return jax.tree.map(lambda x: x * (BLOCK / samples), total)

    return jax.lax.platform_dependent(params, batch, cpu=in_blocks, default=grad)
