"""Values that Python drew or read during tracing are found by tracing twice, with their line."""

import random
import time
import weakref
from dataclasses import dataclass
from time import time as now
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shoal
from shoal.errors import TraceError
from shoal.tracing.frozen import check_not_frozen, frozen_values
from shoal.tracing.trace import Origin
from unit.toy_loop import TWO_CPUS, Toy, check_error, line, plain

CONSTANT = np.random.default_rng(0).normal(size=3)


@shoal.stage
def noisy_stage(w):
    return w + np.random.normal()  # here: drawn in a stage


@shoal.stage(per="env")
def noisy_rows(x):
    return x + np.random.normal(size=3)[0]  # here: drawn for each


@jax.jit
def noisy_helper(w):
    return w * np.random.normal(size=3)  # here: drawn in a helper


def in_tick(w, x):
    return w + np.random.normal(), x  # here: drawn in tick


def in_numpy_array(w, x):
    return w + np.random.normal(size=3).sum(), x  # here: drawn as an array


def constant(w, x):
    return w + jnp.asarray(np.random.normal(size=4)).sum(), x  # here: drawn as a constant


def clock(w, x):
    return w + time.perf_counter_ns() % 9973, x  # here: clock


def coarse_clock(w, x):
    return w + time.time(), x  # here: the time, which float32 rounds to minutes


def clock_by_name(w, x):
    return w + now(), x  # here: the time under another name


def clock_of_an_object(w, x):
    return w + WATCH.read(), x  # here: the time of an object


def clock_branch(w, x):
    return (jnp.sin(w) if int(now()) % 2 else jnp.cos(w)), x  # here: a branch on the time


def drawn_branch(w, x):
    return (jnp.sin(w) if np.random.random() < 0.5 else jnp.cos(w)), x  # here: a drawn branch


def python_branch(w, x):
    return (jnp.sin(w) if random.random() < 0.5 else jnp.cos(w)), x  # here: drawn by Python


def generator_branch(w, x):
    return (jnp.sin(w) if RNG.random() < 0.5 else jnp.cos(w)), x  # here: drawn by a generator


def new_generator_branch(w, x):
    for _ in range(np.random.default_rng().integers(50)):
        w = jnp.sin(w)  # here: drawn by a new generator
    return w, x


def count_of_turns(w, x):
    turns = COUNTS.pop()
    return lax.fori_loop(0, turns, lambda _, w: w + 1.0, w), x  # here: count


def branch(w, x):
    return (jnp.sin(w) if COUNTS.pop() % 2 else jnp.cos(w)), x  # here: frozen branch


def in_a_scan(w, x):
    return lax.scan(lambda w, _: (w + random.random(), None), w, length=2)[0], x  # here: in a scan


def in_a_cond(w, x):
    return lax.cond(w > 0, lambda w: w, lambda w: w + random.random(), w), x  # here: in a cond


def in_a_stage(w, x):
    return noisy_stage(w), x


def in_rows(w, x):
    return w, noisy_rows(x)


def in_a_helper(w, x):
    return noisy_helper(jnp.ones(3)).sum() + w, x


def returned(w, x):
    return jnp.float32(random.random()), x


class Watch:
    def __init__(self, read):
        self.read = read


COUNTS: list[int] = []
RNG, WATCH = np.random.default_rng(1), Watch(time.time)
FROZEN = {
    in_tick: "drawn in tick",
    in_numpy_array: "drawn as an array",
    constant: "drawn as a constant",
    clock: "clock",
    coarse_clock: "the time, which float32 rounds to minutes",
    clock_by_name: "the time under another name",
    clock_of_an_object: "the time of an object",
    clock_branch: "a branch on the time",
    drawn_branch: "a drawn branch",
    python_branch: "drawn by Python",
    generator_branch: "drawn by a generator",
    new_generator_branch: "drawn by a new generator",
    count_of_turns: "count",
    branch: "frozen branch",
    in_a_scan: "in a scan",
    in_a_cond: "in a cond",
    in_a_stage: "drawn in a stage",
    in_rows: "drawn for each",
    in_a_helper: "drawn in a helper",
    returned: "",
}


@dataclass(frozen=True)
class Loop:
    turn: Any

    def init(self, key, env, envs):
        return jnp.zeros(()), jnp.zeros(envs)

    def tick(self, env, state):
        return self.turn(*state), {}


@pytest.mark.parametrize("turn", FROZEN, ids=lambda turn: turn.__name__)
def test_values_drawn_in_python_are_found_with_their_line(turn):
    COUNTS[:] = range(20, 0, -1)
    # All generators begin with two numbers on the same side of a half.
    np.random.seed(2)
    random.seed(0)
    error = check_error(
        TraceError, lambda: check_not_frozen(Origin(Loop(turn), None), 4), "tick", "jax.random"
    )
    assert error.where == line(FROZEN[turn]) if FROZEN[turn] else "test_frozen" in error.where


def test_a_number_that_init_drew_is_found():
    class Drawn(Loop):
        def init(self, key, env, envs):
            return jnp.zeros(()) + np.random.normal(), jnp.zeros(envs)  # here: drawn in init

    origin = Origin(Drawn(lambda w, x: (w, x)), None)
    check_error(TraceError, lambda: check_not_frozen(origin, 4), "init", line("drawn in init"))


def constants(w, x):
    again = np.random.default_rng(7).normal(size=3)
    return w + jnp.asarray(CONSTANT).sum() + np.pi + again.sum() + jnp.asarray(again)[0], x


def draws_in_vain(w, x):
    assert 0 <= np.random.random() < 1 <= now()
    return w, x


def test_draws_and_clocks_that_change_nothing_are_accepted():
    check_not_frozen(Origin(Loop(draws_in_vain), None), 4)


class Put:
    """An object that runs code when it is asked for anything, as an import that was put off."""

    def __getattribute__(self, name):
        raise ImportError(name)


PUT_OFF, GONE = Put(), weakref.proxy(set())


def names_odd_objects(w, x):
    return w + (PUT_OFF is GONE), x


def test_objects_that_run_code_when_they_are_looked_at_are_left_alone():
    check_not_frozen(Origin(Loop(names_odd_objects), None), 4)


def test_clocks_are_as_before_when_a_loop_was_traced():
    read, plain_read = WATCH.read, time.time
    with pytest.raises(TraceError):
        check_not_frozen(Origin(Loop(clock_of_an_object), None), 4)
    assert WATCH.read is read is now is time.time is plain_read


def test_constants_that_are_equal_in_both_traces_are_accepted():
    check_not_frozen(Origin(Loop(constants), None), 4)
    check_not_frozen(Origin(Toy(plain), None), 8)


def test_two_traces_of_one_function_find_all_that_differs():
    def made(scale):
        return jax.make_jaxpr(lambda x: jnp.sin(x) * scale + np.full(3, scale))(jnp.ones(3))

    assert frozen_values(made(2.0), made(2.0)) == []
    found = frozen_values(made(2.0), made(3.0))
    assert len(found) == 2
    assert all("test_frozen.py" in each.where for each in found)
    assert {float(np.asarray(each.first).ravel()[0]) for each in found} == {2.0}


def test_training_and_planning_refuse_such_a_loop_before_anything_is_written(tmp_path):
    words = ["isn't the same when it is traced twice", line("drawn in tick")]
    train = lambda: shoal.train(Loop(in_tick), None, folder=tmp_path, cluster=TWO_CPUS)  # noqa: E731
    check_error(TraceError, train, *words)
    assert not [*tmp_path.iterdir()]
    check_error(TraceError, lambda: shoal.verify(Loop(in_tick), None, cluster=TWO_CPUS), *words)
