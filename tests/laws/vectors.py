"""What users write of one vector, two, a key and a vector: under `vmap` a row at a time.

All trace for any number of environments.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDE = 4


def tame(x: Any) -> Any:
    """Numbers between -1 and 1 that large ones don't saturate; other dtypes as they are."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sin(x)
    return x


def wide(x: Any) -> Any:
    """Anything as a vector [WIDE] of float32."""
    x = jnp.asarray(x).astype(jnp.float32)
    if x.shape == (WIDE,):
        return x
    flat = x.reshape(-1)[:WIDE]
    return jnp.tile(flat, WIDE // flat.size + 1)[:WIDE]


def positive(x: Any) -> Any:
    """A well-conditioned 2x2 matrix of a vector [4]."""
    square = x.reshape(2, 2)
    return square @ square.T + jnp.eye(2)


EDGES = np.linspace(-1, 1, 5)
PLACES = np.array([2, 0, 3, 1])
HALVES = np.array([0, 1, 0, 1])


@jax.custom_vjp
def steep(x):
    return jnp.tanh(x)


steep.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - 0.5 * jnp.tanh(x) ** 2),))


@jax.custom_jvp
def gentle(x):
    return jnp.sin(x)


gentle.defjvp(lambda primals, tangents: (gentle(primals[0]), 0.5 * tangents[0]))


@jax.jit
def helped(x):
    return jnp.where(x > 0, x, 0.1 * x) + NUMBERS


NUMBERS = np.arange(WIDE) / WIDE


def until_small(x):
    return lax.while_loop(lambda c: (c[0] < 3) & (jnp.abs(c[1]).max() > 0.3), halved, (0, x))[1]


def halved(carry):
    return carry[0] + 1, 0.5 * carry[1]


def turned(x):
    return lax.scan(lambda c, y: (0.5 * c + y, jnp.sin(c)), x[0], x, unroll=2)[1]


def chosen(x):
    branches = [jnp.sin, jnp.cos, lambda y: 0.5 * y]
    return lax.switch(jnp.argmax(x) % 3, branches, x)


def newton(x):
    return lax.custom_root(
        lambda y: y + 0.2 * y**3 - x,
        jnp.zeros_like(x),
        lambda f, y: lax.fori_loop(0, 6, lambda _, y: y - f(y) / (1 + 0.6 * y**2), y),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


def bits(x):
    return (lax.bitcast_convert_type(x, jnp.uint32) >> 23).astype(jnp.float32) / 64


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME")


def filtered(x):
    kernel = jnp.array([[[0.5, 0.3, 0.2]]])
    return lax.conv_general_dilated(x[None, None], kernel, (1,), "SAME")[0, 0]


def conjugate(x):
    return jax.scipy.sparse.linalg.cg(lambda v: positive(x) @ v, x[:2], maxiter=2)[0]


ONE_VECTOR: dict[str, Callable[[Any], Any]] = {
    # Element by element, and dtypes.
    "tanh": jnp.tanh,
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "power": lambda x: (jnp.abs(x) + 0.1) ** 1.5,
    "where": lambda x: jnp.where(x > 0, x, -1.0),
    "select": lambda x: jnp.select([x > 0.5, x < -0.5], [x, 2 * x], 0.0),
    "piecewise": lambda x: jnp.piecewise(x, [x < 0], [lambda y: -y, lambda y: y**2]),
    "erf_inv": lambda x: lax.erf_inv(0.5 * jnp.tanh(x)),
    "stop_gradient": lambda x: x - 0.5 * lax.stop_gradient(x),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "float16": lambda x: jnp.tanh(x.astype(jnp.float16)).astype(jnp.float32),
    "float8": lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "int8": lambda x: (x * 20).astype(jnp.int8).astype(jnp.float32) / 20,
    "uint32": lambda x: (jnp.abs(x * 9).astype(jnp.uint32) ^ 5).astype(jnp.float32) / 9,
    "bool": lambda x: (x > 0).astype(jnp.float32) - (x < -0.2),
    "complex": lambda x: jnp.abs(x + 0.5j * x[::-1]),
    "bits": bits,
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 10),
    "barrier": lambda x: lax.optimization_barrier(x) + 1,
    "from NumPy": lambda x: x + NUMBERS.astype(np.float32),
    # Over features.
    "sum": jnp.sum,
    "mean": lambda x: x - x.mean(),
    "std": lambda x: (x - x.mean()) / (x.std() + 0.5),
    "max": jnp.max,
    "prod": jnp.prod,
    "any": lambda x: jnp.any(x > 0.5),
    "all": lambda x: jnp.all(x > -0.5),
    "argmax": jnp.argmax,
    "argmin": lambda x: jnp.argmin(x) / 4,
    "softmax": jax.nn.softmax,
    "logsumexp": jax.nn.logsumexp,
    "norm": lambda x: x / (1 + jnp.linalg.norm(x)),
    "median": jnp.median,
    "quantile": lambda x: jnp.quantile(x, jnp.array([0.25, 0.75])),
    "reduce": lambda x: lax.reduce(x, 1.0, lax.mul, (0,)),
    "reduced in its own way": lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * b, (0,)),
    "pooled": pooled,
    "pooled by products": lambda x: lax.reduce_window(x, 1.0, lax.mul, (2,), (1,), "SAME"),
    "trapezoid": jnp.trapezoid,
    # Sorted, cumulative, by segments.
    "sort": jnp.sort,
    "argsort": lambda x: jnp.argsort(x) / 4,
    "ranks": lambda x: jnp.argsort(jnp.argsort(x)) / 4,
    "sorted pairs": lambda x: lax.sort((x, jnp.arange(4.0)), num_keys=1)[1],
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "nearly the top": lambda x: lax.approx_max_k(x, 2)[0],
    "top places": lambda x: lax.top_k(x, 2)[1] / 4,
    "searchsorted": lambda x: jnp.searchsorted(EDGES, x) / 4,
    "digitize": lambda x: jnp.digitize(x, EDGES) / 4,
    "histogram": lambda x: jnp.histogram(x, EDGES)[0] / 4,
    "unique": lambda x: jnp.unique(jnp.round(x), size=4, fill_value=0.0),
    "nonzero": lambda x: jnp.nonzero(x > 0, size=4, fill_value=3)[0] / 4,
    "cumsum": jnp.cumsum,
    "cumprod": jnp.cumprod,
    "cummax": lax.cummax,
    "cumlogsumexp": lax.cumlogsumexp,
    "associative_scan": lambda x: lax.associative_scan(jnp.maximum, x),
    "associative_scan of pairs": lambda x: lax.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (0.5 + 0 * x, x)
    )[1],
    "segment_sum": lambda x: jax.ops.segment_sum(x, HALVES, 2),
    "segment_max": lambda x: jax.ops.segment_max(x, HALVES, 2),
    "bincount": lambda x: jnp.bincount((x > 0).astype(int), x, length=2),
    # Indexed, cut and joined.
    "set": lambda x: x.at[0].set(0.5),
    "set by place": lambda x: x.at[jnp.argmax(x)].set(-0.5),
    "add at": jnp.zeros(3).at[jnp.array([0, 2, 0, 1])].add,
    "multiply at": lambda x: x.at[1:3].multiply(0.5),
    "max at": lambda x: x.at[PLACES].max(0.2),
    "permuted": lambda x: x[PLACES],
    "taken": lambda x: jnp.take(x, jnp.argsort(x)[:2]),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(-x), 0),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.argmax(x) // 2,), (2,)),
    "dynamic_update": lambda x: lax.dynamic_update_slice(x, x[:2] * 2, (jnp.argmax(x) // 2,)),
    "rolled": lambda x: jnp.roll(x, 1),
    "flipped": jnp.flip,
    "padded": lambda x: jnp.pad(x, (1, 1))[:4],
    "wrapped": lambda x: jnp.pad(x, 2, mode="reflect")[1:5],
    "joined": lambda x: jnp.concatenate([x[2:], x[:2] * 2]),
    "split": lambda x: jnp.split(x, 2)[1],
    "stacked": lambda x: jnp.stack([x, -x], 1).mean(1) + x,
    "repeated": lambda x: jnp.repeat(x, 2).reshape(4, 2).sum(1),
    "tiled": lambda x: jnp.tile(x[:2], 2),
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x), 4),
    "diff": jnp.diff,
    "interp": lambda x: jnp.interp(x, EDGES, EDGES**2),
    "strided": lambda x: x[::2],
    # Linear algebra.
    "outer": lambda x: jnp.outer(x, x).sum(0),
    "einsum": lambda x: jnp.einsum("ij,jk->ki", x.reshape(2, 2), x.reshape(2, 2)),
    "kron": lambda x: jnp.kron(x[:2], x[2:]),
    "cholesky": lambda x: jnp.linalg.cholesky(positive(x)),
    "solve": lambda x: jnp.linalg.solve(positive(x), x[:2]),
    "inv": lambda x: jnp.linalg.inv(positive(x)),
    "det": lambda x: jnp.linalg.det(positive(x)),
    "qr": lambda x: jnp.abs(jnp.linalg.qr(positive(x))[1]),
    "eigh": lambda x: jnp.linalg.eigh(positive(x))[0],
    "svd": lambda x: jnp.linalg.svd(positive(x), compute_uv=False),
    "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(positive(x), x[:2]),
    "cho_solve": lambda x: jax.scipy.linalg.cho_solve((positive(x), True), x[:2]),
    "expm": lambda x: jax.scipy.linalg.expm(0.3 * x.reshape(2, 2)),
    "conjugate gradients": conjugate,
    "convolve": lambda x: jnp.convolve(x, jnp.array([0.5, 0.5]), "same"),
    "convolution": filtered,
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    # Control flow.
    "scan": turned,
    "reversed scan": lambda x: lax.scan(lambda c, y: (c + y, c * y), 0.0, x, reverse=True)[1],
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + 0.1 * i, x),
    "while_loop": until_small,
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "switch": chosen,
    "map": lambda x: lax.map(lambda y: jnp.sin(y) * y, x),
    "map in batches": lambda x: lax.map(jnp.cos, x, batch_size=2),
    # Transformations.
    "custom_vjp": jax.grad(lambda x: steep(x).sum()),
    "custom_jvp": jax.grad(lambda x: gentle(x).sum()),
    "checkpoint": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(y) ** 2)(x).sum()),
    "jitted helper": helped,
    "vmap": jax.vmap(lambda y: jnp.sin(y) + y),
    "nested vmap": lambda x: jax.vmap(lambda a: jax.vmap(lambda b: a * b + b)(x).sum())(x),
    "grad": jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)),
    "hessian": lambda x: jax.hessian(lambda y: jnp.prod(jnp.cos(y)))(x).sum(0),
    "jacfwd": lambda x: jax.jacfwd(lambda y: jnp.sin(y) * y[0])(x).sum(0),
    "jvp": lambda x: jax.jvp(lambda y: jnp.cumsum(jnp.sin(y)), (x,), (0.5 * x,))[1],
    "vjp": lambda x: jax.vjp(lambda y: jnp.sort(y) ** 2, x)[1](x)[0],
    "linearized": lambda x: jax.linearize(jnp.tanh, x)[1](x),
    "custom_root": newton,
    "drawn from a constant": lambda x: x + 0.1 * jax.random.normal(jax.random.key(3), (4,)),
    "named": jax.named_call(lambda x: 2 * x, name="doubled"),
}

TWO_VECTORS: dict[str, Callable[[Any, Any], Any]] = {
    "plus": lambda x, w: x + 0.7 * w,
    "less": lambda x, w: x - w,
    "atan2": lambda x, w: jnp.arctan2(x, w + 2),
    "minimum": jnp.minimum,
    "where less": lambda x, w: jnp.where(x > w, x, 0.5 * w),
    "matrix": lambda x, w: (jnp.outer(w, w) + jnp.eye(4)) @ x,
    "layer": lambda x, w: jnp.tanh(x @ (jnp.tile(w, (4, 1)) * EDGES[:4, None])),
    "dot": jnp.dot,
    "matrix product": lambda x, w: x.reshape(2, 2) @ w.reshape(2, 2),
    "einsum of two": lambda x, w: jnp.einsum("ij,kj->ik", x.reshape(2, 2), w.reshape(2, 2)),
    "logaddexp": jnp.logaddexp,
    "joined by features": lambda x, w: jnp.concatenate([x[:2], w[2:]]),
    "looked up": lambda x, w: w[jnp.argmax(x)],
    "looked up in order": lambda x, w: w[jnp.argsort(x)],
    "scattered": lambda x, w: w.at[jnp.argmax(x)].add(x[0]),
    "searched": lambda x, w: jnp.searchsorted(jnp.sort(w), x) / 4,
    "solved": lambda x, w: jnp.linalg.solve(positive(w), x[:2]),
    "convolved": lambda x, w: jnp.convolve(x, w[:2], "same"),
    "choice": lambda x, w: lax.cond(w[0] > 0, jnp.sin, jnp.cos, x),
    "loop to a limit": lambda x, w: lax.while_loop(
        lambda c: c[0] < 2 + (w[0] > 0), lambda c: (c[0] + 1, jnp.sin(c[1]) + w), (0, x)
    )[1],
    "scan over": lambda x, w: lax.scan(lambda c, y: (jnp.sin(c + y), c), x, w)[0],
    "gradient by": lambda x, w: jax.grad(lambda v: jnp.sum((v * x - 1) ** 2))(w),
    "gradient in": jax.grad(lambda x, w: jnp.sum(jnp.tanh(x * w) ** 2)),
    "product of gradients": lambda x, w: jax.jvp(
        jax.grad(lambda v: jnp.sum(jnp.cos(v * x))), (w,), (x,)
    )[1],
    "slice at": lambda x, w: lax.dynamic_slice(x, (jnp.argmax(w) // 2,), (2,)),
    "interpolated": lambda x, w: jnp.interp(x, jnp.sort(w), w),
    "closed over": lambda x, w: jax.jit(lambda y: y * w + w.sum())(x),
    "bfloat16 of two": lambda x, w: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(
        jnp.float32
    ),
}


def walked(key, x):
    key, now = jax.random.split(key)
    return key, x + 0.5 * jax.random.normal(now, x.shape)


def chosen_by_chance(key, x):
    key, now = jax.random.split(key)
    return key, jax.nn.one_hot(jax.random.categorical(now, x), x.shape[-1])


def shuffled(key, x):
    key, now, last = jax.random.split(key, 3)
    kept = jax.random.bernoulli(last, 0.7, x.shape)
    return key, jnp.where(kept, jax.random.permutation(now, x), 0.0)


def drawn_by_chances(key, x):
    key, now = jax.random.split(key)
    return key, jax.random.beta(now, 1 + jnp.abs(x), 2.0)


def folded(key, x):
    now = jax.random.fold_in(key, 7)
    return jax.random.fold_in(key, 1), x + jax.random.uniform(now, x.shape, minval=-1)


def drawn_in_a_loop(key, x):
    def turn(c, _):
        key, now = jax.random.split(c[0])
        return (key, jnp.sin(c[1] + jax.random.gumbel(now, x.shape))), None

    return lax.scan(turn, (key, x), length=2)[0]


# Of a key and a vector: the next key, and a vector.
KEYED = {
    "walked": walked,
    "chosen by chance": chosen_by_chance,
    "shuffled": shuffled,
    "drawn by chances": drawn_by_chances,
    "folded": folded,
    "drawn in a loop": drawn_in_a_loop,
}

# Of the number of environments, which a per-environment function closes over, and a vector.
CLOSED: dict[str, Callable[[int, Any], Any]] = {
    "divided by the count": lambda n, x: x / n,
    "count as NumPy": lambda n, x: x + np.full(4, 1 / n, np.float32),
    "as many turns as the count": lambda n, x: lax.fori_loop(0, n, lambda _, y: 0.9 * y + 0.1, x),
    "slice by the count": lambda n, x: x[n % 3],
    "branch on the count": lambda n, x: x if n >= 8 else 0.5 * x,
    "power of the count": lambda n, x: jnp.abs(x) ** (n / 4),
    "the first of the count": lambda n, x: x * min(4, n),
    "table of the count": lambda n, x: jnp.take(np.linspace(0, 1, n, dtype=np.float32), 1) + x,
}
