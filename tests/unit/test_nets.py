"""Networks equal their matrix products and are initialised orthogonally."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.envs import Box, Discrete
from shoal.rl.distributions import Categorical, Normal
from shoal.rl.nets import Dense, dense, init_mlp, mlp
from shoal.rl.policy import distribution, init_actor

KEY = jax.random.PRNGKey(0)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_weights_start_orthogonal_times_their_scale(sizes):
    layers = init_mlp(KEY, sizes, last_scale=0.5)
    assert [layer.weight.shape for layer in layers] == list(pairwise(sizes))
    for i, layer in enumerate(layers):
        scale = 0.5 if i == len(layers) - 1 else 2**0.5
        tall = layer.weight if layer.weight.shape[0] >= layer.weight.shape[1] else layer.weight.T
        np.testing.assert_allclose(tall.T @ tall, scale**2 * np.eye(tall.shape[1]), atol=1e-5)
        assert not np.any(layer.bias)


def test_mlp_is_products_with_tanh_between_them():
    layers = init_mlp(KEY, (3, 5, 4, 2))
    x = expected = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    for layer in layers[:-1]:
        expected = np.tanh(expected @ np.asarray(layer.weight) + np.asarray(layer.bias))
    expected = expected @ np.asarray(layers[-1].weight) + np.asarray(layers[-1].bias)
    np.testing.assert_allclose(mlp(layers, jnp.array(x)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outputs", [1, 3, 6])
@pytest.mark.parametrize("batch", [(), (5,), (4, 5)])
def test_the_gradient_of_a_layer_is_that_of_its_formula(batch, outputs):
    rng = np.random.default_rng(0)
    weight, bias, x, seen = (
        jnp.array(rng.normal(size=shape), jnp.float32)
        for shape in ((7, outputs), (outputs,), (*batch, 7), (*batch, outputs))
    )

    def slopes(layer):
        return jax.grad(lambda *a: jnp.sum(seen * layer(*a)), argnums=(0, 1, 2))(weight, bias, x)

    ours = slopes(lambda weight, bias, x: dense(Dense(weight, bias), x))
    plain = slopes(lambda weight, bias, x: x @ weight + bias)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, plain)


def test_layers_differ():
    first, second, _ = init_mlp(KEY, (4, 4, 4, 4))
    assert not np.allclose(first.weight, second.weight)


@pytest.mark.parametrize("space", [Discrete(3), Box(-1.0, 1.0, (3,))])
def test_an_actor_matches_its_space_and_starts_nearly_uniform(space):
    actor = init_actor(KEY, (4, 16), space)
    dist = distribution(actor, jnp.ones(4))
    match dist:
        case Categorical(logits):
            assert isinstance(space, Discrete)
            np.testing.assert_allclose(jax.nn.softmax(logits), np.full(3, 1 / 3), atol=0.02)
        case Normal(mean, log_std):
            assert isinstance(space, Box)
            np.testing.assert_allclose(mean, np.zeros(3), atol=0.05)
            np.testing.assert_array_equal(log_std, np.zeros(3))
