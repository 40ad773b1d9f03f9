"""A gradient computed in blocks equals the gradient of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.rl.blocks import HEAVY, LIGHT, bounds, grad_in_blocks, map_in_blocks
from shoal.tracing.blocks import block_size


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300_000), st.sampled_from([LIGHT, HEAVY]))
def test_blocks_are_of_one_size_and_fit(samples, bounds):
    smallest, largest = bounds
    size = block_size(samples, bounds)
    assert samples % size == 0
    assert size == samples or smallest <= size <= largest
    assert size == samples if samples <= largest else True


def test_images_are_heavy_and_mapped_in_blocks():
    images = jnp.arange(96 * 80 * 80, dtype=jnp.uint8).reshape(96, 80, 80)
    assert bounds(images) == HEAVY
    assert bounds((images[:, 0, :], images[:, 0])) == LIGHT
    double = jax.jit(lambda x: map_in_blocks(lambda x: 2.0 * x[:, 0], x))
    np.testing.assert_array_equal(double(images), 2.0 * images[:, 0])
    assert "stablehlo.while" in double.lower(images).as_text()


@pytest.mark.parametrize(("samples", "size"), [(512, 512), (2048, 512), (32_000, 500), (521, 521)])
def test_blocks_are_as_large_as_fits(samples, size):
    assert block_size(samples, LIGHT) == size


def test_a_gradient_through_a_scan_is_that_of_the_whole():
    batch = jnp.sin(jnp.arange(1024 * 3.0)).reshape(1024, 3)

    def loss(w, batch):
        turn = lambda h, x: (jnp.tanh(w * h + x), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(turn, batch[:, 0], batch.T)[0]), {}

    blocks, _ = grad_in_blocks(loss, jnp.float32(0.5), batch)
    whole, _ = jax.grad(loss, has_aux=True)(jnp.float32(0.5), batch)
    np.testing.assert_allclose(blocks, whole, rtol=1e-4)


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
