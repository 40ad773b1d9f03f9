"""Recurrent memory between observations and actions: GRU, LSTM, or windowed attention.

Memory is a plain pytree of parameters, its state one too. Features are [..., inputs], a state has
the same axes before its own, and `fresh` says where features are the first of an episode: nothing
is remembered across that. Time, where there is one, is the first axis.
"""

from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jax import lax

from shoal.errors import UnknownNameError
from shoal.rl.nets import RELU, Dense, Layers, dense, init_mlp, mlp, standardised

State = Any  # a tree of arrays; () without memory


class Gru(NamedTuple):
    """A gated recurrent unit (Cho et al., 2014), its reset gate after the product."""

    inputs: Dense  # of the reset gate, the update gate and the candidate
    state: Dense


class Lstm(NamedTuple):
    """Long short-term memory (Hochreiter & Schmidhuber, 1997; with Gers' forget gate)."""

    inputs: Dense  # of the input gate, the forget gate, the candidate and the output gate
    state: Dense


class Attention(NamedTuple):
    """One gated transformer block over the last features (after Parisotto et al., 2020)."""

    embed: Dense
    query_key_value: Dense
    bias: jax.Array  # [heads, window]: what each head thinks of features so many steps old
    out: Dense
    out_gate: Dense
    hidden: Layers
    hidden_gate: Dense


Memory = Gru | Lstm | Attention | tuple[()]
KINDS = ("none", "gru", "lstm", "transformer")
HEADS = 4  # at most


def init_memory(key: jax.Array, kind: str, inputs: int, width: int, window: int = 32) -> Memory:
    """Memory of that kind, `width` features wide, with orthogonal weights.

    A transformer's reaches `window` steps back, the present one included.
    """
    match kind:
        case "none":
            return ()
        case "gru":
            return Gru(*_gates(key, inputs, width, 3))
        case "lstm":
            taken, state = _gates(key, inputs, width, 4)
            # It remembers at first (Jozefowicz et al., 2015).
            return Lstm(replace(taken, bias=taken.bias.at[width : 2 * width].set(1.0)), state)
        case "transformer":
            return _init_attention(key, inputs, width, window)
    raise UnknownNameError("memory", kind, KINDS)


def width_of(memory: Memory, inputs: int) -> int:
    """How many features come out where `inputs` go in."""
    match memory:
        case Gru() | Lstm():
            return memory.state.weight.shape[0]
        case Attention():
            return memory.embed.weight.shape[1]
        case ():
            return inputs
    assert_never(memory)


def start(memory: Memory, rows: tuple[int, ...] = ()) -> State:
    """The initial state, for each of `rows`."""
    match memory:
        case Gru():
            return jnp.zeros((*rows, memory.state.weight.shape[0]))
        case Lstm():
            nothing = jnp.zeros((*rows, memory.state.weight.shape[0]))
            return (nothing, nothing)
        case Attention():
            window, inputs = memory.bias.shape[1], memory.embed.weight.shape[0]
            return (jnp.zeros((*rows, window, inputs)), jnp.zeros(rows, jnp.int32))
        case ():
            return ()
    assert_never(memory)


def remember(
    memory: Memory, state: State, features: jax.Array, fresh: jax.Array
) -> tuple[State, jax.Array]:
    """The state after one step, and the features with memory."""
    match memory:
        case Gru() | Lstm():
            return _turn(memory, state, (dense(memory.inputs, features), fresh))
        case Attention():
            state, out_t = _attend(memory, state, features[None], fresh[None])
            return state, out_t[0]
        case ():
            return state, features
    assert_never(memory)


def unroll(
    memory: Memory, state: State, features_t: jax.Array, fresh_t: jax.Array
) -> tuple[State, jax.Array]:
    """What `remember` gives step by step, over all times."""
    match memory:
        case Gru() | Lstm():
            taken_t = dense(memory.inputs, features_t)
            return lax.scan(partial(_turn, memory), state, (taken_t, fresh_t))
        case Attention():
            return _attend(memory, state, features_t, fresh_t)
        case ():
            return state, features_t
    assert_never(memory)


def forget(state: State, ended: jax.Array) -> State:
    """Reset the state where an episode has `ended`, so that later steps need no mark."""

    def fade(x: jax.Array) -> jax.Array:
        return jnp.where(ended.reshape(*ended.shape, *[1] * (x.ndim - ended.ndim)), 0, x)

    return jax.tree.map(fade, state)


def _turn(
    memory: Gru | Lstm, state: State, seen: tuple[jax.Array, jax.Array]
) -> tuple[State, jax.Array]:
    taken, fresh = seen
    state = jax.tree.map(lambda x: jnp.where(fresh[..., None], 0.0, x), state)
    match memory:
        case Gru():
            return _gru(memory, state, taken)
        case Lstm():
            return _lstm(memory, state, taken)
    assert_never(memory)


def _gru(memory: Gru, state: jax.Array, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
    """H' = (1 - z) n + z h, where n = tanh(x Wₙ + r (h Uₙ + bₙ))."""
    x_reset, x_update, x_new = jnp.split(taken, 3, axis=-1)
    h_reset, h_update, h_new = jnp.split(dense(memory.state, state), 3, axis=-1)
    reset, update = jax.nn.sigmoid(x_reset + h_reset), jax.nn.sigmoid(x_update + h_update)
    new = jnp.tanh(x_new + reset * h_new)
    state = (1 - update) * new + update * state
    return state, state


def _lstm(memory: Lstm, state: State, taken: jax.Array) -> tuple[State, jax.Array]:
    """C' = f c + i g and h' = o tanh(c')."""
    cell, hidden = state
    gates = jnp.split(taken + dense(memory.state, hidden), 4, axis=-1)
    keep_new, keep_old, new, show = gates
    cell = jax.nn.sigmoid(keep_old) * cell + jax.nn.sigmoid(keep_new) * jnp.tanh(new)
    hidden = jax.nn.sigmoid(show) * jnp.tanh(cell)
    return (cell, hidden), hidden


def _attend(
    memory: Attention, state: State, features_t: jax.Array, fresh_t: jax.Array
) -> tuple[State, jax.Array]:
    """All times at once: each attends to those of its episode among the last `window`."""
    past, known = state
    heads, window = memory.bias.shape
    steps = features_t.shape[0]
    past = jnp.moveaxis(past, -2, 0)
    seen = jnp.concatenate([past, features_t])
    # Which episode of this window each belongs to; of the past, that only which is not forgotten.
    episode_t = jnp.cumsum(fresh_t.astype(jnp.int32), axis=0)
    nth = jnp.arange(window, 0, -1).reshape(-1, *[1] * known.ndim)
    episode = jnp.concatenate([jnp.where(nth <= known, 0, -1), episode_t])

    x = dense(memory.embed, seen)
    query, key, value = (
        part.reshape(*part.shape[:-1], heads, -1)
        for part in jnp.split(dense(memory.query_key_value, standardised(x)), 3, axis=-1)
    )
    x = x[window:]
    scores = jnp.einsum("t...hd,s...hd->...hts", query[window:], key) / query.shape[-1] ** 0.5
    age = jnp.arange(steps)[:, None] + window - jnp.arange(window + steps)
    scores += jnp.take(memory.bias, age, axis=1, mode="clip")
    theirs = jnp.moveaxis(episode_t[:, None] == episode, (0, 1), (-2, -1))
    near = theirs & (age >= 0) & (age < window)
    weights = jax.nn.softmax(jnp.where(near[..., None, :, :], scores, -1e9), axis=-1)
    found = jnp.einsum("...hts,s...hd->t...hd", weights, value)
    found = dense(memory.out, found.reshape(*x.shape[:-1], -1))
    x = x + jax.nn.sigmoid(dense(memory.out_gate, x)) * found
    thought = mlp(memory.hidden, standardised(x))
    x = x + jax.nn.sigmoid(dense(memory.hidden_gate, x)) * thought
    known = jnp.sum(episode[-window:] == episode[-1], axis=0)
    return (jnp.moveaxis(seen[-window:], 0, -2), known), x


def _init_attention(key: jax.Array, inputs: int, width: int, window: int) -> Attention:
    keys = jax.random.split(key, 6)
    heads = gcd(width, HEADS)
    (embed,), (out,), (out_gate,), (hidden_gate,) = (
        init_mlp(key, (size, width))
        for key, size in zip(keys, (inputs, width, width, width), strict=False)
    )
    (query_key_value, _) = _gates(keys[4], width, width, 3)
    hidden = init_mlp(keys[5], (width, 2 * width, width), style=RELU)
    # Gates start nearly shut: at first it does what it would without memory.
    shut = jnp.full(width, -2.0)
    out_gate, hidden_gate = (replace(gate, bias=shut) for gate in (out_gate, hidden_gate))
    bias = jnp.zeros((heads, window))
    return Attention(embed, query_key_value, bias, out, out_gate, hidden, hidden_gate)


def _gates(key: jax.Array, inputs: int, width: int, count: int) -> tuple[Dense, Dense]:
    """Layers from features and from a state to `count` gates, each gate's weights orthogonal."""
    orthogonal = jax.nn.initializers.orthogonal()
    keys = jax.random.split(key, (2, count))
    taken, state = (
        jnp.concatenate([orthogonal(key, (size, width)) for key in row], axis=1)
        for row, size in zip(keys, (inputs, width), strict=True)
    )
    return Dense(taken, jnp.zeros(count * width)), Dense(state, jnp.zeros(count * width))
