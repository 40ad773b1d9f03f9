"""What tracing says of rows is true: what it calls apart can be computed apart."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import shoal

ENVS, WIDE = 4, 2
TABLE = jnp.arange(12.0).reshape(6, 2) ** 0.5
# Which axis of each part of the state is the environments'.
AXES = {"x": 1, "i": 0, "keys": 0, "w": None, "key": None}


@dataclass(frozen=True)
class OneOp:
    """A loop that shows what one operation makes of its state."""

    op: object
    time: int

    def init(self, key, env, envs):
        x = jax.random.normal(jax.random.key(1), (self.time, envs, WIDE))
        rows = jnp.arange(envs)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        return {"x": x, "i": rows % 5, "keys": keys, "w": jnp.eye(WIDE) + 0.5, "key": key}

    def tick(self, env, state):
        return state, {"y": self.op(state)}


@functools.cache
def traced(op, time):
    graph = shoal.trace(OneOp(op, time), envs=ENVS)
    return graph, graph.values[graph.metrics[0].inner]


def share(state, first, last):
    """The state of a replica that holds the environments from `first` to before `last`."""
    return {
        name: x if AXES[name] is None else lax.slice_in_dim(x, first, last, axis=AXES[name])
        for name, x in state.items()
    }


def check(op, time):
    """Replicas get from their halves what `op` gets from the whole, where tracing says so."""
    graph, value = traced(op, time)
    if value.part:
        return value
    state = graph.origin.start(0, ENVS)
    whole, half = op(state), ENVS // 2
    first, second = op(share(state, 0, half)), op(share(state, half, ENVS))
    if value.axis is None:
        np.testing.assert_allclose(first, whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(second, whole, rtol=1e-5, atol=1e-6)
    else:
        together = jnp.concatenate([first, second], value.axis)
        np.testing.assert_allclose(together, whole, rtol=1e-5, atol=1e-6)
    return value


def over(function, **settings):
    return lambda s: function(s["x"], **settings)


def by_turns(x):
    return lax.scan(lambda c, row: (0.5 * c + row, c * row), jnp.zeros(x.shape[1:]), x)[1]


def while_small(limit):
    def run(s):
        def body(turn):
            return turn[0] + 1, jnp.sin(turn[1]) + turn[1]

        return lax.while_loop(lambda turn: limit(s, turn), body, (0, s["x"]))[1]

    return run


def rows_of(x):
    return x.reshape(-1, x.shape[-1])


@shoal.stage(per="env")
def beside(x, *, other):
    return x + other


@shoal.stage(per="env")
def above_all(x, *, others):
    return x - others.max(0)


@shoal.stage(per="env")
def summed(x):
    return x.sum(0)


def captured(s):
    rows = s["x"][0]
    return shoal.stage(per="env")(lambda x: x - rows.max(0))(rows)


APART = {
    "tanh": over(jnp.tanh),
    "plus a number": lambda s: s["x"] + 1,
    "clip": over(jnp.clip, min=-1, max=1),
    "relu": over(jax.nn.relu),
    "isfinite": lambda s: jnp.isfinite(s["x"]).astype(float),
    "power": lambda s: jnp.abs(s["x"]) ** 1.5,
    "where": lambda s: jnp.where(s["x"] > 0, s["x"], -1.0),
    "where by row": lambda s: jnp.where((s["i"] > 1)[:, None], s["x"], 0.0),
    "times weights": lambda s: s["x"] @ s["w"],
    "weights times": lambda s: s["w"] @ s["x"].swapaxes(1, 2),
    "einsum": lambda s: jnp.einsum("tnk,kj->jtn", s["x"], s["w"]),
    "outer product by row": lambda s: jnp.einsum("tnk,tnj->tnkj", s["x"], s["x"]),
    "times with times by row": lambda s: jnp.einsum("tnk,snk->nts", s["x"], s["x"]),
    "sum over time": over(jnp.sum, axis=0),
    "mean over features": over(jnp.mean, axis=-1),
    "max over time": over(jnp.max, axis=0),
    "any over features": lambda s: jnp.any(s["x"] > 0, axis=2),
    "argmax over features": over(jnp.argmax, axis=-1),
    "argmin over time": over(jnp.argmin, axis=0),
    "less the mean over time": lambda s: s["x"] - s["x"].mean(0),
    "std over time": over(jnp.std, axis=0),
    "norm": over(jnp.linalg.norm, axis=-1),
    "softmax": over(jax.nn.softmax),
    "logsumexp": over(jax.nn.logsumexp, axis=-1),
    "cumsum over time": over(jnp.cumsum, axis=0),
    "cumprod over features": over(jnp.cumprod, axis=2),
    "reversed time": lambda s: s["x"][::-1],
    "flipped features": over(jnp.flip, axis=2),
    "sorted over time": over(jnp.sort, axis=0),
    "top of features": lambda s: lax.top_k(s["x"], 1)[0],
    "environments first": over(jnp.swapaxes, axis1=0, axis2=1),
    "environments last": over(jnp.moveaxis, source=1, destination=-1),
    "one more axis": lambda s: s["x"][:, None, :, None],
    "squeezed": lambda s: jnp.squeeze(s["x"][:, None], 1),
    "flat rows": lambda s: s["x"].swapaxes(0, 1).reshape(s["x"].shape[1], -1),
    "flat and back": lambda s: s["x"].reshape(1, *s["x"].shape, 1),
    "first times": lambda s: s["x"][:2],
    "last time": lambda s: s["x"][-1],
    "one feature": lambda s: s["x"][..., 0],
    "every second time": lambda s: s["x"][::2],
    "some times": lambda s: s["x"][jnp.array([1, 0])],
    "a time by number": lambda s: lax.dynamic_index_in_dim(s["x"], 1),
    "one time replaced": lambda s: lax.dynamic_update_index_in_dim(s["x"], s["x"][0], 1, 0),
    "differences": over(jnp.diff, axis=0),
    "rolled over time": over(jnp.roll, shift=1, axis=0),
    "joined in time": lambda s: jnp.concatenate([s["x"], s["x"][:1]]),
    "stacked": lambda s: jnp.stack([s["x"], 2 * s["x"]], axis=1),
    "split": lambda s: jnp.split(s["x"], 2, axis=2)[1],
    "padded in time": lambda s: jnp.pad(s["x"], ((1, 1), (0, 0), (0, 0))),
    "looked up": lambda s: TABLE[s["i"]],
    "one hot": lambda s: jax.nn.one_hot(s["i"], 5),
    "chosen by row": lambda s: jnp.take_along_axis(s["x"][0], s["i"][:, None] % WIDE, axis=1),
    "zeros for all": lambda s: jnp.zeros_like(s["x"]),
    "spread": lambda s: jnp.broadcast_to(s["w"][0], s["x"].shape),
    "drawn by row": lambda s: jax.vmap(lambda key: jax.random.normal(key, (3,)))(s["keys"]),
    "drawn from split keys": lambda s: jax.vmap(
        lambda key: jax.random.uniform(jax.random.split(key)[1])
    )(s["keys"]),
    "joined and averaged by row": lambda s: (
        jax.vmap(lambda x: jnp.mean(jnp.concatenate([jnp.ravel(x), jnp.ravel(x)])))(s["x"][0])[
            :, None
        ].T
    ),
    "mapped": lambda s: jax.vmap(lambda x: x @ x.T, 1)(s["x"]),
    "scan over time": over(by_turns),
    "counted loop": lambda s: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, s["x"]),
    "loop to a limit": while_small(lambda s, turn: turn[0] < 3),
    "choice by all": lambda s: lax.cond(s["w"][0, 0] > 0, jnp.sin, jnp.cos, s["x"]),
    "gradient": lambda s: jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(s["x"]),
    "a stage by row": lambda s: beside(s["x"][0], other=s["w"][0]),
    "checkpointed": lambda s: jax.checkpoint(jnp.sin)(s["x"]),
}

MIXED = {
    "mean over environments": over(jnp.mean, axis=1),
    "mean of all": over(jnp.mean),
    "less the mean": lambda s: s["x"] - s["x"].mean(1, keepdims=True),
    "standardised": lambda s: (s["x"] - s["x"].mean()) / s["x"].std(),
    "sum of all": over(jnp.sum),
    "max over environments": over(jnp.max, axis=1),
    "argmax over environments": over(jnp.argmax, axis=1),
    "any": lambda s: jnp.any(s["x"] > 0),
    "cumsum over environments": over(jnp.cumsum, axis=1),
    "flipped environments": over(jnp.flip, axis=1),
    "rolled environments": over(jnp.roll, shift=1, axis=1),
    "sorted environments": over(jnp.sort, axis=1),
    "softmax over environments": over(jax.nn.softmax, axis=1),
    "top environments": lambda s: lax.top_k(s["x"][0].T, 2)[0],
    "first environment": lambda s: s["x"][:, 0],
    "first environments": lambda s: s["x"][:, :2],
    "environments by number": lambda s: s["x"][:, jnp.array([1, 0, 1])],
    "environments by environment": lambda s: s["x"][:, s["i"] % 2],
    "environment and environment": lambda s: jnp.einsum("tnk,tmk->tnm", s["x"], s["x"]),
    "moments": lambda s: jnp.einsum("tnk,tnj->kj", s["x"], s["x"]),
    "time and environments as one": over(rows_of),
    "and back": lambda s: rows_of(s["x"])[::-1].reshape(s["x"].shape),
    "numbered": lambda s: s["x"] + jnp.arange(s["x"].shape[1])[:, None],
    "how many": lambda s: s["x"] / s["x"].shape[1],
    "twice as many": lambda s: jnp.concatenate([s["x"], s["x"]], axis=1),
    "padded": lambda s: jnp.pad(s["x"], ((0, 0), (1, 1), (0, 0))),
    "drawn for all": lambda s: jax.random.normal(s["key"], s["x"].shape),
    "scan over environments": lambda s: by_turns(s["x"].swapaxes(0, 1)),
    "loop while some are small": while_small(lambda s, turn: jnp.any(turn[1] < 9)),
    "choice by some": lambda s: lax.cond(jnp.any(s["x"] > 0), jnp.sin, jnp.cos, s["x"]),
    "added up at one place": lambda s: jnp.zeros(6).at[s["i"]].add(s["x"][0, :, 0]),
    "a stage that gets rows by keyword": lambda s: above_all(s["x"][0], others=s["x"][0]),
    "a stage that gets rows from around it": captured,
    "a stage by time that sums environments": lambda s: summed(s["x"]),
    "an average of rows": lambda s: shoal.mean(s["x"]),
    "reduced": lambda s: lax.reduce(s["x"], 0.0, lambda x, y: y, (1,)),
}

# Rows stay apart here too, and Shoal need not see it: it may only never be wrong.
UNKNOWN = {
    "argsort": over(jnp.argsort, axis=0),
    "median": over(jnp.median, axis=0),
    "one time set": lambda s: s["x"].at[0].set(0.0),
    "joined up over time": lambda s: lax.associative_scan(jnp.add, s["x"]),
    "convolved": lambda s: jax.vmap(lambda x: jnp.convolve(x, jnp.ones(2)), 1, 1)(s["x"][..., 0]),
    "looked for": lambda s: jnp.searchsorted(jnp.array([-1.0, 0.0, 1.0]), s["x"]),
    "solved": lambda s: jnp.linalg.solve(s["w"] + jnp.eye(WIDE), s["x"].swapaxes(1, 2)),
    "reduced over time": lambda s: lax.reduce(s["x"], 1.0, lax.mul, (0,)),
}
ALL = APART | MIXED | UNKNOWN

# The second makes as many times as environments, so that shapes alone don't tell them apart.
TIMES = [3, ENVS]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", ALL)
def test_what_has_rows_can_be_computed_apart(name, time):
    check(ALL[name], time)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_seen(name, time):
    assert not traced(APART[name], time)[1].part


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", MIXED)
def test_rows_that_mix_are_seen(name, time):
    assert traced(MIXED[name], time)[1].part


# With one replica these are what they are given; the numbers with several are laws of cuts.
AGREED = {
    "mean of an average": lambda s: shoal.mean(s["x"].mean(1)),
    "all rows": lambda s: shoal.gather(s["x"], axis=1),
    "all rows, then an operation": lambda s: jax.nn.relu(shoal.gather(s["i"])),
    "what is made of all rows": lambda s: jnp.tanh(shoal.gather(s["x"], axis=1)).max(1),
}
DISAGREED = {
    "mean of rows": lambda s: shoal.mean(s["x"]),
    "mean of mixed rows": lambda s: shoal.mean(s["x"] - s["x"].mean(1, keepdims=True)),
    "all times": lambda s: shoal.gather(s["x"], axis=0),
    "all weights": lambda s: shoal.gather(s["w"]),
    "all averages": lambda s: shoal.gather(s["x"].mean(1)),
}


@pytest.mark.parametrize("name", AGREED)
def test_what_replicas_agree_on_is_the_same_for_all(name):
    value = traced(AGREED[name], 3)[1]
    assert value.axis is None
    assert not value.part


@pytest.mark.parametrize("name", DISAGREED)
def test_replicas_can_not_agree_like_this(name):
    assert traced(DISAGREED[name], 3)[1].part


def chained(names):
    def op(state):
        for name in names:
            made = ALL[name](state)
            state = state | {"x": made.astype(jnp.float32)}
        return state["x"]

    return op


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(ALL)), min_size=2, max_size=4))
def test_a_chain_of_operations_has_rows_only_if_they_can_be_computed_apart(names):
    op = chained(names)
    try:
        traced(op, 3)
    except (shoal.ShoalError, ValueError, TypeError, IndexError):
        assume(False)
    check(op, 3)
