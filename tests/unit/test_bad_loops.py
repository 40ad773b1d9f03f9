"""A loop that can't be traced raises an error with the cause, the user's line and a fix."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shoal
from shoal.errors import CutError, TraceError
from unit.toy_loop import (
    COARSE,
    TWO_CPUS,
    State,
    Toy,
    check_error,
    fit,
    line,
    move,
    moved,
    plain,
    planned,
    traced,
)

# Stages in unsupported places


def in_while(state):
    def once(carry):
        keys, x, i = carry
        return (*move(keys, x, w=state.w), i + 1)

    start = (state.keys, state.x, 0)
    keys, x, _ = lax.while_loop(lambda carry: carry[2] < 3, once, start)
    return state._replace(keys=keys, x=x), {}


def in_cond(state):
    (keys, x), xs = moved(state)
    w, _ = lax.cond(state.age > 2, fit, lambda w, xs: (w, w), state.w, xs)
    return State(w, keys, x, state.age + 1), {}


@pytest.mark.parametrize("turn", [in_while, in_cond])
def test_a_stage_inside_a_loop_or_choice_runs_where_that_does(turn):
    found = shoal.verify(Toy(turn), None, COARSE, envs=8, ticks=3, cluster=TWO_CPUS)
    assert found.holds, found


def in_one_cond(state):
    (keys, x), xs = moved(state)
    both = lambda w, xs: (fit(w, xs)[0], move(keys, x, w=w)[1])  # noqa: E731
    w, x = lax.cond(state.age > 2, both, lambda w, xs: (w, x), state.w, xs)  # here: one cond
    return State(w, keys, x, state.age + 1), {}


def test_stages_of_several_fragments_inside_one_choice():
    words = ["`fit` and `move`", "inside one `cond`", "`learner` and `actor`", line("one cond")]
    check_error(CutError, lambda: planned(in_one_cond, COARSE), *words, "jnp.where")


@shoal.host(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def looked_up(x):
    return np.sin(x)


def host_in_cond(state):
    x = lax.cond(state.age > 2, looked_up, jnp.sin, state.x)  # here: host cond
    return state._replace(x=x), {}


def test_a_host_stage_inside_a_choice():
    words = ["host stage `looked_up`", "inside `lax.cond`", line("host cond"), "from tick"]
    check_error(TraceError, lambda: traced(host_in_cond), *words)


# Rows


def uneven(state):
    move(state.keys, state.x[1:], w=state.w)  # here: uneven
    return state, {}


@shoal.stage(per="env")
def move_all_rows(x, w):
    return x + w


def shared_by_position(state):
    move_all_rows(state.x, state.w)  # here: shared
    return state, {}


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (uneven, [f"stage `move` ({line('move')})", "[(8,), (7,)]", line("uneven")]),
        (shared_by_position, ["stage `move_all_rows`", "[(8,), ()]", line("shared")]),
    ],
)
def test_a_stage_for_one_environment_that_gets_no_rows(turn, words):
    check_error(TraceError, lambda: traced(turn), *words, "by keyword", "by position")


def test_a_stage_for_something_else():
    def do():
        return shoal.stage(per="agent")(plain)  # here: agent

    check_error(TraceError, do, 'per="agent"', line("agent"), "Choose one")


# Ticks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state._replace(x=state.x[:-1]), ["`x` from float32[8] to float32[7]"]),
        (lambda state: state._replace(age=1.5 * state.age), ["`age` from int32[] to float32[]"]),
        (lambda state: state._asdict(), ["another structure", "State"]),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_a_tick_that_changes_what_is_carried(change, words):
    def do():
        return shoal.trace(Toy(lambda state: (change(state), {})), envs=8)

    check_error(TraceError, do, *words, line("tick"), "init")


def branching_on_a_number(state):
    if state.w > 0:  # here: branch
        return state, {}
    return plain(state)


def branching_on_the_count(state):
    if len(state.x) > 4:
        state = state._replace(x=jnp.tanh(state.x))
    return plain(state)


def multiplying_wrongly(state):
    return state._replace(x=state.x @ jnp.ones((3, 3))), {}  # here: product


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (
            lambda state: state,
            ["something else than a state and metrics", line("tick"), "two things"],
        ),
        (branching_on_a_number, ["TracerBoolConversionError", line("branch"), "pure JAX"]),
        (multiplying_wrongly, ["can't be traced with 8", "(8,) and (3,)", line("product")]),
    ],
    ids=["pair", "number", "product"],
)
def test_a_tick_that_cannot_be_traced(turn, words):
    check_error(TraceError, lambda: traced(turn), *words)


def test_python_that_branches_on_the_count_does_so_on_that_of_the_whole_loop():
    found = shoal.verify(
        Toy(branching_on_the_count), None, COARSE, envs=8, ticks=3, cluster=TWO_CPUS
    )
    assert found.holds, found


@dataclass(frozen=True)
class Broken:
    def init(self, key, env, envs):
        return env.reset(key)  # here: reset


def test_an_algorithm_without_a_tick_or_with_an_init_that_fails():
    check_error(
        TraceError, lambda: shoal.trace(Broken(), envs=8), "Broken has no method `tick`", "init("
    )

    class Started(Broken):
        tick = Toy.tick

    words = ["init can't be traced", "'NoneType' object has no attribute 'reset'", line("reset")]
    check_error(TraceError, lambda: shoal.trace(Started(), envs=8), *words)
