"""A host stage gives the plain tick's numbers, or an error where it isn't supported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shoal
from laws.differences import difference
from shoal import Fragment
from shoal.errors import CutError, RunError, TraceError
from unit.toy_loop import (
    BOTH_TWICE,
    COARSE,
    LAGGED,
    TWO_CPUS,
    State,
    Toy,
    check_error,
    fit,
    fit_agreeing,
    line,
    move,
    moved,
    plain,
    planned,
    policy,
    traced,
)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@shoal.host(like)  # here: halve
def halve(x):
    assert isinstance(x, np.ndarray)
    return 0.5 * x


@shoal.host(like, per="env")
def bend(x):
    assert isinstance(x, np.ndarray)
    return np.sin(x)


@shoal.stage
def fit_halves(w, xs):
    return fit(w, halve(xs))


@shoal.stage
def fit_far_halves(w, xs):
    return fit_halves(w, xs)


@shoal.stage(per="env")
def move_and_halve(x, *, w):
    return halve(x + w)  # here: calls a host


def host_between_stages(state):
    (keys, x), xs = moved(state)
    w, loss = fit_agreeing(state.w, halve(xs))
    return State(w, keys, x, state.age + 1), {"loss": loss}


def host_in_a_loop(state):
    def once(carry, _):
        keys, x = move(*carry, w=state.w)
        x = halve(x)
        return (keys, x), x

    (keys, x), xs = lax.scan(once, (state.keys, state.x), length=3)
    w, loss = fit(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


def host_in_a_stage(state):
    (keys, x), xs = moved(state)
    w, loss = fit_halves(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


def host_in_a_stage_in_a_stage(state):
    (keys, x), xs = moved(state)
    w, loss = fit_far_halves(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


def host_in_a_stage_for_one(state):
    return state._replace(x=move_and_halve(state.x, w=state.w)), {}


def host_for_each_in_a_loop(state):
    def once(carry, _):
        keys, x = move(*carry, w=state.w)
        x = bend(x)
        return (keys, x), x

    (keys, x), xs = lax.scan(once, (state.keys, state.x), length=3)
    w, loss = fit(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


def host_for_each_agreeing(state):
    def once(carry, _):
        keys, x = move(*carry, w=state.w)
        x = bend(x)
        return (keys, x), x

    (keys, x), xs = lax.scan(once, (state.keys, state.x), length=3)
    w, loss = fit_agreeing(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


@pytest.mark.parametrize(
    ("turn", "distribution", "words"),
    [
        (host_in_a_stage, COARSE, ["inside stage `fit_halves`", "name `fit_halves/halve`"]),
        (
            host_in_a_stage_in_a_stage,
            shoal.fused(),
            ["inside stage `fit_far_halves`", "name `fit_far_halves/fit_halves/halve`"],
        ),
    ],
)
def test_a_host_stage_inside_a_compiled_stage(turn, distribution, words):
    check_error(
        CutError, lambda: planned(turn, distribution), "host stage `halve`", line("halve"), *words
    )


def test_a_host_stage_inside_a_stage_for_one_environment():
    words = ["host stage `halve`", "stage `move_and_halve`", line("calls a host"), "from tick"]
    check_error(TraceError, lambda: traced(host_in_a_stage_for_one), *words)


@pytest.mark.parametrize("distribution", [BOTH_TWICE, shoal.multi_learner(2)])
def test_a_whole_batch_host_stage_can_not_be_divided(distribution):
    words = ["stage `halve` sees the whole batch", "2 replicas", line("halve"), 'per="env"']
    check_error(CutError, lambda: planned(host_between_stages, distribution), *words)


@pytest.mark.parametrize("backend", ["inline", "threads"])
@pytest.mark.parametrize(
    ("turn", "distribution"),
    [
        (host_between_stages, COARSE),
        (host_between_stages, shoal.fused()),
        (host_in_a_loop, shoal.fused()),
        (host_in_a_loop, shoal.single_learner_coarse(1)),
        (host_in_a_loop, COARSE),
        (host_for_each_in_a_loop, COARSE),
        (host_for_each_agreeing, shoal.fused(2)),
        (host_for_each_agreeing, shoal.multi_learner(4)),
        (
            host_in_a_stage,
            policy(Fragment("a", ("move",), 2), Fragment("b", ("fit_halves/*", "*"))),
        ),
    ],
    ids=[
        *("between", "between, fused", "loop, fused", "loop", "whole, for replicas", "each"),
        *("each, fused", "each, many learners", "nested"),
    ],
)
def test_a_host_stage_gives_the_numbers_of_the_plain_tick(turn, distribution, backend):
    graph, state = traced(turn), traced(turn).origin.start(0, 8)
    got = shoal.run(planned(turn, distribution), backend, ticks=3, state=state).state
    for _ in range(3):
        state, _ = graph.origin.algorithm.tick(None, state)
    largest = [difference(a, b) for a, b in zip(got, state, strict=True)]
    assert max(largest) < 1e-6, dict(zip(State._fields, largest, strict=True))


def test_a_loop_with_a_host_stage_can_be_verified():
    found = shoal.verify(Toy(host_for_each_in_a_loop), None, LAGGED, envs=8, cluster=TWO_CPUS)
    assert found.holds, found
    found = shoal.verify(Toy(host_for_each_in_a_loop), None, COARSE, envs=8, cluster=TWO_CPUS)
    assert found.holds, found


@shoal.host(like, per="env")
def gone(x):
    raise ConnectionError("the simulator is gone")  # here: gone


@shoal.host(like, per="env")  # here: short
def short(x):
    return x[1:]


@shoal.host(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), per="env")  # here: real
def real(x):
    return x


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (gone, ["`gone` failed in actor[", "at tick 0", "the simulator is gone", line("gone")]),
        (short, ["it returned float32[3], but promised float32[4]", line("short")]),
        (real, ["it returned float32[4], but promised int32[4]", line("real")]),
    ],
    ids=["raises", "shape", "dtype"],
)
def test_a_host_stage_that_fails_or_returns_other_shapes(stage, words):
    def turn(state):
        state, metrics = plain(state)
        return state._replace(x=state.x + stage(state.x)), metrics

    plan = shoal.plan(shoal.trace(Toy(turn), envs=8), COARSE, TWO_CPUS)
    for backend in ("inline", "threads"):
        check_error(RunError, lambda b=backend: shoal.run(plan, b, ticks=2), *words)
