"""Runs are listed, compared, drawn and removed from their folders alone."""

import json
import subprocess
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cli.main import main
from shoal.cli.train import seeds_of
from shoal.errors import SettingError
from shoal.runs.files.folder import locked, newest_run
from shoal.runs.files.provenance import git
from shoal.runs.results.comparing import bootstrap, compare, iqm
from shoal.runs.results.listing import group, rows_of, runs_in
from unit.toy_loop import check_error


def make_run(folder, mean, env="cart", evaluation=None, rows=()):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    facts = {"env": env, "status": "done", "return_mean": mean, "ticks": 3, "env_steps": 2048}
    (folder / "summary.json").write_text(json.dumps(facts | {"seed": 0, "seconds": 90.0}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if evaluation is not None:
        (folder / "evaluations").mkdir()
        one = {"tick": 3, "episodes": 10, "actions": "greedy", "return_mean": evaluation}
        (folder / "evaluations" / "a.json").write_text(json.dumps(one))
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, means in {"good": (10.0, 12.0, 11.0, 50.0), "bad": (1.0, 2.0, 3.0, 4.0)}.items():
        for seed, mean in enumerate(means):
            rows = [{"env_steps": 8 * i, "return_mean": mean * i} for i in range(4)]
            make_run(tmp_path / "runs" / name / f"seed-{seed}", mean, rows=rows)
    make_run(tmp_path / "runs" / "alone", 5.0)
    return tmp_path / "runs"


def test_groups_are_runs_folders_of_runs_and_patterns(runs):
    assert len(runs_in(runs)) == 9
    assert [len(group(name).runs) for name in ("good", "alone", "runs/bad", "a*")] == [4, 1, 4, 1]
    assert newest_run(runs) in {run.folder for run in runs_in(runs)}
    check_error(SettingError, lambda: group("none"), "no run in none")


def test_a_comparison_has_the_interquartile_mean_and_its_interval(runs):
    found = compare([group("good"), group("bad"), group("alone")])
    assert "training episodes" in found.measure
    good, bad, alone = (scores.iqm("cart") for scores in found.scores)
    assert (good.value, bad.value, alone.value) == (11.5, 2.5, 5.0)
    assert good.low <= good.value <= good.high
    assert 10.0 <= good.low < good.high <= 50.0
    assert alone.low is None
    assert found.improvement(1).value == 0.0
    assert found.improvement(2).value == 0.0


def test_evaluations_are_compared_where_all_runs_have_them_by_one_protocol(runs):
    make_run(runs / "x", 1.0, evaluation=7.0)
    make_run(runs / "y", 2.0, evaluation=9.0)
    found = compare([group("x"), group("y")])
    assert "10 whole episodes, greedy actions" in found.measure
    assert [scores.by_env["cart"] for scores in found.scores] == [(7.0,), (9.0,)]
    assert found.improvement(1).value == 1.0
    assert "training" in compare([group("x"), group("bad")]).measure


def test_what_cannot_be_compared_is_refused(runs):
    make_run(runs / "other", 1.0, env="pole")
    make_run(runs / "new", None)
    check_error(SettingError, lambda: compare([group("good"), group("other")]), "pole", "same")
    check_error(SettingError, lambda: compare([group("new")]), "no return yet")


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8))
def test_an_interval_has_samples_around_it_and_is_the_same_again(values):
    strata = [np.array(values)]
    found = bootstrap(strata, lambda drawn: iqm(drawn[0]))
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found == bootstrap(strata, lambda drawn: iqm(drawn[0]))


def test_strata_are_drawn_apart():
    one, other = np.zeros(3), np.full(4, 8.0)
    found = bootstrap([one, other], lambda drawn: float(drawn[0].sum() + drawn[1].sum()))
    assert (found.value, found.low, found.high) == (32.0, 32.0, 32.0)


def test_the_commands_list_compare_draw_and_remove(runs, capsys):
    assert main(["runs"]) == 0
    assert main(["runs", "compare", "good", "bad"]) == 0
    out = capsys.readouterr().out
    for word in ("good/seed-3", "done", "2.05k", "11.50 [", "P(bad > good) = 0.00"):
        assert word in out
    assert main(["runs", "plot", "good", "bad"]) == 0
    picture = ET.parse("curves.svg").getroot()
    assert sum(part.tag.endswith("polyline") for part in picture.iter()) == 2
    text = [part.text for part in picture.iter() if part.tag.endswith("text")]
    assert {"good (4 runs)", "environment steps", "return_mean"} <= set(text)
    assert main(["runs", "plot", "good", "--metric", "los"]) == 2
    assert "has no `los`" in capsys.readouterr().err
    assert main(["runs", "rm", "good"]) == 0
    assert len(runs_in(runs)) == 9
    with locked(runs / "good" / "seed-1"):
        assert main(["runs", "rm", "good", "--yes"]) == 2
    assert len(runs_in(runs)) == 9
    assert main(["runs", "rm", "good", "alone", "--yes"]) == 0
    assert {run.folder.parent.name for run in runs_in(runs)} == {"bad"}
    assert sorted(path.name for path in runs.iterdir()) == ["bad"]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[" * 100_000, b"null", b"{"], ids=repr)
def test_damaged_rows_of_metrics_are_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"tick": 0}\n' + line + b'\n{"tick": 1}\n')
    assert [row["tick"] for row in rows_of(tmp_path)] == [0, 1]


def test_seeds_are_ranges_and_lists():
    assert seeds_of("0-4") == [0, 1, 2, 3, 4]
    assert seeds_of("1, 5,9") == [1, 5, 9]
    for text in ("", "a", "3-", "-3", "4-1", "1,1", "0-99999"):
        check_error(SettingError, lambda text=text: seeds_of(text), "--seeds")


@pytest.mark.slow
def test_a_run_for_each_seed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gymnax")
    monkeypatch.chdir(tmp_path)
    small = ["--num-steps", "8", "--num-minibatches", "2", "--envs", "4", "--ticks", "2"]
    assert main(["train", "ppo", "CartPole-v1", *small, "--seeds", "3,5", "--name", "two"]) == 0
    found = {run.folder.name: run.facts["seed"] for run in group("two").runs}
    assert found == {"seed-3": 3, "seed-5": 5}
    out = capsys.readouterr().out
    assert "shoal runs compare runs/two" in out
    assert out.count("fragment  replicas") == 1


def test_a_run_says_where_it_comes_from(tiny_run):
    (made,) = json.loads((tiny_run.folder / "run.json").read_text())["made"]
    assert made["packages"]["jax"]
    assert made["host"]
    assert made["started"].endswith("+00:00")
    assert made["command"]


def test_the_commit_is_that_of_the_folder_and_says_whether_files_changed(tmp_path):
    def run(*words):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    assert git(tmp_path / "none") == {}
    run("init")
    (tmp_path / "a").write_text("1")
    run("add", "a")
    run("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "a")
    found = git(tmp_path)
    assert (len(found["commit"]), found["changed"]) == (40, False)
    (tmp_path / "a").write_text("2")
    assert git(tmp_path) == {**found, "changed": True}
