"""The convolutional network equals XLA's convolutions and is initialised orthogonally."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shoal.envs import Box, Dict
from shoal.rl.conv import LAYERS, fold_image, init_nature, is_image, nature

KEY = jax.random.PRNGKey(0)


def image(*shape):
    return Box(0.0, 255.0, shape, "uint8")


def plain(net, x):
    """The same network with XLA's convolutions; kernels are reassembled from unrolled windows."""
    x = x / 255
    for layer, (filters, window, stride) in zip(net.convolutions, LAYERS, strict=True):
        blocks, channels = window // stride, x.shape[-1]
        shape = (blocks, blocks, stride, stride, channels, filters)
        kernel = layer.weight.reshape(shape).transpose(0, 2, 1, 3, 4, 5)
        kernel = kernel.reshape(window, window, channels, filters)
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (stride,) * 2, "VALID", dimension_numbers=numbers)
        x = jax.nn.relu(x + layer.bias)
    return jax.nn.relu(x.reshape(len(x), -1) @ net.dense.weight + net.dense.bias)


@pytest.mark.parametrize("shape", [(44, 40, 4), (50, 37, 3)])
def test_the_network_and_its_gradient_are_those_of_convolutions(shape):
    net = init_nature(KEY, image(*shape))
    x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, *shape)), jnp.uint8)

    def seen_and_slope(see):
        seen, pull = jax.vjp(see, net)
        return seen, pull(jnp.cos(seen))[0]

    seen, ours = jax.jit(lambda: seen_and_slope(lambda net: nature(net, fold_image(x))))()
    expected, theirs = jax.jit(lambda: seen_and_slope(lambda net: plain(net, x)))()
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), ours, theirs)


def test_channels_may_come_first_or_last():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 4, 84, 84)), jnp.uint8)
    folded = fold_image(x)
    assert folded.shape == (2, 21, 21, 64)
    assert folded.dtype == jnp.uint8
    np.testing.assert_array_equal(folded, fold_image(jnp.moveaxis(x, 1, -1)))
    shapes = [
        jax.eval_shape(lambda shape=shape: init_nature(KEY, image(*shape)))
        for shape in ((4, 84, 84), (84, 84, 4))
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0].dense.weight.shape == (7 * 7 * 64, 512)


def test_axes_before_the_image_are_a_batch():
    net = init_nature(KEY, image(40, 40, 3))
    x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 3, 40, 40, 3)), jnp.uint8)
    see = jax.jit(lambda x: nature(net, fold_image(x)))
    many, each = see(x), np.stack([[see(one) for one in row] for row in x])
    np.testing.assert_allclose(many, each, rtol=1e-5, atol=1e-5)


def test_weights_start_orthogonal():
    for layer in init_nature(KEY, image(4, 36, 36)).convolutions:
        gram = layer.weight.T @ layer.weight
        np.testing.assert_allclose(gram, 2 * np.eye(len(gram)), atol=1e-4)


def test_only_large_images_of_bytes_are_images():
    assert is_image(image(4, 84, 84))
    assert is_image(image(210, 160, 3))
    for space in (image(7, 7, 3), image(84, 84), Box(0.0, 1.0, (84, 84, 3)), Dict(())):
        assert not is_image(space)
