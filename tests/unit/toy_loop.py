"""A small loop for tests of errors: rows that move, each with its own key, and one weight.

A line that an error must name ends with `# here: ...`, which `line` looks up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shoal
from shoal import PER_BATCH, PER_ENV, Fragment

TWO_CPUS = shoal.Cluster((shoal.Host("here", 2, (shoal.Device("cpu", 0), shoal.Device("cpu", 1))),))


def line(mark):
    """The location of the one line in this folder that ends with the comment `# here: mark`."""
    (found,) = [
        f"{path.parent.name}/{path.name}:{number}"
        for path in Path(__file__).parent.glob("*.py")
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if text.endswith(f"  # here: {mark}")
    ]
    return found


def check_error(kind, do, *words):
    """Check that `do` raises an error of exactly this type, with all these words in its message."""
    with pytest.raises(shoal.ShoalError) as caught:
        do()
    error = caught.value
    assert type(error) is kind, error
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    assert error.fix, "the error has no fix"
    return error


class State(NamedTuple):
    w: jax.Array
    keys: jax.Array
    x: jax.Array
    age: jax.Array


@shoal.stage(per="env")  # here: move
def move(key, x, *, w):
    key, now = jax.random.split(key)
    return key, x + 0.1 * w + 0.01 * jax.random.normal(now)


@shoal.stage  # here: fit
def fit(w, xs):
    return w - 0.1 * jnp.mean(xs), jnp.mean(xs)


@shoal.stage
def fit_agreeing(w, xs):
    level = shoal.mean(jnp.mean(xs))
    return w - 0.1 * level, level


@dataclass(frozen=True)
class Toy:
    """The loop whose tick is `turn`."""

    turn: Callable[[State], tuple[Any, Any]]

    def init(self, key, env, envs):
        rows = jnp.arange(envs)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        return State(jnp.float32(1), keys, 0.1 * rows, jnp.int32(0))

    def tick(self, env, state):  # here: tick
        return self.turn(state)


def moved(state):
    def once(carry, _):
        keys, x = move(*carry, w=state.w)
        return (keys, x), x

    return lax.scan(once, (state.keys, state.x), length=3)


def plain(state):
    (keys, x), xs = moved(state)
    w, loss = fit(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


def agreeing(state):
    (keys, x), xs = moved(state)
    w, loss = fit_agreeing(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


@cache
def traced(turn):
    return shoal.trace(Toy(turn), envs=8)


@cache
def planned(turn, distribution):
    return shoal.plan(traced(turn), distribution, TWO_CPUS)


def policy(*fragments, wires=()):
    return shoal.DistributionPolicy("mine", fragments, wires)


COARSE = shoal.single_learner_coarse(2)
LAGGED = shoal.single_learner_coarse(2, lag=1)
BOTH_TWICE = policy(Fragment("actor", (PER_ENV,), 2), Fragment("learner", (PER_BATCH,), 2))
