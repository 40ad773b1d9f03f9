"""How replicas agree in users' loops: rightly, and in ways that only look right.

An agreement that Shoal doesn't have (yet) is left out.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shoal
from laws.batches import WEIGHTS
from laws.vectors import WIDE

mean, gather = shoal.mean, shoal.gather
add, most, least, weighted, moments, mine = (
    getattr(shoal, name, None)
    for name in ("sum", "max", "min", "weighted_mean", "moments", "scatter")
)


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ WEIGHTS) @ w - x[:, 0]) ** 2)


def learnt(x, w):
    return w - 0.5 * mean(jax.grad(loss)(w, x))


def learnt_twice(x, w):
    def turn(w, rate):
        return w - rate * mean(jax.grad(loss)(w, x)), None

    return lax.scan(turn, w, jnp.array([0.5, 0.25]))[0]


def clipped_after(x, w):
    slope = mean(jax.grad(loss)(w, x))
    return w - slope / jnp.maximum(1.0, 4 * jnp.linalg.norm(slope))


def clipped_before(x, w):
    slope = jax.grad(loss)(w, x)
    return w - mean(slope / jnp.maximum(1.0, 4 * jnp.linalg.norm(slope)))


def standardised(x):
    middle = mean(x.mean(0))
    return (x - middle) / (0.5 + jnp.sqrt(mean(((x - middle) ** 2).mean(0))))


def locally_standardised(x, w):
    y = (x - x.mean(0)) / (0.5 + x.std(0))
    return w + mean((y**2 * x).mean(0))


def masked_mean(x):
    seen = x > 0
    return mean(jnp.where(seen, x, 0).sum(0) / (1 + seen.sum(0)))


def masked_ratio(x):
    seen = x > 0
    return mean(jnp.where(seen, x, 0).mean(0)) / (0.1 + mean(seen.mean(0)))


def contrasted_locally(x, w):
    logits = x @ jnp.tanh(x @ WEIGHTS).T
    return w + mean(jax.nn.log_softmax(logits, axis=1).diagonal().mean()) * 0.3


def by_chance_of_all(x):
    return x * 0.5 + lax.cond(mean(x.mean()) > 0, lambda: 0.3, lambda: -0.1)


def agreed_in_a_branch(x, w):
    return lax.cond(w[0] > 0, lambda: mean(x.mean(0)), lambda: 0.5 * w)


def agreed_in_own_branch(x, w):
    return lax.cond(x.sum() > 0, lambda: mean(x.mean(0)), lambda: 0.5 * w)


def agreed_in_own_loop(x, w):
    def turn(c):
        return c[0] * 0.5, c[1] + mean((x * c[0]).mean(0))

    return lax.while_loop(lambda c: jnp.abs(c[0]).max() > 0.3, turn, (x, w))[1]


def agreed_until(x, w):
    def turn(c):
        return c[0] + 1, jnp.sin(c[1] + mean(x.mean(0)))

    return lax.while_loop(lambda c: (c[0] < 3) & (jnp.abs(c[1]).max() < 0.95), turn, (0, w))[1]


def fisher(x, w):
    """TRPO's step: conjugate gradients over products that replicas agree on."""

    def product(v):
        return mean(jax.jvp(jax.grad(lambda u: loss(u, x)), (w,), (v,))[1]) + v

    slope = mean(jax.grad(loss)(w, x))
    return jax.scipy.sparse.linalg.cg(product, slope, maxiter=2)[0]


def unsigned(x):
    """How many more are large than small, in numbers that have no sign."""
    return (x > 0.2).sum(0, dtype=jnp.uint32) - (x < -0.2).sum(0, dtype=jnp.uint32)


def delayed_mean(x, w):
    """Linear in a mean, so a mean."""
    return w + mean(2 * x.mean(0)[::-1] - 0.3 * x.mean(0))


# Of rows and a shared vector to a shared vector.
WHOLE_AGREED: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda x, w: mean(x.mean(0)),
    "mean of all numbers": lambda x, w: w * mean(x.mean()),
    "learnt": learnt,
    "learnt twice": learnt_twice,
    "clipped after": clipped_after,
    "masked ratio": lambda x, w: masked_ratio(x),
    "agreed in a branch": agreed_in_a_branch,
    "agreed until": agreed_until,
    "fisher": fisher,
    "linear in a mean": delayed_mean,
    "gathered max": lambda x, w: gather(x).max(0),
    "gathered mean": lambda x, w: gather(x).mean(0),
    "gathered median": lambda x, w: jnp.median(gather(x), axis=0),
    "gathered argsort": lambda x, w: gather(x)[jnp.argsort(gather(x).sum(1))[0]],
    "gathered logits": lambda x, w: jnp.tanh(gather(x) @ gather(x).T).sum(0).mean() * w,
    "gathered flat": lambda x, w: gather(x).reshape(-1)[:WIDE],
    "gathered by negative axis": lambda x, w: gather(x, axis=-2).min(0),
    "gathered slope": lambda x, w: jax.grad(lambda v: loss(v, gather(x)))(w),
    "gathered shuffle": lambda x, w: jax.random.permutation(jax.random.key(1), gather(x))[0],
}
WHOLE_MISAGREED: dict[str, Callable[[Any, Any], Any]] = {
    "mean of a sum": lambda x, w: mean(x.sum(0)),
    "mean of a max": lambda x, w: mean(x.max(0)),
    "mean of a min": lambda x, w: w + mean(x.min(0)),
    "mean of a masked mean": lambda x, w: masked_mean(x),
    "mean of the first": lambda x, w: mean(x[0]),
    "mean of a spread": lambda x, w: mean(x.std(0)),
    "mean of a squared mean": lambda x, w: mean(x.mean(0) ** 2) * 3,
    "clipped before": clipped_before,
    "locally standardised": locally_standardised,
    "contrasted locally": contrasted_locally,
    "mean of best": lambda x, w: mean(jnp.sort(x, axis=0)[-1]),
    "mean of a product": lambda x, w: mean(jnp.prod(1 + 0.3 * x, axis=0)),
    "mean by the count": lambda x, w: mean(x.sum(0) / 4),
    "mean plus the count": lambda x, w: mean(x.mean(0)) + 1 / x.shape[0],
    "agreed in own branch": agreed_in_own_branch,
    "agreed in own loop": agreed_in_own_loop,
    "mean filled with ones": lambda x, w: mean(
        x.mean(0).at[np.array([0, 9, 1, 2])].get(mode="fill", fill_value=1.0)
    ),
    "mean of unsigned differences": lambda x, w: mean(unsigned(x).astype(jnp.float32)) / 8,
    "mean of a log": lambda x, w: mean(jax.nn.logsumexp(x, axis=0)),
    "gathered means": lambda x, w: gather(x.mean(0, keepdims=True)).sum(0),
}
# Of rows to rows.
ROWS_AGREED: dict[str, Callable[[Any], Any]] = {
    "less the agreed mean": lambda x: x - mean(x.mean(0)),
    "standardised": standardised,
    "by chance of all": by_chance_of_all,
    "less the best of all": lambda x: x - gather(x).max(0),
    "against all": lambda x: jnp.tanh(x @ gather(x).T) @ gather(x),
}
ROWS_MISAGREED: dict[str, Callable[[Any], Any]] = {
    "mean of rows with rows": lambda x: x - mean(x),
    "less the mean of max": lambda x: x - mean(x.max(0)),
    "numbered after": lambda x: mean(x.mean(0)) * jnp.arange(x.shape[0])[:, None],
}

if add:
    WHOLE_AGREED |= {
        "sum": lambda x, w: add(x.sum(0)),
        "sum of ints": lambda x, w: add((x > 0).sum(0)) / 4,
        "ratio of sums": lambda x, w: (
            add(jnp.where(x > 0, x, 0).sum(0)) / (1 + add((x > 0).sum(0)))
        ),
        "sum of unsigned differences": lambda x, w: add(unsigned(x)).astype(jnp.float32) / 2.0**32,
        "taken off at places": lambda x, w: add(jnp.zeros(WIDE).at[x.argmax(1)].subtract(x[:, 0])),
        "moment sum": lambda x, w: add(jnp.einsum("nk,nj->kj", x, x)).sum(0),
    }
    WHOLE_MISAGREED |= {
        "sum of a mean": lambda x, w: add(x.mean(0)),
        "sum of a max": lambda x, w: add(x.max(0)),
        "sum of a square": lambda x, w: add(x.sum(0) ** 2),
        "sum plus one": lambda x, w: add(x.sum(0) + 1),
    }
    ROWS_MISAGREED |= {"sum of rows with rows": lambda x: x - add(x)}
if most and least:
    WHOLE_AGREED |= {
        "max": lambda x, w: most(x.max(0)),
        "min": lambda x, w: least(x.min(0)),
        "any": lambda x, w: most(jnp.any(x > 0.8, axis=0)).astype(jnp.float32),
        "all": lambda x, w: least(jnp.all(x > -0.8, axis=0)).astype(jnp.float32),
        "max of ints": lambda x, w: most(x.argmax(1).max(0)) * w,
    }
    WHOLE_MISAGREED |= {
        "max of a mean": lambda x, w: most(x.mean(0)),
        "max of a min": lambda x, w: most(x.min(0)),
        "min of a sum": lambda x, w: least(x.sum(0)),
        "max of a turned max": lambda x, w: most(-x.max(0)),
        "max of bits": lambda x, w: most(jnp.bitwise_or.reduce(1 << x.argmax(1))) * w,
        "place of the max": lambda x, w: most(x.argmax(0)) * w,
    }
if weighted:
    WHOLE_AGREED |= {
        "weighted mean": lambda x, w: weighted(x, x > 0, axis=0),
        "weighted mean of all": lambda x, w: w * weighted(x, jnp.abs(x)),
        "weighted by row": lambda x, w: weighted(x, (x[:, :1] > 0).astype(jnp.float32), axis=0),
    }
if moments:
    WHOLE_AGREED |= {"moments": lambda x, w: jnp.sqrt(moments(x, 0)[1] + 0.1) * moments(x, 0)[0]}
    ROWS_AGREED |= {
        "standardised by moments": lambda x: (x - moments(x, 0)[0]) / (0.5 + moments(x, 0)[1])
    }
# What need not be what one replica alone would have, as the author says.
WHOLE_APPROXIMATE: dict[str, Callable[[Any, Any], Any]] = {}
if "approximate" in inspect.signature(mean).parameters:
    WHOLE_APPROXIMATE = {
        "about the mean of a max": lambda x, w: mean(x.max(0), approximate=True),
        "about clipped": lambda x, w: (
            w - mean(jnp.clip(jax.grad(loss)(w, x), -0.1, 0.1), approximate=True)
        ),
    }
if mine:

    def ranked_by_all(x):
        rank = jnp.argsort(jnp.argsort(gather(x.sum(1))))
        return x * mine(rank / rank.shape[0] - 0.5)[:, None]

    def best_half_of_all(x):
        everyone = gather(x)
        best = jnp.argsort(-everyone.sum(1))[: max(1, everyone.shape[0] // 2)]
        return mine(jnp.resize(everyone[best], everyone.shape))

    def contrasted_with_all(x):
        everyone = gather(x)
        logits = everyone @ jnp.tanh(everyone @ WEIGHTS).T
        return x * mine(jax.nn.log_softmax(logits, axis=1).diagonal())[:, None]

    ROWS_AGREED |= {
        "ranked by all": ranked_by_all,
        "best half of all": best_half_of_all,
        "contrasted with all": contrasted_with_all,
        "turned over by all": lambda x: mine(gather(x)[::-1]),
        "sorted by all": lambda x: mine(jnp.sort(gather(x), axis=0)),
        "normalised by all": lambda x: mine(
            (gather(x) - gather(x).mean(0)) / (0.5 + gather(x).std(0))
        ),
    }
