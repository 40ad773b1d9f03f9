"""What users write in loops: operations by name, what each takes and gives, what it does to rows.

A function of vectors is used in three ways: on one environment's row inside a per-environment
stage, on shared values, and on all rows under `vmap`. Every operation is bounded, and is given
the number of environments, which a per-environment function may close over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from laws import agreements, batches, vectors
from laws.vectors import WIDE, tame, wide

TIMES = 3

# What an operation does to rows, and so where it may be refused. Refusing what is apart or agreed
# is unjust wherever it is placed; the others change their numbers with the rows that are seen.
APART = "apart"  # row i of the result depends on row i, or nothing depends on rows at all
SUBTLE = "subtle"  # the same, by numbers or counts that only a careful reader follows
MIXED = "mixed"  # rows depend on other rows
COUNTED = "counted"  # the result depends on how many rows there are
AGREED = "agreed"  # replicas agree, and on the right thing
APPROXIMATE = "approximate"  # replicas agree on something near, as the author says
MISAGREED = "misagreed"  # replicas agree, and not on what one alone would have

HARMLESS = (APART, AGREED, APPROXIMATE)


@dataclass(frozen=True)
class Op:
    """An operation: the kinds that it reads and writes, its function, what it does to rows.

    Kinds: rows f32[n, WIDE], half bf16[n, WIDE], ints i32[n], flags bool[n], keys key[n] and
    roll f32[TIMES, n, WIDE]; shared ones are whole f32[WIDE], trail f32[TIMES, WIDE], number f32
    and key. "vector" stands for rows or a whole, "any key" for keys or a key. The function gets
    the number of environments first.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    function: Callable[..., Any]
    rows: str = APART

    @property
    def is_vector(self) -> bool:
        """Whether it is a function of one row."""
        return "vector" in self.reads


def on_vectors(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, *args: tame(wide(function(*args)))


def on_key(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(n, key, x):
        key, x = function(key, x)
        return key, tame(wide(x))

    return call


def on_count(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, x: tame(wide(function(n, x)))


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda n, *args: jax.tree.map(tame, function(*args))


ONE, TWO = ("vector",), ("vector", "vector")
OPS = {
    **{f"v {n}": Op(ONE, ONE, on_vectors(f)) for n, f in vectors.ONE_VECTOR.items()},
    **{f"v {n}": Op(TWO, ONE, on_vectors(f)) for n, f in vectors.TWO_VECTORS.items()},
    **{
        f"v {n}": Op(("any key", "vector"), ("any key", "vector"), on_key(f))
        for n, f in vectors.KEYED.items()
    },
    **{f"v {n}": Op(ONE, ONE, on_count(f), COUNTED) for n, f in vectors.CLOSED.items()},
}


def add_ops(prefix, reads, writes, table, rows):
    """Operations of one form."""
    for name, function in table.items():
        assert f"{prefix} {name}" not in OPS, name
        OPS[f"{prefix} {name}"] = Op(tuple(reads), tuple(writes), plainly(function), rows)


ROWS, WHOLE, BOTH = ["rows"], ["whole"], ["rows", "whole"]
add_ops("b", ROWS, ROWS, batches.ROWS_APART, APART)
add_ops("b", ROWS, ROWS, batches.ROWS_SUBTLE, SUBTLE)
add_ops("b", ROWS, ROWS, batches.ROWS_MIXED, MIXED)
add_ops("b", ROWS, ROWS, batches.ROWS_COUNTED, COUNTED)
add_ops("b", ROWS, WHOLE, batches.WHOLE_MIXED, MIXED)
add_ops("a", BOTH, WHOLE, agreements.WHOLE_AGREED, AGREED)
add_ops("a", BOTH, WHOLE, agreements.WHOLE_MISAGREED, MISAGREED)
add_ops("a", BOTH, WHOLE, agreements.WHOLE_APPROXIMATE, APPROXIMATE)
add_ops("a", ROWS, ROWS, agreements.ROWS_AGREED, AGREED)
add_ops("a", ROWS, ROWS, agreements.ROWS_MISAGREED, MISAGREED)


def drawn_for_all(key, x):
    key, now = jax.random.split(key)
    return key, x + 0.5 * jax.random.normal(now, x.shape)


def shuffled_rows(key, x):
    key, now = jax.random.split(key)
    return key, jax.random.permutation(now, x)


def numbered_keys(key, x):
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x)))
    return jax.random.fold_in(key, 9), x + jax.vmap(jax.random.normal)(keys)[:, None]


def split_for_all(key, x):
    key, *_ = jax.random.split(key, 2)
    keys = jax.random.split(key, len(x))
    return key, x + jax.vmap(lambda k: jax.random.uniform(k, (WIDE,)))(keys)


def gamma_for_all(key, x):
    key, now = jax.random.split(key)
    return key, x + jax.random.gamma(now, 1 + jnp.abs(x))


KEY_ROWS = ["key", "rows"]
add_ops(
    "k", KEY_ROWS, KEY_ROWS,
    {"drawn for all": drawn_for_all, "shuffled rows": shuffled_rows,
     "numbered keys": numbered_keys, "split for all": split_for_all,
     "gamma for all": gamma_for_all},
    MIXED,
)  # fmt: skip

# Between kinds, and over time.
add_ops("c", ["rows"], ["ints"], {"best place": lambda x: x.argmax(1)}, APART)
add_ops("c", ["ints"], ["rows"], {"one hot": lambda i: jax.nn.one_hot(i % WIDE, WIDE)}, APART)
add_ops("c", ["ints"], ["ints"], {"shifted": lambda i: (3 * i + 1) % 7}, APART)
add_ops("c", ["ints", "whole"], ["rows"], {"table": lambda i, w: w[i % WIDE, None] * w}, APART)
add_ops("c", ["rows"], ["flags"], {"above": lambda x: x[:, 0] > 0}, APART)
add_ops("c", ["flags", "rows"], ["rows"], {"kept": lambda f, x: jnp.where(f[:, None], x, 0)}, APART)
add_ops("c", ["flags", "flags"], ["flags"], {"neither": lambda f, g: ~(f | g)}, APART)
add_ops("c", ["flags"], ["number"], {"share": lambda f: f.mean()}, MIXED)
add_ops("c", ["ints"], ["number"], {"total": lambda i: i.sum() * 0.1}, MIXED)
add_ops("c", ["rows"], ["half"], {"as half": lambda x: x.astype(jnp.bfloat16)}, APART)
add_ops("c", ["half"], ["rows"], {"from half": lambda h: h.astype(jnp.float32)}, APART)
add_ops(
    "c",
    ["half"],
    ["half"],
    {"half layer": lambda h: jnp.tanh(h @ jnp.eye(4, dtype=h.dtype))},
    APART,
)
add_ops("c", ["whole"], ["number"], {"size": jnp.linalg.norm, "one of": lambda w: w[1]}, APART)
add_ops("c", ["number"], ["whole"], {"spread": lambda y: jnp.full(WIDE, y)}, APART)
add_ops("c", ["number", "rows"], ["rows"], {"scaled": lambda y, x: x * y + y}, APART)
add_ops("c", ["rows"], ["number"], {"mean": jnp.mean, "largest": jnp.max}, MIXED)
add_ops(
    "c", ["whole", "rows"], ["rows"], {"for each": lambda w, x: jnp.broadcast_to(w, x.shape)}, APART
)
add_ops(
    "c",
    ["whole"],
    ["whole"],
    {"rounded": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)},
    APART,
)
add_ops(
    "t", ["roll"], ["rows"],
    {
        "last": lambda r: r[-1],
        "over time": lambda r: r.mean(0),
        "best time": lambda r: jnp.take_along_axis(r, r.argmax(0)[None], 0)[0],
        "rows first": lambda r: r.swapaxes(0, 1).reshape(r.shape[1], -1)[:, :WIDE],
        "returns": lambda r: lax.scan(lambda c, y: (y + 0.9 * c, c), r[0] * 0, r, reverse=True)[0],
        "weighted": lambda r: jnp.einsum("tnk,t->nk", r, np.array([0.5, 0.3, 0.2], np.float32)),
    },
    APART,
)  # fmt: skip
add_ops(
    "t", ["roll"], ["roll"],
    {
        "summed": lambda r: jnp.cumsum(r, axis=0),
        "backwards": lambda r: r[::-1],
        "sorted": lambda r: jnp.sort(r, axis=0),
        "flat and back": lambda r: jnp.tanh(r.reshape(-1, WIDE)).reshape(r.shape),
        "joined up": lambda r: lax.associative_scan(jnp.maximum, r),
        "one time set": lambda r: r.at[0].set(0.5),
    },
    APART,
)  # fmt: skip
add_ops("t", ["roll"], ["roll"], {"less the mean": lambda r: r - r.mean((0, 1))}, MIXED)
add_ops("t", ["roll"], ["whole"], {"mean of all": lambda r: r.mean((0, 1))}, MIXED)
add_ops(
    "t", ["roll"], ["whole"], {"agreed mean": lambda r: agreements.mean(r.mean((0, 1)))}, AGREED
)
add_ops("t", ["trail"], ["whole"], {"latest": lambda r: r[-1], "mean": lambda r: r.mean(0)}, APART)

# Where rounding has large effects, so the tolerance is larger.
COARSE = {
    *("v bfloat16", "v float16", "v float8", "v int8", "v bits", "v bfloat16 of two"),
    *("b as half", "c as half", "c half layer", "c from half", "c rounded"),
}

# Inside per-environment stages only, where one environment's part of a value is at hand.
add_ops("e", ["int"], ["vector"], {"one hot": lambda i: jax.nn.one_hot(i % WIDE, WIDE)}, APART)
add_ops("e", ["flag", "vector"], ["vector"], {"kept": lambda f, x: jnp.where(f, x, 0)}, APART)
add_ops("e", ["short"], ["vector"], {"from half": lambda h: h.astype(jnp.float32)}, APART)
add_ops("e", ["figure", "vector"], ["vector"], {"scaled": lambda y, x: x * y}, APART)

# A learner's, which are used together: a slope as it is, and what replicas agree on of it.
OPS["g slope"] = Op(
    ("rows", "whole"), ("whole",), lambda n, x, w: jax.grad(agreements.loss)(w, x), AGREED
)
OPS["g agreed"] = Op(("whole",), ("whole",), lambda n, slope: agreements.mean(slope), AGREED)
