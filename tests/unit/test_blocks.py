"""A gradient in blocks is the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.rl.blocks import LARGEST, SMALLEST, block_size, grad_in_blocks


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300_000))
def test_blocks_are_of_one_size_and_fit(samples):
    size = block_size(samples)
    assert samples % size == 0
    assert size == samples or SMALLEST <= size <= LARGEST
    assert size == samples if samples <= LARGEST else True


@pytest.mark.parametrize(("samples", "size"), [(512, 512), (2048, 512), (32_000, 500), (521, 521)])
def test_blocks_are_as_large_as_fits(samples, size):
    assert block_size(samples) == size


@pytest.mark.parametrize("samples", [100, 1024, 1500, 521])
def test_a_gradient_in_blocks_is_that_of_the_whole(samples):
    rng = np.random.default_rng(0)
    params = {"w": jnp.array(rng.normal(size=3), jnp.float32), "b": jnp.float32(0.5)}
    batch = tuple(jnp.array(rng.normal(size=s), jnp.float32) for s in ((samples, 3), (samples,)))

    def loss(params, batch):
        x, y = batch
        error = jnp.tanh(x @ params["w"]) + params["b"] - y
        return jnp.mean(error**2), {"mean_error": jnp.mean(error)}

    blocks = jax.jit(lambda p, b: grad_in_blocks(loss, p, b))(params, batch)
    whole = jax.grad(loss, has_aux=True)(params, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), blocks, whole)
