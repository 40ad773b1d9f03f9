"""Callbacks see what a run writes, and end it when they say so."""

import json
from functools import partial

import pytest

import shoal
from shoal import Fragment
from shoal.errors import SettingError
from shoal.runs.files.checkpoints import ticks_in
from unit.test_evaluation import WORLD, Greedy
from unit.toy_loop import Toy, check_error, plain, policy


def rows_of(folder, name="metrics.jsonl"):
    return [json.loads(row) for row in (folder / name).read_text().splitlines()]


def train(tmp_path, **how):
    return shoal.train(Toy(plain), None, envs=4, backend="inline", folder=tmp_path, **how)


def test_callbacks_get_the_rows_and_the_checkpoints_that_are_written(tmp_path):
    ticks, evaluations, checkpoints = [], [], []

    def on_checkpoint(folder):
        checkpoints.append(int(folder.name))
        assert (folder / "metadata.json").exists()

    done = shoal.train(
        Greedy(), WORLD, envs=2, backend="inline", folder=tmp_path, ticks=4, evaluate=2,
        on_tick=ticks.append, on_evaluation=evaluations.append, on_checkpoint=on_checkpoint,
    )  # fmt: skip
    assert ticks == rows_of(done.folder)
    assert evaluations == rows_of(done.folder, "evaluation.jsonl")
    assert [row["tick"] for row in evaluations] == [0, 2, 4]
    assert checkpoints == [4]
    assert "stopped_by" not in done.summary


APART = policy(Fragment("mover", ("move",), 2), Fragment("fitter", ("fit",)))


@pytest.mark.parametrize("distribute", [None, APART], ids=["fused", "apart"])
def test_stop_ends_a_run_with_a_final_checkpoint_that_resumes(tmp_path, distribute):
    calls = []

    def on_tick(row):
        calls.append(row["tick"])
        return shoal.STOP if row["tick"] == 1 else None

    done = train(
        tmp_path, ticks=10**8, on_tick=on_tick, checkpoint_every="end", distribute=distribute
    )
    assert calls == [0, 1]
    made = done.summary["ticks"]
    assert 2 <= made < 10**8
    assert (done.summary["status"], done.summary["stopped_by"]) == ("done", "on_tick")
    assert [row["tick"] for row in rows_of(done.folder)] == list(range(made))
    assert ticks_in(done.folder / "checkpoints") == [made]
    toy = Toy(plain)
    more = shoal.resume(done.folder, algorithm=toy, ticks=made + 2, trust=True)
    assert (more.summary["ticks"], more.summary["status"]) == (made + 2, "done")


@pytest.mark.parametrize("answer", [True, False])
def test_a_truth_value_is_an_error_that_says_what_to_return(tmp_path, answer):
    words = f"on_tick returned {answer}", "shoal.STOP"
    answers = partial(train, tmp_path, ticks=3, on_tick=lambda row: answer)
    check_error(SettingError, answers, *words)


def test_a_callback_is_a_function_and_may_return_what_it_likes(tmp_path):
    check_error(SettingError, lambda: train(tmp_path, ticks=3, on_tick=3), "on_tick=3")
    assert train(tmp_path, ticks=2, on_tick=lambda row: "logged").summary["ticks"] == 2
