"""Torsos match their papers, are initialised orthogonally, and reject unsuitable spaces."""

from dataclasses import fields
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from shoal.envs import Box, Dict, Discrete
from shoal.errors import SettingError, UnknownNameError
from shoal.rl.actor_critic import init_actor_critic, policy_and_value
from shoal.rl.nets import Dense, computed_in
from shoal.rl.observations import as_features, init_obs_moments
from shoal.rl.torso import SECTIONS, as_image, choose_torso, embed, init_torso, pool

KEY = jax.random.PRNGKey(0)
VECTOR, PIXELS = Box(-1.0, 1.0, (4,)), Box(0.0, 255.0, (36, 37, 3), "uint8")
SMALL = Box(0.0, 1.0, (10, 10, 4))
SEEN = {"resnet": PIXELS, "minatar": SMALL, "nature": PIXELS, "mlp": VECTOR}


@cache
def made(kind, space):
    return jax.jit(lambda: init_torso(KEY, space, kind, (8,)))()[0]


def shown(space, batch=2):
    high = 256 if space.dtype == "uint8" else 2
    drawn = np.random.default_rng(0).integers(0, high, (batch, *space.shape))
    return jnp.asarray(drawn, space.dtype)


def convolution(layer, x, padding):
    """XLA's convolution, with its kernel reassembled from the windows."""
    kernel = layer.weight.reshape(3, 3, x.shape[-1], -1)
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=numbers)
    return y + layer.bias


def largest(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def plain_resnet(net, x):
    """Figure 3 of Espeholt et al. (2018), right."""
    x = x / 255
    for section in net.sections:
        x = largest(convolution(section.first, x, "SAME"))
        for first, second in section.blocks:
            inner = convolution(first, jax.nn.relu(x), "SAME")
            x = x + convolution(second, jax.nn.relu(inner), "SAME")
    return plain_dense(net.dense, jax.nn.relu(x))


def plain_minatar(net, x):
    """Young and Tian (2019), section 3: 16 filters of 3 × 3, then 128 units."""
    return plain_dense(net.dense, jax.nn.relu(convolution(net.convolution, x, "VALID")))


def plain_dense(layer, x):
    return jax.nn.relu(x.reshape(len(x), -1) @ layer.weight + layer.bias)


@pytest.mark.parametrize(
    ("kind", "plain", "width"), [("resnet", plain_resnet, 256), ("minatar", plain_minatar, 128)]
)
def test_a_torso_and_its_gradient_are_those_of_convolutions(kind, plain, width):
    space = SEEN[kind]
    net, x = made(kind, space), shown(space)

    def seen_and_slope(see):
        seen, pull = jax.vjp(see, net)
        return seen, pull(jnp.cos(seen))[0]

    seen, ours = jax.jit(lambda: seen_and_slope(lambda net: embed(net, as_image(kind, x))))()
    expected, theirs = jax.jit(lambda: seen_and_slope(lambda net: plain(net, x)))()
    assert seen.shape == (2, width)
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-3), ours, theirs)


def test_the_resnet_has_the_fifteen_convolutions_of_its_paper():
    net = jax.eval_shape(lambda: init_torso(KEY, PIXELS, "resnet", ())[0])
    filters = [[layer.bias.shape[0] for layer in layers(section)] for section in net.sections]
    assert filters == [[wide] * 5 for wide in SECTIONS] == [[16] * 5, [32] * 5, [32] * 5]
    assert net.dense.weight.shape == (5 * 5 * 32, 256)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9))
def test_the_pool_is_the_largest_of_every_window(height, width):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, height, width, 3)), jnp.float32)
    np.testing.assert_array_equal(pool(x), largest(x))


@pytest.mark.parametrize("kind", ["resnet", "minatar"])
def test_layers_start_orthogonal_and_axes_before_the_image_are_a_batch(kind):
    net, x = made(kind, SEEN[kind]), as_image(kind, shown(SEEN[kind]))
    for layer in layers(net):
        tall = layer.weight if layer.weight.shape[0] >= layer.weight.shape[1] else layer.weight.T
        np.testing.assert_allclose(tall.T @ tall, 2 * np.eye(tall.shape[1]), atol=1e-3)
    see = jax.jit(embed)
    each = np.stack([see(net, one) for one in x])
    np.testing.assert_allclose(see(net, x[None])[0], each, rtol=1e-4, atol=1e-4)


def layers(net):
    return jax.tree.leaves(net, is_leaf=lambda x: isinstance(x, Dense))


# The kind of torso


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (VECTOR, "mlp"),
        (Dict((("a", VECTOR),)), "mlp"),
        (Box(0.0, 255.0, (4, 84, 84), "uint8"), "nature"),
        (SMALL, "minatar"),
        (Box(0.0, 255.0, (7, 7, 3), "uint8"), "mlp"),
        (Box(0.0, 1.0, (10, 5)), "mlp"),
    ],
)
def test_auto_chooses_by_the_observation_space(space, kind):
    assert choose_torso(space, "auto") == kind


def test_an_unsuitable_or_unknown_torso_is_rejected_with_a_suitable_one():
    with pytest.raises(SettingError, match="`nature` sees images of 36 × 36") as caught:
        choose_torso(SMALL, "nature")
    assert "torso=minatar" in caught.value.fix
    with pytest.raises(UnknownNameError, match="Did you mean `resnet`"):
        choose_torso(PIXELS, "resnett")


@pytest.mark.parametrize("kind", SEEN)
def test_every_torso_serves_an_actor_and_a_critic(kind):
    space = SEEN[kind]

    def act(x):
        params = init_actor_critic((KEY, KEY), (space, Discrete(3)), (8,), kind)
        return policy_and_value(params, as_features(init_obs_moments(space, kind), x))

    dist, value = jax.eval_shape(act, shown(space))
    assert (dist.logits.shape, value.shape) == ((2, 3), (2,))
    assert dist.logits.dtype == value.dtype == jnp.float32


# The compute dtype


@pytest.mark.parametrize("kind", ["mlp", "minatar"])
def test_bfloat16_rounds_products_and_leaves_parameters_slopes_and_results_in_float32(kind):
    space, compute = SEEN[kind], {}
    full = jax.jit(lambda: init_actor_critic((KEY, KEY), (space, Discrete(3)), (8,), kind))()
    x = as_features(init_obs_moments(space, kind), shown(space, 8) + 0.1)
    for name in ("float32", "bfloat16"):
        params = computed_in(full, name)
        value, slope = jax.jit(
            jax.value_and_grad(lambda p: jnp.sum(policy_and_value(p, x)[1] ** 2))
        )(params)
        assert jax.tree.structure(slope) == jax.tree.structure(params)
        assert {leaf.dtype for leaf in jax.tree.leaves((params, slope, value))} == {
            jnp.dtype(jnp.float32)
        }
        compute[name] = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves((value, slope))])
        text = str(jax.make_jaxpr(lambda p: policy_and_value(p, x))(params))
        assert ("bf16" in text) == (name == "bfloat16")
    exact, rounded = compute.values()
    assert 0 < np.max(np.abs(exact - rounded)) < 0.05 * np.max(np.abs(exact))


def test_the_compute_dtype_is_one_of_two():
    with pytest.raises(UnknownNameError, match="`float16`"):
        computed_in((), "float16")
    assert [f.name for f in fields(Dense)] == ["weight", "bias", "norm", "compute", "activation"]
