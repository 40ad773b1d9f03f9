"""A NaN loss stops the run, reports the tick and line, and keeps the last finite state."""

import json

import jax.numpy as jnp
import pytest
from jax import lax

import shoal
from laws.differences import difference
from shoal import THE_REST, Fragment
from shoal.errors import NotFiniteError
from shoal.runs.files.checkpoints import read_newest
from shoal.runs.inputs.recipes import recipe_of
from shoal.runs.inputs.trust import make as make_again
from unit.toy_loop import (
    COARSE,
    LAGGED,
    TWO_CPUS,
    State,
    Toy,
    check_error,
    line,
    move,
    moved,
    plain,
    planned,
    policy,
)

BAD_TICK = 5


@shoal.stage  # here: sour
def fit_sourly(w, xs, age):
    loss = jnp.mean(xs) * jnp.log(BAD_TICK - 0.5 - age)
    return w - 0.1 * loss, shoal.mean(loss)


def sour(state):
    (keys, x), xs = moved(state)
    w, loss = fit_sourly(state.w, xs, state.age)
    return State(shoal.mean(w), keys, x, state.age + 1), {"loss": loss}


def sour_in_glue(state):
    state, metrics = plain(state)
    loss = metrics["loss"] * jnp.sqrt(BAD_TICK + 0.5 - state.age)  # here: sour glue
    return state, {"loss": loss}


NAN_PLANS = {
    "fused": shoal.fused(),
    "one program": shoal.fused(2),
    "coarse": COARSE,
    "lagged": LAGGED,
    "apart": shoal.single_learner_coarse(1, lag=1),
}


@pytest.mark.parametrize("backend", ["inline", "threads"])
@pytest.mark.parametrize("name", NAN_PLANS)
def test_nan_in_the_loss_stops_the_run_and_keeps_the_last_good_state(name, backend):
    plan = planned(sour, NAN_PLANS[name])
    words = ["`loss` is NaN at tick 5", "stage `fit_sourly`", line("sour"), "is kept"]
    error = check_error(NotFiniteError, lambda: shoal.run(plan, backend, ticks=9), *words)
    assert error.tick == BAD_TICK
    check_same(error.state, shoal.run(plan, backend, ticks=BAD_TICK).values)


@shoal.stage(per="env")  # here: sour step
def move_sourly(x, *, age):
    return x + jnp.sqrt(BAD_TICK - 0.5 - age)


@shoal.stage
def fit_sourly_inside(w, xs, age):
    def again(w, _):
        return fit_sourly(w, xs, age)

    w, losses = lax.scan(again, w, length=2)
    return w, shoal.mean(losses[0])


def sour_in_a_loop(state):
    def once(carry, _):
        keys, x = move(*carry, w=state.w)
        x = move_sourly(x, age=state.age)
        return (keys, x), x

    (keys, x), xs = lax.scan(once, (state.keys, state.x), length=3)
    return State(state.w, keys, x, state.age + 1), {"loss": xs[-1]}


def sour_in_a_stage(state):
    (keys, x), xs = moved(state)
    w, loss = fit_sourly_inside(state.w, xs, state.age)
    return State(w, keys, x, state.age + 1), {"loss": loss}


CUT_LOOP = policy(Fragment("a", ("move",), 2), Fragment("b", (THE_REST,), 2))


@pytest.mark.parametrize(
    ("turn", "distribution", "stage", "place"),
    [
        (sour_in_a_loop, shoal.fused(), "move_sourly", "sour step"),
        (sour_in_a_loop, CUT_LOOP, "move_sourly", "sour step"),
        (sour_in_a_stage, shoal.fused(), "fit_sourly", "sour"),
        (sour_in_a_stage, LAGGED, "fit_sourly", "sour"),
    ],
)
def test_the_stage_at_fault_is_found_inside_loops_and_stages(turn, distribution, stage, place):
    words = ["is NaN at tick 5", f"stage `{stage}`", line(place)]
    plan = planned(turn, distribution)
    check_error(NotFiniteError, lambda: shoal.run(plan, "inline", ticks=9), *words)


def test_nan_between_stages_is_reported_with_its_line():
    words = ["is NaN at tick 5", "`sqrt` between stages", line("sour glue")]
    check_error(NotFiniteError, lambda: shoal.run(planned(sour_in_glue, COARSE), ticks=9), *words)


def test_the_last_good_state_lies_in_the_run_folder(tmp_path):
    how = {"ticks": 9, "envs": 8, "seed": 3, "cluster": TWO_CPUS}
    how |= {"folder": tmp_path, "name": "mine"}
    check_error(NotFiniteError, lambda: shoal.train(Toy(sour), None, LAGGED, **how), "tick 5")
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["ticks"]) == ("failed", BAD_TICK)
    assert "fit_sourly" in summary["error"]
    rows = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["tick"] for row in rows] == list(range(BAD_TICK))
    good = shoal.train(Toy(sour), None, LAGGED, **how | {"ticks": BAD_TICK, "name": "good"})
    saved = [read_newest(tmp_path / name / "checkpoints", print) for name in ("mine", "good")]
    assert good.folder == tmp_path / "good"
    assert [one.snapshot.tick for one in saved] == [BAD_TICK, BAD_TICK]
    check_same(*(one.snapshot.values for one in saved))
    check_same(*(one.snapshot.past for one in saved))


def unbounded(state):
    """A state with intended infinities: no best yet, and no bound."""
    state, metrics = plain(state)
    best = jnp.where(state.age < 3, -jnp.inf, metrics["loss"])
    return state, {"best": best, "bound": jnp.float32(jnp.inf), "rows": state.x * jnp.inf}


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("name", ["fused", "lagged"])
def test_infinity_is_allowed_and_round_trips_through_json(name, backend, tmp_path):
    how = {"ticks": 4, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path, "backend": backend}
    trained = shoal.train(Toy(unbounded), None, NAN_PLANS[name], **how)
    assert trained.summary["status"] == "done"
    lines = (trained.folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(text, parse_constant=refuse_constant) for text in lines]
    assert [row["tick"] for row in rows] == [0, 1, 2, 3]
    assert [float(row["bound"]) for row in rows] == [float("inf")] * 4
    assert [row["best"] for row in rows[:2]] == ["-Infinity"] * 2
    assert all(isinstance(row["best"], float) for row in rows[2:])


def test_a_nan_is_found_among_allowed_infinities():
    def sour_beside(state):
        after, metrics = sour(state)
        return after, {"bound": jnp.inf * (1 + after.x), **metrics}

    words = ["`loss` is NaN at tick 5", "stage `fit_sourly`", line("sour")]
    plan = planned(sour_beside, COARSE)
    check_error(NotFiniteError, lambda: shoal.run(plan, "inline", ticks=9), *words)


def test_infinite_returns_are_written_as_json(tmp_path):
    def returned(state):
        state, _ = plain(state)
        return state, {"episodes": jnp.float32(2), "episode_return": -jnp.inf * (1 + state.age)}

    how = {"ticks": 3, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path}
    trained = shoal.train(Toy(returned), None, **how)
    text = (trained.folder / "summary.json").read_text()
    assert json.loads(text, parse_constant=refuse_constant)["return_mean"] == "-Infinity"
    shoal.resume(trained.folder, ticks=4, algorithm=Toy(returned), cluster=TWO_CPUS)


def test_an_infinite_setting_round_trips():
    settings = (float("inf"), -float("inf"), {"low": float("-inf")}, 1.5)
    text = json.dumps(recipe_of(settings), allow_nan=False)
    assert make_again(json.loads(text), "here", trusted=True) == settings


def check_same(got, wanted):
    """Both hold the same arrays under the same names."""
    assert set(got) == set(wanted)
    largest = {name: difference(got[name], wanted[name]) for name in wanted}
    assert max(largest.values()) < 1e-6, largest
