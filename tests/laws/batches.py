"""What users write of whole batches: functions of rows [n, WIDE], by what they do to rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shoal
from laws.vectors import WIDE, positive

WEIGHTS = np.sin(np.arange(WIDE * WIDE).reshape(WIDE, WIDE) + 1.0).astype(np.float32)


def squares(x):
    """A well-conditioned 2x2 matrix for each row."""
    return jax.vmap(positive)(x)


def filtered(x):
    kernel = jnp.array([[[0.5, 0.3, 0.2]]])
    return lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")[:, 0]


def in_pairs(x):
    """2n rows: each with its opposite."""
    both = jnp.concatenate([x, -x])
    there, back = jnp.split(jnp.tanh(both @ WEIGHTS + 0.1), 2)
    return there - 0.5 * back


@shoal.stage(per="env", name="mirror")
def mirror(row):
    return jnp.tanh(1.3 * row + 0.2)


def mirrored(x):
    """Antithetic pairs through a stage that sees 2n rows."""
    there, back = jnp.split(mirror(jnp.concatenate([x, -x])), 2)
    return there - 0.5 * back


def across(x):
    return lax.scan(lambda c, y: (jnp.sin(c + y), c), x[:, 0], x.T)[1].T


def kept(x):
    return x.reshape(x.shape[0], 2, 2).swapaxes(1, 2).reshape(x.shape)


def flat(x):
    return jnp.sin(x.reshape(-1)).reshape(x.shape)


@jax.checkpoint
def layers(x):
    return jnp.tanh(jnp.tanh(x @ WEIGHTS) @ WEIGHTS)


def slope_of_rows(x):
    return jax.grad(lambda y: jnp.sum(layers(y) ** 2))(x)


# Rows to rows, each from its own.
ROWS_APART = {
    "one feature set": lambda x: x.at[:, 0].set(0.5),
    "features added to": lambda x: x.at[:, 1:3].add(x[:, :2]),
    "features permuted": lambda x: x[:, np.array([2, 0, 3, 1])],
    "features sorted": lambda x: jnp.sort(x, axis=1),
    "features ranked": lambda x: jnp.argsort(x, axis=-1) / WIDE,
    "best features": lambda x: jnp.tile(lax.top_k(x, 2)[0], (1, 2)),
    "features summed up": lambda x: jnp.cumsum(x, axis=1),
    "features joined up": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "features turned": lambda x: x[:, ::-1],
    "features rolled": lambda x: jnp.roll(x, 1, axis=1),
    "features padded": lambda x: jnp.pad(x, ((0, 0), (1, 1)))[:, :WIDE],
    "layer of weights": lambda x: x @ WEIGHTS,
    "layers": layers,
    "slope of rows": slope_of_rows,
    "einsum by row": lambda x: jnp.einsum("nk,nj->nk", x, x),
    "einsum with weights": lambda x: jnp.einsum("nk,jk->jn", x, WEIGHTS).T,
    "softmax by row": lambda x: jax.nn.softmax(x, axis=-1),
    "normalised by row": lambda x: (x - x.mean(1, keepdims=True)) / (1 + x.std(1, keepdims=True)),
    "spread max": lambda x: jnp.broadcast_to(x.max(1)[:, None], x.shape),
    "one hot of best": lambda x: jax.nn.one_hot(x.argmax(1), WIDE),
    "own choice": lambda x: x + jnp.take_along_axis(x, x.argmax(1)[:, None], axis=1),
    "masked by row": lambda x: jnp.where((x[:, 0] > 0)[:, None], x, 0.1),
    "batched cholesky": lambda x: jnp.linalg.cholesky(squares(x)).reshape(x.shape),
    "batched solve": lambda x: jnp.tile(jnp.linalg.solve(squares(x), x[:, :2, None])[..., 0], 2),
    "batched inverse": lambda x: jnp.linalg.inv(squares(x)).reshape(x.shape),
    "batched qr": lambda x: jnp.abs(jnp.linalg.qr(squares(x))[1]).reshape(x.shape),
    "batched eigenvalues": lambda x: jnp.tile(jnp.linalg.eigh(squares(x))[0], 2),
    "convolution by row": filtered,
    "map over rows": lambda x: lax.map(lambda row: jnp.sin(row) * row.sum(), x),
    "searched by row": lambda x: jnp.searchsorted(np.linspace(-1, 1, 5), x) / 4,
    "flat and back": flat,
    "squares and back": kept,
    "pairs": in_pairs,
    "pairs through a stage": mirrored,
    "pairs beside each other through a stage": lambda x: (
        mirror(jnp.repeat(x, 2, axis=0) * 0.5).reshape(-1, 2, WIDE).sum(1)
    ),
    "a constant for each row after them": lambda x: (
        jnp.sin(jnp.concatenate([x, jnp.full_like(x, 0.3), jnp.ones(x.shape, x.dtype)]))
        .reshape(3, *x.shape)[:2]
        .sum(0)
    ),
    "scan over features": across,
    "zeros like": lambda x: x + jnp.zeros_like(x) + jnp.ones_like(x[:, :1]),
    "twice and halved": lambda x: jnp.repeat(x, 2, axis=0).reshape(-1, 2, WIDE).mean(1) + x,
    "transposed and back": lambda x: jnp.tanh(x.T).T,
    "features joined": lambda x: jnp.concatenate([x, -x], axis=1)[:, 2:6],
    "feature slice": lambda x: jnp.tile(lax.dynamic_slice_in_dim(x, 1, 2, 1), 2),
    "while per row": jax.vmap(
        lambda row: lax.while_loop(lambda r: jnp.abs(r).max() > 0.5, lambda r: 0.6 * r, row)
    ),
    "every other of pairs": lambda x: jnp.tanh(
        jnp.repeat(x, 2, axis=0) * jnp.tile(jnp.array([1.0, -0.5]), x.shape[0])[:, None]
    )[1::2],
    "counted loop": lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + 0.1 * i, x),
    "vmap over columns": jax.vmap(lambda column: jnp.sin(column) + 0.2, 1, 1),
    "unstacked features": lambda x: jnp.stack([x[:, i] * i for i in range(WIDE)], axis=1),
    "as half": lambda x: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "zeros of the shape": lambda x: x + jnp.full((x.shape[0], 1), 0.3),
}

ROWS_SUBTLE = {
    "own choice by number": lambda x: x + x[jnp.arange(x.shape[0]), x.argmax(1)][:, None],
    "set by number": lambda x: x.at[jnp.arange(x.shape[0]), x.argmax(1)].set(0.5),
    "times one": lambda x: jnp.eye(x.shape[0]) @ x,
    "unrolled rows": lambda x: jnp.stack([jnp.sin(row) for row in x]),
    "back and forth": lambda x: jnp.sin(x[::-1])[::-1],
    "there and back": lambda x: jnp.roll(jnp.sin(jnp.roll(x, 1, 0)), -1, 0),
    "scan over rows apart": lambda x: lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, x)[1],
    "reshaped through a half": lambda x: jnp.sin(x.reshape(-1, 2 * WIDE // 2)).reshape(x.shape),
    "sum of one row": lambda x: jnp.cumsum(x[:, None], axis=1)[:, 0],
}


def ranked(x):
    """Evolution strategies' centred ranks."""
    score = x.sum(1)
    rank = jnp.argsort(jnp.argsort(score))
    return x * (rank / x.shape[0] - 0.5)[:, None]


def contrasted(x):
    """InfoNCE: each row against all others."""
    logits = x @ jnp.tanh(x @ WEIGHTS).T
    return x * (jax.nn.log_softmax(logits, axis=1).diagonal() * 0.3)[:, None]


def best_half(x):
    """Truncation selection: the better half, twice."""
    best = jnp.argsort(-x.sum(1))[: max(1, x.shape[0] // 2)]
    return jnp.resize(x[best], x.shape)


def minibatches(x):
    parts = x.reshape(-1, min(2, x.shape[0]), WIDE)
    return (parts - parts.mean(1, keepdims=True)).reshape(x.shape)


def normalised(x):
    return (x - x.mean(0)) / (x.std(0) + 0.5)


def until_all_small(x):
    return lax.while_loop(lambda y: jnp.any(jnp.abs(y) > 0.4), lambda y: 0.7 * y, x)


ROWS_MIXED = {
    "less the mean": lambda x: x - x.mean(0),
    "normalised": normalised,
    "softmax over rows": lambda x: jax.nn.softmax(x, axis=0),
    "rows sorted": lambda x: jnp.sort(x, axis=0),
    "rows ranked": lambda x: jnp.argsort(x, axis=0) / x.shape[0],
    "rows turned": lambda x: x[::-1] + 0.1,
    "rows rolled": lambda x: jnp.roll(x, 1, axis=0),
    "rows summed up": lambda x: jnp.cumsum(x, axis=0),
    "rows joined up": lambda x: lax.associative_scan(jnp.maximum, x),
    "rows differenced": lambda x: x - jnp.concatenate([x[:1], x[:-1]]),
    "first row": lambda x: x - x[0],
    "last row set": lambda x: x.at[-1].set(0.5),
    "every row by the best": lambda x: x * x[x.sum(1).argmax()],
    "pairwise": lambda x: jnp.tanh(x @ x.T) @ x,
    "ranked": ranked,
    "contrasted": contrasted,
    "best half": best_half,
    "minibatches": minibatches,
    "less the mean of pairs": lambda x: (
        x - x.reshape(-1, 2, WIDE).mean(1, keepdims=True).repeat(2, 1).reshape(x.shape)
    ),
    "best of pairs": lambda x: x * jnp.repeat(x.reshape(-1, 2, WIDE).max(1), 2, axis=0),
    "mapped by fours": lambda x: lax.map(jnp.cumsum, x, batch_size=4),
    "scan over rows": lambda x: lax.scan(lambda c, r: (0.5 * c + r, c), jnp.zeros(WIDE), x)[1],
    "less the mean passed beside": lambda x: x - lax.optimization_barrier((x.mean(0), x))[0],
    "median taken off": lambda x: x - jnp.median(x, axis=0),
    "segments of rows": lambda x: (
        x + jax.ops.segment_sum(x, (x[:, 0] > 0).astype(int), 2)[jnp.array([0])]
    ),
    "cond on all": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "while any is large": until_all_small,
    "halves swapped": lambda x: jnp.concatenate([x[x.shape[0] // 2 :], x[: x.shape[0] // 2]]) + 0.1,
    "whitened": lambda x: x @ jnp.linalg.inv(jnp.eye(WIDE) + x.T @ x / x.shape[0]),
    "unrolled with before": lambda x: jnp.stack([a + b for a, b in zip(x, x[::-1], strict=True)]),
    "slope of a mixed loss": jax.grad(lambda x: jnp.sum((x - x.mean(0)) ** 2 * WEIGHTS[0])),
    "flat and turned": lambda x: x.reshape(-1)[::-1].reshape(x.shape),
}

WHOLE_MIXED = {
    "mean of rows": lambda x: x.mean(0),
    "mean passed beside rows": lambda x: lax.optimization_barrier((x, x.mean(0)))[1],
    "bits of rows": lambda x: jnp.bitwise_or.reduce(1 << x.argmax(1)) / 16,
    "sum of rows": lambda x: x.sum(0),
    "max of rows": lambda x: x.max(0),
    "min of rows": lambda x: x.min(0),
    "product of rows": lambda x: jnp.prod(1 + 0.3 * x, axis=0),
    "any row": lambda x: jnp.any(x > 0.8, axis=0).astype(jnp.float32),
    "all rows": lambda x: jnp.all(x > -0.8, axis=0).astype(jnp.float32),
    "place of the best": lambda x: x.argmax(0) / 4,
    "row of the best": lambda x: x[x.sum(1).argmax()],
    "masked mean": lambda x: jnp.where(x > 0, x, 0).sum(0) / (1 + (x > 0).sum(0)),
    "spread of rows": lambda x: x.std(0),
    "moment": lambda x: jnp.einsum("nk,nj->k", x, x),
    "log of a sum": lambda x: jax.nn.logsumexp(x, axis=0),
    "top of rows": lambda x: lax.top_k(x.T, 1)[0][:, 0],
    "first of rows": lambda x: x[0],
    "added at places": lambda x: jnp.zeros(WIDE).at[x.argmax(1)].add(x[:, 0]),
    "quantile of rows": lambda x: jnp.quantile(x, 0.7, axis=0),
    "rows folded": lambda x: lax.scan(lambda c, r: (jnp.sin(c + r), None), jnp.zeros(WIDE), x)[0],
    "norm of all": lambda x: jnp.full(WIDE, jnp.linalg.norm(x)),
    "reduced oddly": lambda x: lax.reduce(x, 0.0, jnp.maximum, (0,)),
    "slope of a mean": lambda x: jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(jnp.ones(WIDE)),
    "own mean in NumPy": lambda x: x.sum(0) / np.float32(x.shape[0]),
}


def epsilons(x):
    """Ape-X's: a constant for each environment, made by NumPy."""
    n = x.shape[0]
    return x + (0.4 ** (1 + 7 * np.arange(n) / max(1, n - 1))).astype(np.float32)[:, None]


@jax.jit
def helped_epsilons(x):
    return epsilons(x) * x


ROWS_COUNTED = {
    "divided by the count": lambda x: x / x.shape[0],
    "count in a scan": lambda x: lax.scan(lambda c, _: (0.8 * c + 0.1, None), x, length=x.shape[0])[
        0
    ],
    "count in a loop": lambda x: lax.fori_loop(0, x.shape[0], lambda i, y: 0.8 * y + 0.1, x),
    "power of the count": lambda x: jnp.abs(0.5 * x) ** (x.shape[0] / 4),
    "integer power": lambda x: (0.5 + 0.4 * x) ** x.shape[0],
    "feature by the count": lambda x: x + x[:, x.shape[0] % 3, None],
    "count as an array": lambda x: x * jnp.array(x.shape[0]) * 0.3,
    "count in NumPy": lambda x: x + np.full(WIDE, 1 / x.shape[0], np.float32),
    "count of ones": lambda x: x + 0.1 * jnp.ones(x.shape[0]).sum(),
    "numbered": lambda x: x + 0.1 * jnp.arange(x.shape[0])[:, None],
    "iota": lambda x: x * lax.broadcasted_iota(jnp.float32, x.shape, 0) * 0.2,
    "linspace": lambda x: x + jnp.linspace(0, 1, x.shape[0])[:, None],
    "epsilons": epsilons,
    "helped epsilons": helped_epsilons,
    "branch on the count": lambda x: x if x.shape[0] >= 8 else 0.5 * x,
    "small branch": lambda x: x * 2 if x.shape[0] > 3 else x,
    "at most four": lambda x: x * min(4, x.shape[0]) * 0.3,
    "count modulo": lambda x: x * (x.shape[0] % 3),
    "rolled by the count": lambda x: jnp.roll(x, x.shape[0] % 3 + x.shape[0] // 8, axis=1),
    "count clipped": lambda x: jnp.clip(x, -1, 2 / x.shape[0]),
    "triangle": lambda x: jnp.tril(jnp.ones((x.shape[0],) * 2)) @ x * 0.3,
    "drawn from a constant": lambda x: x + jax.random.normal(jax.random.key(5), x.shape),
    "size": lambda x: x / x.size,
    "len": lambda x: x + 1 / len(x),
    "formatted": lambda x: x * {4: 1.0, 8: 0.5}.get(x.shape[0], 0.25),
    "padded by the count": lambda x: jnp.pad(x, ((0, 0), (x.shape[0],) * 2))[:, 2 : 2 + WIDE],
    "segments by the count": lambda x: (
        x + jax.ops.segment_sum(jnp.ones(12), np.arange(12) % x.shape[0], 12)[0] * 0.1
    ),
}
