"""A loop that can't be traced says why, at which line of the user's, and the way out."""

from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from jax import lax

import shoal
from shoal.errors import TraceError
from unit.toy_loop import (
    State,
    Toy,
    check_told,
    fit,
    line,
    move,
    moved,
    plain,
    traced,
)

# Stages where they can't be


def in_while(state):
    def once(carry):
        keys, x, i = carry
        return (*move(keys, x, w=state.w), i + 1)

    start = (state.keys, state.x, 0)
    keys, x, _ = lax.while_loop(lambda carry: carry[2] < 3, once, start)  # here: while
    return state._replace(keys=keys, x=x), {}


def in_cond(state):
    (keys, x), xs = moved(state)
    w, _ = lax.cond(state.age > 2, fit, lambda w, xs: (w, w), state.w, xs)  # here: cond
    return State(w, keys, x, state.age + 1), {}


@pytest.mark.parametrize(
    ("turn", "stage", "kind"), [(in_while, "move", "while"), (in_cond, "fit", "cond")]
)
def test_a_stage_inside_a_loop_or_choice_that_cannot_be_cut(turn, stage, kind):
    words = [f"stage `{stage}` ({line(stage)})", f"inside `lax.{kind}", line(kind), "lax.scan"]
    check_told(TraceError, lambda: traced(turn), *words)


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
    check_told(TraceError, lambda: traced(turn), *words, "by keyword", "by position")


def test_a_stage_for_something_else():
    def do():
        return shoal.stage(per="agent")(plain)  # here: agent

    check_told(TraceError, do, 'per="agent"', line("agent"), "Choose one")


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

    check_told(TraceError, do, *words, line("tick"), "init")


def branching_on_a_number(state):
    if state.w > 0:  # here: branch
        return state, {}
    return plain(state)


def branching_on_the_count(state):
    if len(state.x) > 8:
        state = state._replace(x=jnp.tanh(state.x))  # here: more work
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
        (branching_on_the_count, ["16 environments than with 8", line("more work"), "branch"]),
        (multiplying_wrongly, ["can't be traced with 8", "(8,) and (3,)", line("product")]),
    ],
    ids=["pair", "number", "count", "product"],
)
def test_a_tick_that_cannot_be_traced(turn, words):
    check_told(TraceError, lambda: traced(turn), *words)


@dataclass(frozen=True)
class Broken:
    def init(self, key, env, envs):
        return env.reset(key)  # here: reset


def test_an_algorithm_without_a_tick_or_with_an_init_that_fails():
    check_told(
        TraceError, lambda: shoal.trace(Broken(), envs=8), "Broken has no method `tick`", "init("
    )

    class Started(Broken):
        tick = Toy.tick

    words = ["init can't be traced", "'NoneType' object has no attribute 'reset'", line("reset")]
    check_told(TraceError, lambda: shoal.trace(Started(), envs=8), *words)
