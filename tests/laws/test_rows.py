"""What is said of layouts is true: what replicas compute from their shares adds up to the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import shoal
from shoal.graph.layout import REPLICATED, Partial, Replicated, Sharded, Varying, is_exact
from shoal.tracing.flow import LOST, Flow
from shoal.tracing.local import Held, Local, Share

ENVS, WIDE, REPLICAS, LANES = 4, 2, 2, "lanes"
MOST_TURNS = 20
TABLE = jnp.arange(12.0).reshape(6, 2) ** 0.5
# Which axis of each part of the state is the environments'.
AXES = {"x": 1, "i": 0, "keys": 0, "w": None, "key": None}


def state_of(time):
    """A state with rows of several kinds."""
    key, rows = jax.random.key(1), jnp.arange(ENVS)
    x = jax.random.normal(key, (time, ENVS, WIDE))
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    return {"x": x, "i": rows % 5, "keys": keys, "w": jnp.eye(WIDE) + 0.5, "key": key}


LIES = [REPLICATED if AXES[name] is None else Sharded(AXES[name]) for name in sorted(AXES)]


@functools.cache
def followed(op, time):
    """An operation as a jaxpr, how its result lies, and what was found on the way."""
    flow = Flow(ENVS)
    closed = jax.make_jaxpr(op)(state_of(time))
    return closed, flow.jaxpr(closed, LIES)[0], flow.findings


def on_shares(closed, state):
    """What each of the replicas makes, one above the other, of each result."""
    rows = ENVS // REPLICAS

    def replica(number, *leaves):
        share = Share(ENVS, rows, REPLICAS, lambda: number * rows, (LANES,))
        held = [share.brought(Held(x), lie) for x, lie in zip(leaves, LIES, strict=True)]
        return [out.array for out in Local(share).jaxpr(closed, held)]

    axes = (0, *(None for _ in LIES))
    run = jax.vmap(replica, axes, axis_name=LANES)
    return run(jnp.arange(REPLICAS), *(state[name] for name in sorted(state)))


def put_together(made, layout):
    """The whole of what replicas have, by how it is said to lie."""
    match layout:
        case Replicated():
            assert all(np.allclose(made[0], x, equal_nan=True) for x in made)
            return made[0]
        case Sharded(axis, before, after):  # groups of whole environments, too
            apart = [
                x.reshape(*x.shape[:axis], before, -1, after, *x.shape[axis + 1 :]) for x in made
            ]
            whole = jnp.concatenate(apart, axis + 1)
            return whole.reshape(*made.shape[1 : axis + 1], -1, *made.shape[axis + 2 :])
        case Partial(how):
            together = {"sum": np.add, "max": np.maximum, "min": np.minimum}[how]
            return together.reduce(made, axis=0, dtype=made.dtype)
    return None


def check(op, time):
    """What replicas make, put together by how it is said to lie, is what the loop makes."""
    closed, layout, findings = followed(op, time)
    if layout != LOST and not findings.faults:
        (made,) = on_shares(closed, state_of(time))
        if is_exact(layout):
            whole = put_together(made, layout)
            np.testing.assert_allclose(whole, op(state_of(time)), rtol=1e-5, atol=1e-5)
    return layout


def over(function, **settings):
    return lambda s: function(s["x"], **settings)


def by_turns(x):
    return lax.scan(lambda c, row: (0.5 * c + row, c * row), jnp.zeros(x.shape[1:]), x)[1]


def while_small(limit):
    def run(s):
        def body(turn):
            return turn[0] + 1, jnp.sin(turn[1]) + turn[1]

        def continues(turn):  # in a chain, x may be what never grows
            return (turn[0] < MOST_TURNS) & limit(s, turn)

        return lax.while_loop(continues, body, (0, s["x"]))[1]

    return run


def each_until(s, continues):
    """Every row of the first time doubled until a condition of its own holds."""
    double = lambda x: 2 * jnp.abs(x) + 1  # noqa: E731
    return jax.vmap(lambda x: lax.while_loop(lambda x: continues(s, x), double, x))(s["x"][0])


def rows_of(x):
    return x.reshape(-1, x.shape[-1])


def pairs(x):
    """Neighbouring environments as groups of two."""
    return x.reshape(-1, 2, *x.shape[1:])


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
    "passed beside a mean": lambda s: lax.optimization_barrier((s["x"].mean(1), s["x"]))[1],
    "reduced in its own way": lambda s: lax.reduce(s["x"], 0.0, lambda x, y: x + y * y, (0,)),
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
    "drawn by row from what all share": lambda s: jax.vmap(
        lambda key: jax.random.gamma(key, jnp.ones(3))
    )(s["keys"]),
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
    "numbered": lambda s: s["x"] + jnp.arange(s["x"].shape[1])[:, None],
    "how many": lambda s: s["x"] / s["x"].shape[1],
    "as often as there are": lambda s: lax.fori_loop(
        0, s["x"].shape[1], lambda i, x: x + 1, s["x"]
    ),
    "a power of how many": lambda s: jnp.abs(s["x"]) ** s["x"].shape[1],
    "a slice by how many": lambda s: s["x"] + s["w"][s["x"].shape[1] % 2],
    "a table by how many": lambda s: s["x"] * np.linspace(0, 1, s["x"].shape[1])[:, None],
    "twice as many": lambda s: jnp.concatenate([s["x"], -s["x"]], axis=1),
    "more by constants": lambda s: jnp.concatenate([s["x"], jnp.zeros_like(s["x"])], axis=1),
    "half of twice as many": lambda s: jnp.concatenate([s["x"], -s["x"]], axis=1)[:, : s["i"].size],
    "time and environments as one": over(rows_of),
    "as one and back": lambda s: jnp.sin(rows_of(s["x"])).reshape(s["x"].shape),
    "drawn for all": lambda s: jax.random.normal(s["key"], s["x"].shape),
    "split for all": lambda s: jax.vmap(jax.random.normal)(jax.random.split(s["key"], s["i"].size)),
    "argsort": over(jnp.argsort, axis=0),
    "median": over(jnp.median, axis=0),
    "one time set": lambda s: s["x"].at[0].set(0.0),
    "one feature set": lambda s: s["x"].at[..., 0].set(1.0),
    "joined up over time": lambda s: lax.associative_scan(jnp.add, s["x"]),
    "convolved": lambda s: jax.vmap(lambda x: jnp.convolve(x, jnp.ones(2)), 1, 1)(s["x"][..., 0]),
    "looked for": lambda s: jnp.searchsorted(jnp.array([-1.0, 0.0, 1.0]), s["x"]),
    "solved": lambda s: jnp.linalg.solve(s["w"] + jnp.eye(WIDE), s["x"].swapaxes(1, 2)),
    "inverted": lambda s: jnp.linalg.inv(jnp.einsum("tnk,tnj->tnkj", s["x"], s["x"]) + s["w"]),
    "tiled": lambda s: jnp.tile(s["x"], (2, 1, 2)),
    "tiled rows": lambda s: jnp.tile(s["x"], (1, 2, 1)),
    "one by one": lambda s: lax.map(jnp.sin, s["x"][0]),
    "every other of doubled rows": lambda s: jnp.repeat(s["x"], 4, axis=1)[:, 1::2],
    "a row of two of two batches": lambda s: jnp.tile(jnp.repeat(s["x"], 2, axis=1), (1, 2, 1))[
        :, 2 * s["i"].size + 1 :: 2
    ],
    "each row until it is large": lambda s: each_until(s, lambda s, x: x.mean() < 2),
    "each row and key, counted": lambda s: jax.vmap(
        lambda x, key: lax.while_loop(
            lambda c: (c[0] < 5) & (c[1] < 2),
            lambda c: (c[0] + 1, c[1] + jax.random.uniform(jax.random.fold_in(key, c[0]))),
            (0, x),
        )[1]
    )(s["x"][0, :, 0], s["keys"]),
    "each until one of some limits": lambda s: jax.vmap(
        lambda limit: lax.while_loop(
            lambda c: c[0] < limit, lambda c: (c[0] + 1, 2 * c[1]), (0, s["x"])
        )[1]
    )(jnp.arange(3)),
    "a stage by row, all times": lambda s: beside(rows_of(s["x"]), other=s["w"][0]),
    "the slope of a stage": lambda s: jax.grad(lambda x: jnp.sum(beside(x, other=s["w"][0]) ** 2))(
        s["x"][0]
    ),
    "a stage mapped over times": lambda s: jax.vmap(lambda x: beside(x, other=s["w"][0]))(s["x"]),
    "by their own numbers": lambda s: s["x"][0][jnp.arange(s["i"].size), s["i"] % WIDE],
    "at all times by their own numbers": lambda s: s["x"][:, jnp.arange(ENVS), s["i"] % WIDE],
    "by numbers of times and their own": lambda s: s["x"][
        jnp.arange(s["x"].shape[0])[:, None], jnp.arange(ENVS), s["i"] % WIDE
    ],
    "set by their own numbers": lambda s: s["x"][0].at[jnp.arange(ENVS), s["i"] % WIDE].set(0.5),
    "mapped by twos": lambda s: lax.map(jnp.cumsum, s["x"][0], batch_size=2),
    "less the mean of pairs": lambda s: s["x"][0] - jnp.repeat(pairs(s["x"][0]).mean(1), 2, axis=0),
    "standardised within pairs": lambda s: jax.nn.standardize(pairs(s["x"][0]), axis=1),
    "ranked within pairs": lambda s: jnp.argsort(pairs(s["x"][0]), 1).reshape(s["x"][0].shape),
    "the first of each pair at all times": lambda s: s["x"].reshape(s["x"].shape[0], -1, 2, WIDE)[
        :, :, 0
    ],
    "pairs as one row": lambda s: jnp.sort(s["x"][0].reshape(-1, 2 * WIDE), axis=1),
    "pairs, one after the other": lambda s: lax.scan(
        lambda c, pair: (c, pair - pair.max(0)), 0, pairs(s["x"][0])
    )[1],
    "pairs twice": lambda s: jnp.tile(pairs(s["x"][0]).sum(1), (2, 1)),
    "pairs and their opposites": lambda s: jnp.split(
        jnp.concatenate([pairs(s["x"][0]), -pairs(s["x"][0])]), 2
    )[1],
    "pairs over all times": lambda s: rows_of(s["x"]).reshape(-1, 2, WIDE).mean(1),
    "slopes by their own numbers": lambda s: jax.grad(
        lambda x: jnp.sum(x[jnp.arange(ENVS), s["i"] % WIDE] ** 2)
    )(s["x"][0]),
}

GROUPED = [n for n in APART if "pair" in n or "twos" in n]

MIXED = {
    "mean over environments": over(jnp.mean, axis=1),
    "mean of all": over(jnp.mean),
    "less the mean": lambda s: s["x"] - s["x"].mean(1, keepdims=True),
    "standardised": lambda s: (s["x"] - s["x"].mean()) / s["x"].std(),
    "sum of all": over(jnp.sum),
    "a mean passed beside rows": lambda s: lax.optimization_barrier((s["x"].mean(1), s["x"]))[0],
    "a mean put beside rows": lambda s: jax.device_put((s["x"].max(1), s["x"]))[0],
    "bits of any": lambda s: jnp.bitwise_or.reduce(1 << s["i"]),
    "bits of all": lambda s: jnp.bitwise_and.reduce(~(1 << s["i"])),
    "drawn for all by rows of chances": lambda s: jax.random.beta(
        s["key"], 1 + jnp.abs(s["x"]), 2.0
    ),
    "taken off by place": lambda s: jnp.zeros(6).at[s["i"]].subtract(s["x"][0, :, 0]),
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
    "sum over pairs": lambda s: pairs(s["x"][0]).sum(0),
    "pairs ranked": lambda s: jnp.argsort(pairs(s["x"][0]).sum(1), 0),
    "scan over pairs": lambda s: by_turns(pairs(s["x"][0])),
    "environment and environment": lambda s: jnp.einsum("tnk,tmk->tnm", s["x"], s["x"]),
    "moments": lambda s: jnp.einsum("tnk,tnj->kj", s["x"], s["x"]),
    "and back": lambda s: rows_of(s["x"])[::-1].reshape(s["x"].shape),
    "padded": lambda s: jnp.pad(s["x"], ((0, 0), (1, 1), (0, 0))),
    "scan over environments": lambda s: by_turns(s["x"].swapaxes(0, 1)),
    "loop while some are small": while_small(lambda s, turn: jnp.any(turn[1] < 9)),
    "each row until all are large": lambda s: each_until(
        s, lambda s, x: (x + s["x"].mean()).mean() < 2
    ),
    "choice by some": lambda s: lax.cond(jnp.any(s["x"] > 0), jnp.sin, jnp.cos, s["x"]),
    "added up at one place": lambda s: jnp.zeros(6).at[s["i"]].add(s["x"][0, :, 0]),
    "a stage that gets rows by keyword": lambda s: above_all(s["x"][0], others=s["x"][0]),
    "a stage that gets rows from around it": captured,
    "a stage by time that sums environments": lambda s: summed(s["x"]),
    "reduced": lambda s: lax.reduce(s["x"], 0.0, lambda x, y: y, (1,)),
}

# Rows stay apart here too, and Shoal need not see it: it may only never be wrong.
UNKNOWN = {
    "reduced over time": lambda s: lax.reduce(s["x"], 1.0, lax.mul, (0,)),
}
ALL = APART | MIXED | UNKNOWN

# The second makes as many times as environments, so that shapes alone don't distinguish them.
TIMES = [3, ENVS]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", ALL)
def test_what_replicas_make_adds_up_to_the_whole(name, time):
    check(ALL[name], time)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_seen(name, time):
    _, layout, findings = followed(APART[name], time)
    assert isinstance(layout, Replicated | Sharded)
    assert is_exact(layout)
    assert not findings.faults


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", MIXED)
def test_rows_that_mix_are_seen(name, time):
    layout = followed(MIXED[name], time)[1]
    assert isinstance(layout, Partial | Varying) or not is_exact(layout)


@pytest.mark.parametrize("name", GROUPED)
def test_replicas_are_to_hold_whole_groups(name):
    assert [size for size, _ in followed(APART[name], 3)[2].grouped] == [2]


def test_a_loop_that_starts_from_numbers_asks_for_them():
    def op(s):
        rows = jnp.arange(s["x"].shape[1])[:, None] * 1.0
        return lax.scan(lambda c, x: (c + x, None), rows * jnp.ones(WIDE), s["x"])[0]

    assert followed(op, 3)[2].numbered


# What replicas contribute to a sum or an extreme, and what may be done with it before they agree.
CONTRIBUTED = {
    "sum": lambda x: x.sum(1, dtype=x.dtype),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1),
}
KINDS = {
    "low": lambda x: x - 1.5,
    "high": lambda x: x + 1.5,
    "whole": lambda x: (40 * x).astype(jnp.int32),
    "least of all": lambda x: jnp.where(x > -0.5, (40 * x).astype(jnp.int32), -(2**31)),
    "bytes": lambda x: (40 * jnp.abs(x)).astype(jnp.uint8),
    "unsigned": lambda x: (40 * jnp.abs(x)).astype(jnp.uint32),
    "very low": lambda x: jnp.where(x < 0, -9000, x),
    "complex": lambda x: lax.complex(jnp.round(x), -x),
}
AFTERWARDS = {
    **{
        f.__name__: f
        for f in (jnp.sqrt, jnp.log, jnp.log1p, jnp.exp, jnp.expm1, jnp.tanh, jnp.arctan, jnp.cbrt)
    },
    **{f.__name__: f for f in (jnp.negative, jnp.sign, jnp.abs, jnp.square, jnp.invert)},
    "half": lambda y: y // 2,
    "a third": lambda y: y / 3,
    "less one": lambda y: y - 1,
    "from one": lambda y: 1 - y,
    "times minus two": lambda y: y * -2,
    "as float": lambda y: y.astype(jnp.float32),
    "as whole": lambda y: y.astype(jnp.int32),
    "as bytes": lambda y: y.astype(jnp.uint8),
    "as float8": lambda y: y.astype(jnp.float8_e4m3fn).astype(float),
    "less, as float": lambda y: (y - jnp.ones_like(y)).astype(float),
    "negative, as float": lambda y: (-y).astype(float),
    "in a wider product": lambda y: lax.dot(y, y[0] * 0 + 3, preferred_element_type=jnp.float32),
    "filled with ones": lambda y: y.at[jnp.array([0, 9])].get(mode="fill", fill_value=1),
    "is large": lambda y: y > 1,
    "at most one": lambda y: jnp.minimum(y, 1),
    "real": jnp.real,
    "shifted": lambda y: jnp.right_shift(y, 1),
}


def done(contribution):
    """All that can be done with a contribution, by name."""
    for name, after in AFTERWARDS.items():
        try:
            jax.eval_shape(after, contribution)
        except TypeError:  # as that of a bit-wise operation on floats
            continue
        yield name, after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", CONTRIBUTED)
def test_what_is_done_with_a_contribution_before_replicas_agree_changes_no_number(how, kind):
    if (how, kind) == ("sum", "least of all"):
        pytest.skip("sums of 32 bits are taken not to overflow")
    x = state_of(3)["x"]
    afterwards = dict(done(CONTRIBUTED[how](KINDS[kind](x))))

    def op(s):
        contribution = CONTRIBUTED[how](KINDS[kind](s["x"]))
        return [after(contribution) for after in afterwards.values()]

    flow, closed = Flow(ENVS), jax.make_jaxpr(op)(state_of(3))
    layouts = flow.jaxpr(closed, LIES)
    assert not flow.findings.faults
    assert any(isinstance(x, Partial) for x in layouts) or (kind == "complex" and how != "sum")
    shares = on_shares(closed, state_of(3))
    for name, layout, made, wanted in zip(
        afterwards, layouts, shares, op(state_of(3)), strict=True
    ):
        if is_exact(layout) and not isinstance(layout, Varying):
            whole = put_together(made, layout)
            np.testing.assert_allclose(whole, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def ranks(x):
    return jnp.argsort(jnp.argsort(shoal.gather(x)))


def contrast(x, y):
    logits = x @ shoal.gather(y).T
    own = jnp.sum(x * y, axis=1)
    return shoal.mean(jnp.mean(jax.nn.logsumexp(logits, axis=1) - own))


def conjugate(s):
    x = s["x"][0]
    return jax.scipy.sparse.linalg.cg(
        lambda v: shoal.mean(jnp.mean(x * (x @ v)[:, None], 0)) + v, s["w"][0], maxiter=3
    )[0]


def while_agreed(s):
    def body(turn):
        return turn[0] + shoal.mean(jnp.abs(s["x"]).mean()), turn[1] + 1

    return lax.while_loop(lambda turn: turn[0] < 3, body, (0.0, 0))[0]


AGREED = {
    "mean of an average": lambda s: shoal.mean(s["x"].mean(1)),
    "mean of a sum": lambda s: shoal.mean(s["x"].sum(1)),
    "sum of a sum": lambda s: shoal.sum(s["x"].sum(1)),
    "sum of integers": lambda s: shoal.sum(s["i"].sum()),
    "max of a max": lambda s: shoal.max(s["x"].max(1)),
    "min of a min": lambda s: shoal.min(s["x"].min()),
    "any": lambda s: shoal.max(jnp.any(s["x"] > 2)).astype(float),
    "all": lambda s: shoal.min(jnp.all(s["x"] > -2)).astype(float),
    "no more than any": lambda s: shoal.min(~jnp.any(s["x"] > 2)).astype(float),
    "counts by class": lambda s: shoal.sum(jnp.zeros(6).at[s["i"]].add(1.0)),
    "moments": lambda s: jnp.stack(shoal.moments(s["x"], (0, 1))),
    "all rows": lambda s: shoal.gather(s["x"], axis=1),
    "all rows, counted from the end": lambda s: shoal.gather(s["x"], axis=-2),
    "all rows, then an operation": lambda s: jax.nn.relu(shoal.gather(s["i"])),
    "what is made of all rows": lambda s: jnp.tanh(shoal.gather(s["x"], axis=1)).max(1),
    "ranks": lambda s: ranks(s["x"][0, :, 0]).astype(float),
    "a weighted sum by ranks": lambda s: shoal.sum(
        (shoal.scatter(ranks(s["x"][0, :, 0]))[:, None] * s["x"][0]).sum(0)
    ),
    "the best half": lambda s: shoal.gather(s["x"][0])[
        jnp.argsort(-shoal.gather(s["x"][0, :, 0]))[: ENVS // 2]
    ].mean(0),
    "a weighted mean": lambda s: shoal.weighted_mean(s["x"], (s["x"] > 0)),
    "a contrast": lambda s: contrast(s["x"][0], s["x"][1]),
    "the slope of a contrast": lambda s: shoal.mean(
        jax.grad(lambda w: contrast(s["x"][0] @ w, s["x"][1] @ w))(s["w"])
    ),
    "the slope through what was agreed": lambda s: shoal.mean(
        jax.grad(lambda w: jnp.mean((s["x"] @ w - shoal.mean((s["x"] @ w).mean())) ** 2))(s["w"])
    ),
    "conjugate gradients": conjugate,
    "agreed in a loop to an agreed limit": while_agreed,
    "summed over turns": lambda s: shoal.mean(
        lax.scan(lambda c, x: (c + x.mean(0), None), jnp.zeros(WIDE), s["x"])[0]
    ),
    "the same everywhere": lambda s: shoal.mean(s["w"]),
    "weights that all have": lambda s: shoal.gather(s["w"]),
}
DISAGREED = {
    "mean of rows": lambda s: shoal.mean(s["x"]),
    "mean of a max": lambda s: shoal.mean(s["x"].max(1)),
    "max of a mean": lambda s: shoal.max(s["x"].mean(1)),
    "mean of standardised rows": lambda s: shoal.mean(
        ((s["x"] - s["x"].mean()) / s["x"].std()).mean()
    ),
    "mean of a masked mean": lambda s: shoal.mean(s["x"].sum() / (s["x"] > 0).sum()),
    "mean of what was clipped": lambda s: shoal.mean(jnp.clip(s["x"].mean(), -0.1, 0.1)),
    "mean of mixed rows": lambda s: shoal.mean(s["x"] - s["x"].mean(1, keepdims=True)),
    "all times": lambda s: shoal.gather(s["x"], axis=0),
    "all averages": lambda s: shoal.gather(s["x"].mean(1)),
    "agreed where some go": lambda s: lax.cond(
        s["x"].max() > 1, lambda x: shoal.mean(x.mean()), lambda x: 0.0, s["x"]
    ),
    "agreed while some are small": lambda s: lax.while_loop(
        lambda t: t < s["x"].mean(), lambda t: t + shoal.mean(s["x"].mean()) ** 2 + 1, -3.0
    ),
}


@pytest.mark.parametrize("name", AGREED)
def test_what_replicas_agree_on_is_what_the_loop_has(name):
    assert check(AGREED[name], 3) == REPLICATED
    assert not followed(AGREED[name], 3)[2].faults


@pytest.mark.parametrize("name", DISAGREED)
def test_replicas_can_not_agree_like_this(name):
    assert followed(DISAGREED[name], 3)[2].faults


APPROXIMATE = {
    "standardised by each": lambda s: ((s["x"] - s["x"].mean()) / s["x"].std() * s["x"]).mean(),
    "clipped by each": lambda s: jnp.clip(s["x"].sum(), -0.1, 0.1),
    "a masked mean of each": lambda s: s["x"].sum() / (s["x"] > 0).sum(),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_an_approximation_is_the_mean_of_what_each_replica_alone_would_have(name):
    op = APPROXIMATE[name]
    closed, layout, findings = followed(lambda s: shoal.mean(op(s), approximate=True), 3)
    assert layout == REPLICATED
    assert findings.approximate
    state, half = state_of(3), ENVS // REPLICAS
    made = on_shares(closed, state)
    halves = [
        state | {"x": state["x"][:, i : i + half], "i": state["i"][i : i + half]} for i in (0, half)
    ]
    alone = [op(some) for some in halves]
    if name == "clipped by each":  # a sum of half as many rows stands for one of all
        alone = [jnp.clip(2 * some["x"].sum(), -0.1, 0.1) for some in halves]
    np.testing.assert_allclose(made[0], np.mean(alone), rtol=1e-5)


def chained(names):
    def op(state):
        for name in names:
            made = ALL[name](state)
            state = state | {"x": made.astype(jnp.float32)}
        return state["x"]

    return op


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(ALL)), min_size=2, max_size=4))
def test_a_chain_of_operations_adds_up_to_the_whole(names):
    op = chained(names)
    try:
        followed(op, 3)
    except (shoal.ShoalError, ValueError, TypeError, IndexError):
        assume(False)
    check(op, 3)
