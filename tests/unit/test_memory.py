"""Memory: a whole window equals its steps one by one, and is reset at each episode's start."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UnknownNameError
from shoal.rl.memory import KINDS, init_memory, remember, start, unroll, width_of

INPUTS, WIDTH, WINDOW = 3, 8, 4
KEY = jax.random.PRNGKey(0)
MEMORIES = {kind: init_memory(KEY, kind, INPUTS, WIDTH, WINDOW) for kind in KINDS}
LAW = settings(max_examples=10, deadline=None)
EACH = pytest.mark.parametrize("kind", KINDS)
close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def window(seed, steps, rows):
    """Features and starts of episodes, any of them, over some steps."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(steps, *rows, INPUTS)).astype(np.float32)
    return jnp.array(features), jnp.array(rng.random((steps, *rows)) < 0.3)


def one_by_one(memory, state, features, fresh):
    outs = []
    for x, begins in zip(features, fresh, strict=True):
        state, out = remember(memory, state, x, begins)
        outs.append(out)
    return state, jnp.stack(outs)


whole, stepped = jax.jit(unroll), jax.jit(one_by_one)


@EACH
@LAW
@given(st.integers(0, 999), st.sampled_from([(), (2, 3)]))
def test_a_window_at_once_equals_its_steps_one_by_one(kind, seed, rows):
    memory = MEMORIES[kind]
    features, fresh = window(seed, 10, rows)
    state, _ = whole(memory, start(memory, rows), features[:5], fresh[:5])
    at_once = whole(memory, state, features[5:], fresh[5:])
    jax.tree.map(close, at_once, stepped(memory, state, features[5:], fresh[5:]))
    assert at_once[1].shape == (5, *rows, width_of(memory, INPUTS))


@EACH
def test_an_episode_is_remembered_as_if_nothing_had_been_before_it(kind):
    memory = MEMORIES[kind]
    features, _ = window(0, 6, (2,))
    fresh = jnp.zeros((6, 2), bool).at[2, 0].set(True)
    _, out = whole(memory, start(memory, (2,)), features, fresh)
    _, alone = whole(memory, start(memory, (1,)), features[2:, :1], jnp.zeros((4, 1), bool))
    close(out[2:, :1], alone)


@EACH
def test_rows_do_not_mix(kind):
    memory = MEMORIES[kind]
    features, fresh = window(1, 5, (3,))
    _, out = whole(memory, start(memory, (3,)), features, fresh)
    for row in range(3):
        _, alone = whole(memory, start(memory), features[:, row], fresh[:, row])
        close(out[:, row], alone)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_inputs_affect_later_outputs_only(kind):
    memory = MEMORIES[kind]
    features, _ = window(2, 5, ())
    nothing = jnp.zeros(5, bool)
    _, out = whole(memory, start(memory), features, nothing)
    _, other = whole(memory, start(memory), features.at[2].add(1.0), nothing)
    moved = np.abs(np.asarray(out - other)).max(axis=-1) > 1e-4
    np.testing.assert_array_equal(moved, [False, False, True, True, True])


def test_a_transformer_ignores_steps_outside_its_window():
    memory = MEMORIES["transformer"]
    features, _ = window(3, WINDOW + 2, ())
    nothing = jnp.zeros(WINDOW + 2, bool)
    _, out = whole(memory, start(memory), features, nothing)
    _, other = whole(memory, start(memory), features.at[0].add(1.0), nothing)
    moved = np.abs(np.asarray(out - other)).max(axis=-1) > 1e-4
    np.testing.assert_array_equal(moved, [True] * WINDOW + [False] * 2)


def reference_gru(memory, state, x):
    """As in Cho et al. (2014), gate by gate, the reset gate after the product."""
    wr, wz, wn = jnp.split(memory.inputs.weight, 3, axis=1)
    ur, uz, un = jnp.split(memory.state.weight, 3, axis=1)
    br, bz, bn = jnp.split(memory.inputs.bias, 3)
    cr, cz, cn = jnp.split(memory.state.bias, 3)
    r = 1 / (1 + jnp.exp(-(x @ wr + br + state @ ur + cr)))
    z = 1 / (1 + jnp.exp(-(x @ wz + bz + state @ uz + cz)))
    n = jnp.tanh(x @ wn + bn + r * (state @ un + cn))
    state = (1 - z) * n + z * state
    return state, state


def reference_lstm(memory, state, x):
    """As in Gers et al. (2000), gate by gate."""
    c, h = state
    w, u = (jnp.split(part.weight, 4, axis=1) for part in memory)
    b, d = (jnp.split(part.bias, 4) for part in memory)
    i, f, g, o = (x @ w[k] + b[k] + h @ u[k] + d[k] for k in range(4))
    sigmoid = lambda x: 1 / (1 + jnp.exp(-x))  # noqa: E731
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    h = sigmoid(o) * jnp.tanh(c)
    return (c, h), h


@pytest.mark.parametrize(("kind", "cell"), [("gru", reference_gru), ("lstm", reference_lstm)])
def test_cells_are_their_formulas_and_so_are_their_gradients(kind, cell):
    features, fresh = window(4, 6, (2,))
    weights = jnp.array(np.random.default_rng(5).normal(size=(6, 2, WIDTH)), jnp.float32)
    memory = jax.tree.map(lambda x: x + 0.1, MEMORIES[kind])

    def plain(memory, features):
        state, outs = start(memory, (2,)), []
        for x, begins in zip(features, fresh, strict=True):
            state = jax.tree.map(lambda s, b=begins: s * ~b[:, None], state)
            state, out = cell(memory, state, x)
            outs.append(out)
        return jnp.sum(weights * jnp.stack(outs))

    def ours(memory, features):
        return jnp.sum(weights * unroll(memory, start(memory, (2,)), features, fresh)[1])

    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(memory, features) for f in (ours, plain))
    jax.tree.map(partial(close, rtol=1e-3), got, wanted)


def reference_attention(memory, seen):
    """The output of a block for the last of `seen` in NumPy, head by head and score by score."""
    layer = lambda dense, x: x @ np.asarray(dense.weight) + np.asarray(dense.bias)  # noqa: E731
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    norm = lambda x: (x - x.mean()) / np.sqrt(x.var() + 1e-6)  # noqa: E731
    x = [layer(memory.embed, s) for s in seen]
    parts = [np.split(layer(memory.query_key_value, norm(e)), 3) for e in x]
    heads, size, found = memory.bias.shape[0], WIDTH // memory.bias.shape[0], []
    for head in range(heads):
        at = slice(head * size, (head + 1) * size)
        ages = range(len(x) - 1, -1, -1)
        scores = np.array([parts[-1][0][at] @ k[at] / np.sqrt(size) for _, k, _ in parts])
        scores += [memory.bias[head, age] for age in ages]
        weights = np.exp(scores) / np.exp(scores).sum()
        found.append(sum(p * v[at] for p, (_, _, v) in zip(weights, parts, strict=True)))
    last = x[-1]
    last = last + sigmoid(layer(memory.out_gate, last)) * layer(memory.out, np.concatenate(found))
    thought = layer(memory.hidden[1], np.maximum(layer(memory.hidden[0], norm(last)), 0))
    return last + sigmoid(layer(memory.hidden_gate, last)) * thought


def test_attention_is_its_formula():
    memory = MEMORIES["transformer"]
    bias = np.random.default_rng(0).normal(size=memory.bias.shape)
    memory = memory._replace(bias=jnp.array(bias, jnp.float32))
    features, _ = window(6, 7, ())
    fresh = jnp.zeros(7, bool).at[2].set(True)
    _, out = whole(memory, start(memory), features, fresh)
    seen = np.asarray(features)
    for t in range(7):
        first = max(0 if t < 2 else 2, t - WINDOW + 1)
        close(out[t], reference_attention(memory, seen[first : t + 1]), rtol=1e-3)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_each_gate_s_weights_start_orthogonal(kind):
    memory = init_memory(KEY, kind, WIDTH, WIDTH)
    for layer in memory:
        for gate in np.split(np.asarray(layer.weight), layer.weight.shape[1] // WIDTH, axis=1):
            np.testing.assert_allclose(gate.T @ gate, np.eye(WIDTH), atol=1e-5)


def test_an_unknown_kind_is_rejected():
    with pytest.raises(UnknownNameError, match="gru"):
        init_memory(KEY, "rnn", INPUTS, WIDTH)
