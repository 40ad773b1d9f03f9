"""Losses of action values equal plain NumPy, and targets get no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.rl import q_values
from shoal.rl.q_values import Categorical, Expected, Quantile

LAW = settings(max_examples=40, deadline=None)
ATOMS = 7
FORMS = [Expected(), Categorical(-3.0, 3.0, ATOMS), Quantile(ATOMS)]
numbers = st.floats(-4, 4, width=32)
atoms = hnp.arrays(np.float32, ATOMS, elements=numbers)
discounts = st.sampled_from([0.0, 0.5, 0.970299, 0.99])
td_loss = jax.jit(q_values.td_loss, static_argnums=0)
project = jax.jit(q_values.project, static_argnums=0)
unscale = jax.jit(q_values.unscale)
rescale = jax.jit(q_values.rescale)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def plain_huber(x):
    return 0.5 * x * x if abs(x) <= 1 else abs(x) - 0.5


def plain_projection(form, reward, discount, chance):
    """Project each return onto the two nearest atoms."""
    step, out = (form.high - form.low) / (form.atoms - 1), np.zeros(form.atoms)
    for j in range(form.atoms):
        z = np.clip(reward + discount * (form.low + j * step), form.low, form.high)
        b = (z - form.low) / step
        low, high = int(np.floor(b)), int(np.ceil(b))
        if low == high:
            out[low] += chance[j]
        else:
            out[low] += chance[j] * (high - b)
            out[high] += chance[j] * (b - low)
    return out


def plain_loss(form, x, reward, discount, y):
    match form:
        case Expected():
            error = reward + discount * y[0] - x[0]
            return plain_huber(error), abs(error)
        case Categorical():
            target = plain_projection(form, reward, discount, softmax(y))
            loss = -(target * np.log(softmax(x))).sum()
            some = target[target > 0]
            return loss, loss + (some * np.log(some)).sum()
    target, total = reward + discount * y, 0.0
    for i in range(len(x)):
        share = (i + 0.5) / len(x)
        for j in range(len(y)):
            error = target[j] - x[i]
            total += abs(share - (error < 0)) * plain_huber(error) / len(y)
    return total, abs(target.mean() - x.mean())


@LAW
@given(st.sampled_from(FORMS), atoms, numbers, discounts, atoms)
def test_the_loss_is_the_plain_definition(form, x, reward, discount, y):
    x, y = x[: form.atoms], y[: form.atoms]
    got = td_loss(form, jnp.array(x), jnp.float32(reward), jnp.float32(discount), jnp.array(y))
    wanted = plain_loss(form, x.astype(float), reward, discount, y.astype(float))
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


@LAW
@given(atoms, numbers, discounts)
def test_a_projection_keeps_the_total_probability_and_the_mean_inside_the_support(
    x, reward, discount
):
    form, chance = FORMS[1], softmax(x)
    got = project(form, jnp.float32(reward), jnp.float32(discount), jnp.array(chance))
    np.testing.assert_allclose(got.sum(), 1, atol=1e-5)
    moved = reward + discount * np.linspace(form.low, form.high, ATOMS)
    if np.all(np.abs(moved) <= form.high):
        np.testing.assert_allclose(got @ form.support, moved @ chance, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_no_gradient_flows_to_the_target_and_a_batch_is_each_alone(form):
    x, y = jax.random.normal(jax.random.key(0), (2, 5, form.atoms))
    reward, discount = jnp.linspace(-1, 1, 5), jnp.array([0.0, 0.9, 0.9, 0.5, 0.99])

    def total(x, y):
        return td_loss(form, x, reward, discount, y)[0].sum()

    toward, to_target = jax.grad(total, (0, 1))(x, y)
    assert np.all(np.asarray(to_target) == 0)
    assert np.any(np.asarray(toward) != 0)
    each = jax.vmap(lambda *args: td_loss(form, *args))(x, reward, discount, y)
    for a, b in zip(each, td_loss(form, x, reward, discount, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_minimal_at_the_expected_return(form):
    """Gradient descent on the loss converges to a deterministic return."""
    x = jnp.zeros(form.atoms)
    grad = jax.jit(jax.grad(lambda x: td_loss(form, x, jnp.float32(2.0), jnp.float32(0), x)[0]))
    for _ in range(400):
        x = x - 0.2 * grad(x)
    np.testing.assert_allclose(q_values.mean_return(form, x), 2.0, atol=0.05)


@LAW
@given(st.floats(-1000, 1000, width=32))
def test_rescaling_is_undone_and_squashes(x):
    squashed = rescale(jnp.float32(x))
    np.testing.assert_allclose(unscale(squashed), x, rtol=1e-4, atol=1e-4)
    assert abs(squashed) <= abs(x) * 0.502 + 1e-6
