"""Each user error is a `ShoalError` with the cause, the line of user code and a fix."""

import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shoal
from laws.differences import difference
from shoal import THE_REST, Fragment, Lockstep, Wire
from shoal.errors import CutError, PlaceError, SettingError, TraceError, UnknownNameError
from shoal.runs.inputs.making import make_distribution, with_settings
from unit.toy_loop import (
    BOTH_TWICE,
    COARSE,
    LAGGED,
    TWO_CPUS,
    State,
    Toy,
    agreeing,
    check_error,
    line,
    move,
    moved,
    plain,
    planned,
    policy,
    traced,
)

# Names


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (
            lambda: shoal.train("pop", None),  # here: algorithm
            ["algorithm `pop`", "`ppo`", line("algorithm")],
        ),
        (
            lambda: shoal.train(Toy(plain), "gimnax:CartPole-v1"),  # here: family
            ["environment family `gimnax`", "`gymnax`", line("family")],
        ),
        (
            lambda: shoal.run(planned(plain, COARSE), "thread", ticks=1),  # here: backend
            ["backend `thread`", "`threads`", line("backend")],
        ),
        (
            lambda: shoal.plan(traced(plain), policy(Fragment("a", ("moov",)))),  # here: stage
            ["stage in fragment `a` of mine: `moov`", "`move`", line("stage")],
        ),
        (
            lambda: with_settings(Toy(plain), {"trun": plain}),
            ["setting of Toy `trun`", "`turn`"],
        ),
    ],
    ids=["algorithm", "family", "backend", "stage", "setting"],
)
def test_an_unknown_name_suggests_the_nearest_valid_one(do, words):
    error = check_error(UnknownNameError, do, *words)
    assert "Did you mean" in error.fix


@pytest.mark.skipif(not find_spec("gymnax"), reason="gymnax is not installed")
def test_an_unknown_environment_suggests_the_nearest_valid_one():
    def do():
        return shoal.train("ppo", "CartPol-v1")  # here: environment

    check_error(
        UnknownNameError, do, "environment `CartPol-v1`", "`CartPole-v1`", line("environment")
    )


def test_an_unknown_distribution_policy_suggests_the_nearest_valid_one():
    def do():
        return make_distribution("single-lerner-coarse", {})

    check_error(UnknownNameError, do, "`single-lerner-coarse`", "mean `single-learner-coarse`?")


def test_a_missing_package_is_named_with_its_extra():
    code = (
        "import sys; sys.modules['gymnax'] = None\nimport shoal; shoal.train('ppo', 'CartPole-v1')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-2:]
    assert last == [
        "shoal.errors.MissingExtraError: gymnax is not installed",
        'Install it with: pip install "shoal[gymnax]"',
    ]


# Fragments and replicas


def test_a_stage_in_no_fragment_is_rejected():
    def do():
        return planned(plain, policy(Fragment("mover", ("move",))))

    check_error(CutError, do, "stage `fit` is in no fragment of mine", line("fit"), ": mover.")


def test_a_stage_in_two_fragments_is_rejected():
    twice = policy(Fragment("a", ("move",)), Fragment("b", ("move", "fit")))

    def do():
        return planned(plain, twice)

    check_error(
        CutError, do, "`move` is held by fragments `a` and `b`", line("move"), "one fragment only"
    )


@pytest.mark.parametrize(
    "distribution", [shoal.fused(2), shoal.multi_learner(2), BOTH_TWICE], ids=lambda d: d.name
)
def test_a_whole_batch_stage_that_is_replicated_without_a_mean(distribution):
    words = ["stage `fit`", "can't run as 2 replicas", line("fit"), "agree on `w`", "shoal.mean"]
    check_error(CutError, lambda: planned(plain, distribution), *words)
    assert planned(agreeing, distribution)


@pytest.mark.parametrize("distribution", [shoal.fused(), shoal.single_learner_coarse(1)])
def test_one_replica_needs_no_agreement(distribution):
    start = traced(plain).origin.start(0, 8)
    result = shoal.run(planned(plain, distribution), ticks=2, state=start)
    # One jitted call takes only arrays on one device.
    again, _ = jax.jit(plain)(result.state)
    wanted, _ = plain(plain(plain(start)[0])[0])
    assert [difference(a, b) < 1e-6 for a, b in zip(again, wanted, strict=True)] == [True] * 4


def mixing(state):
    state, metrics = agreeing(state)
    middle = jnp.mean(state.x)  # here: mixes
    return state._replace(x=state.x - middle), metrics


def test_glue_that_mixes_environments_is_named_rather_than_its_reader():
    def do():
        return planned(mixing, shoal.multi_learner(2))

    check_error(CutError, do, "`sum` mixes environments", "`x`", line("mixes"), "shoal.mean")


def test_replicas_that_do_not_divide_the_environments():
    def do():
        return shoal.plan(traced(plain), shoal.single_learner_coarse(3), TWO_CPUS)  # here: three

    words = ["8 environments", "3 replicas of `actor`", line("three"), "2 or 4", "multiple of 3"]
    check_error(CutError, do, *words)


ON_GPU = policy(Fragment("all", (THE_REST,), on="gpu"))


@pytest.mark.parametrize(
    ("kind", "do", "words"),
    [
        (SettingError, lambda: Lockstep(-1), ["lag=-1", "lag=0 or more", line("lag")]),  # here: lag
        (
            SettingError,
            lambda: shoal.multi_learner(0),  # here: zero
            ["`learner` has 0 replicas", line("zero"), "at least one"],
        ),
        (SettingError, lambda: shoal.impala(take=0), ["take=0", "take to 1 or more"]),
        (SettingError, lambda: shoal.impala(take=-1), ["take=-1", "take to 1 or more"]),
        (SettingError, lambda: shoal.impala(ring=0), ["ring=0", "ring to 1 or more"]),
        (SettingError, lambda: shoal.impala(actors=(0, 3)), ["actors=(0, 3)", "1 or more"]),
        (SettingError, lambda: shoal.impala(max_lag=-1), ["max_lag=-1", "0 or more"]),
        (SettingError, lambda: shoal.single_learner_fine(ring=0), ["0 groups in its ring"]),
        (SettingError, lambda: shoal.decoupled(ring=0), ["0 groups in its ring"]),
        (SettingError, lambda: shoal.ape_x(lag=1, max_lag=1), ["lag=1 and max_lag=1", "Say one"]),
        (SettingError, lambda: Fragment("a", (), 2.5), ["2.5 replicas", "whole number"]),
        (
            CutError,
            lambda: planned(plain, shoal.impala(2, max_lag=0)),
            ["at most 0 ticks of lag", "only 1 of 2 replicas", "max_lag=1"],
        ),
        (
            PlaceError,
            lambda: shoal.plan(traced(plain), shoal.fused(64)),  # here: devices
            ["fused is to use 64 devices", "this machine has", line("devices")],
        ),
        (SettingError, lambda: Fragment("a", (), on="tpu"), ["`tpu`", "`gpu else cpu`"]),
        (SettingError, lambda: policy(Fragment("a", ()), Fragment("a", ())), ["one name"]),
        (
            SettingError,
            lambda: policy(Fragment("a", ()), wires=(Wire("a", "b", Lockstep()),)),
            ["fragment `b`, which isn't there", "are: a."],
        ),
        (
            TraceError,
            lambda: shoal.trace(Toy(plain), envs=0),  # here: none
            ["envs=0", line("none"), "1 or more"],
        ),
        (SettingError, lambda: shoal.train(Toy(plain), None, envs=0), ["envs=0", "1 or more"]),
        (SettingError, lambda: shoal.train(Toy(plain), None, ticks=-1), ["ticks=-1", "1 or more"]),
        (
            PlaceError,
            lambda: shoal.plan(traced(plain), ON_GPU, TWO_CPUS),  # here: gpu
            ["`all` wants gpu", 'on="gpu else cpu"', line("gpu")],
        ),
    ],
)
def test_a_setting_that_cannot_work(kind, do, words):
    check_error(kind, do, *words)


# Keys


@shoal.stage
def fit_noisily(w, xs, age):
    key = jax.random.key(age)
    noise = jax.random.normal(key, xs.shape)  # here: draws in a stage
    level = shoal.mean(jnp.mean(xs + noise))
    return w - 0.1 * level, level


def drawing_in_a_stage(state):
    (keys, x), xs = moved(state)
    w, loss = fit_noisily(state.w, xs, state.age)
    return State(w, keys, x, state.age + 1), {"loss": loss}


def drawing_in_glue(state):
    state, metrics = agreeing(state)
    noise = jax.random.uniform(jax.random.key(state.age), state.x.shape)
    return state._replace(x=state.x + noise), metrics


def splitting_in_glue(state):
    state, metrics = agreeing(state)
    keys = jax.random.split(jax.random.key(state.age), len(state.x))
    return state._replace(keys=keys), metrics


@pytest.mark.parametrize("turn", [drawing_in_a_stage, drawing_in_glue, splitting_in_glue])
def test_draws_for_all_environments_from_one_key_match_the_plain_loop(turn):
    found = shoal.verify(Toy(turn), None, shoal.multi_learner(2), envs=8, ticks=3, cluster=TWO_CPUS)
    assert found.holds, found


@pytest.mark.parametrize("turn", [mixing, drawing_in_glue])
def test_glue_over_all_environments_is_accepted_where_one_replica_runs_it(turn):
    found = shoal.verify(Toy(turn), None, COARSE, envs=8, ticks=3, cluster=TWO_CPUS)
    assert found.holds, found


# Lags


@shoal.stage(on_policy=True)  # here: on-policy
def fit_on_policy(w, xs):
    return w - 0.1 * jnp.mean(xs), jnp.mean(xs)


@shoal.stage(per="env", name="env")
def answer(x, push):
    return x + push


def on_policy(state):
    (keys, x), xs = moved(state)
    w, loss = fit_on_policy(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


def on_policy_behind_a_cut_loop(state):
    def once(carry, _):
        keys, push = move(*carry, w=state.w)
        x = answer(carry[1], push)
        return (keys, x), 2 * x

    (keys, x), xs = lax.scan(once, (state.keys, state.x), length=3)
    w, loss = fit_on_policy(state.w, xs)
    return State(w, keys, x, state.age + 1), {"loss": loss}


@pytest.mark.parametrize(
    ("turn", "distribution"),
    [(on_policy, LAGGED), (on_policy_behind_a_cut_loop, shoal.decoupled(2, 1, 1, lag=1))],
)
def test_a_lag_into_an_on_policy_stage(turn, distribution):
    words = ["stage `fit_on_policy` is on-policy", "lagged `w`", line("on-policy"), "lag=0"]
    check_error(CutError, lambda: planned(turn, distribution), *words)


def test_an_on_policy_stage_accepts_inputs_without_lag_and_other_stages_accept_a_lag():
    assert planned(on_policy, COARSE)
    assert planned(on_policy_behind_a_cut_loop, shoal.decoupled(2, 1, 1))
    assert planned(plain, LAGGED)
