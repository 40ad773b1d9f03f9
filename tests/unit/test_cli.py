"""The `shoal` command in real processes: run folders, graphs, user files, errors, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shoal.cli.flags import replicas
from shoal.cli.main import main
from shoal.runs.files.checkpoints import read_newest
from shoal.runs.job import steps_per_second

COMMAND = [sys.executable, "-m", "shoal"]
TINY = ["--set", "num_steps=8", "--set", "num_minibatches=2", "--envs", "4"]

MINE = """
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NamedTuple

import jax
import jax.numpy as jnp

import shoal


class State(NamedTuple):
    w: jax.Array
    x: jax.Array


@shoal.stage(per="env", name="env")
def move(x, *, w):
    return x + 0.1 * w


@shoal.stage
def fit(w, x, *, rate):
    return w - rate * jnp.mean(x)


@dataclass(frozen=True)
class Mine:
    rate: float = 0.1
    grows: bool = False

    def init(self, key, env, envs):
        return State(jnp.float32(env.first), 0.1 * jnp.arange(envs))

    def tick(self, env, state):
        x = move(state.x, w=state.w)
        w = fit(state.w, x, rate=self.rate)
        return State(w[None] if self.grows else w, x), {"level": jnp.mean(x)}


class World:
    name = "my world"
    first = 1.0


def my_policy(lag=0):
    fragments = shoal.Fragment("mover", ("env",), 2), shoal.Fragment("fitter", ("fit",))
    return shoal.DistributionPolicy(
        "my_policy", fragments, (shoal.Wire("fitter", "mover", shoal.Lockstep(lag)),)
    )


@dataclass(frozen=True)
class Deaf(Mine):
    def init(self, key, env, envs):
        while Path("runs").exists():
            try:
                Path("deaf").touch()
                Event().wait()
            except KeyboardInterrupt:
                pass
        return super().init(key, env, envs)


class Unsaid:
    def __init__(self):
        assert False
"""
OWN = ["mine.py:Mine", "mine.py:World", "--envs", "4"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path


def shoal(folder, *words):
    done = subprocess.run(
        [*COMMAND, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=100
    )
    return done.returncode, done.stdout, done.stderr


def read(folder, name):
    """A run's summary, and the rows of its metrics."""
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return summary, [json.loads(row) for row in rows]


def state_in(run):
    """The state of a run, from its newest checkpoint."""
    return read_newest(run / "checkpoints", print).snapshot.values


# Training


def test_a_rate_is_reported_only_for_ticks_that_took_long_enough():
    assert steps_per_second(2048, 2, 0.0004) is None
    assert steps_per_second(2048, 1, 0.0) is None
    assert steps_per_second(2048, 11, 2.0) == 10240


def test_without_arguments_the_command_prints_its_help(tmp_path):
    code, out, _ = shoal(tmp_path)
    assert code == 0
    assert "shoal train ppo CartPole-v1" in out


def test_status_shows_the_newest_run_by_default(tmp_path):
    code, _, err = shoal(tmp_path, "status")
    assert code == 2
    assert "there is no run in runs" in err
    for number, name in enumerate(("second", "first")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
        os.utime(tmp_path / "runs" / name / "run.json", (100 - number, 100 - number))
    code, out, err = shoal(tmp_path, "status")
    assert "second" in out + err


def test_a_missing_run_is_named_as_given(tmp_path):
    for command in ("status", "resume"):
        code, _, err = shoal(tmp_path, command, "runs/none")
        assert code == 2, err
        assert "there is no run in runs/none" in err


@pytest.mark.parametrize("text", ["x", "2-", "-3", "1-2-3", "2.5"])
def test_an_invalid_number_of_replicas_is_rejected(text):
    with pytest.raises(ValueError, match="no number of replicas; write 4"):
        replicas(text)
    assert (replicas("4"), replicas("2-16")) == (4, (2, 16))


def test_training_prints_the_plan_and_writes_a_run_folder(tmp_path):
    pytest.importorskip("gymnax")
    code, out, err = shoal(tmp_path, "train", "ppo", "CartPole-v1", *TINY, "--ticks", "3")
    assert code == 0, err
    assert out.startswith("fused: PPO on gymnax:CartPole-v1, 4 environments")
    assert "Results are in runs/ppo-gymnax-CartPole-v1-1/" in out
    summary, rows = read(tmp_path, "ppo-gymnax-CartPole-v1-1")
    said = {"algorithm": "ppo", "env": "gymnax:CartPole-v1", "distribution_policy": "fused"}
    said |= {"backend": "threads", "seed": 0, "ticks": 3, "env_steps": 96, "status": "done"}
    assert {name: summary[name] for name in said} == said
    assert summary["seconds"] >= summary["compile_seconds"] > 0
    assert {"return_mean", "env_steps_per_second"} <= set(summary)
    assert [(row["tick"], row["env_steps"]) for row in rows] == [(0, 32), (1, 64), (2, 96)]
    assert all(np.isfinite(row["loss"]) for row in rows)


def test_user_files_train_and_every_run_has_its_own_folder(folder):
    how = ["--distribute", "mine.py:my_policy", "--lag", "1", "--backend", "inline", "--ticks", "3"]
    for number in (1, 2):
        code, out, err = shoal(folder, "train", *OWN, *how, "--set", "rate=0.2", "--seed", "7")
        assert code == 0, err
        assert f"Results are in runs/mine-my world-{number}/" in out
        assert "lag 1" in out
        assert "shoal.envs.episode_totals(step)" in out
    (first, rows), (second, _) = (read(folder, f"mine-my world-{n}") for n in (1, 2))
    said = {"algorithm": "mine", "env": "my world", "distribution_policy": "my_policy"}
    said |= {"backend": "inline", "seed": 7, "ticks": 3, "env_steps": 12}
    assert {name: first[name] for name in said} == said == {name: second[name] for name in said}
    assert [row["tick"] for row in rows] == [0, 1, 2]
    w = float(state_in(folder / "runs" / "mine-my world-1")["w"])
    assert w == pytest.approx(lagged_by_hand(rate=0.2, ticks=3), abs=1e-6)


def lagged_by_hand(rate, ticks):
    """What `mine.py` computes with a lag of one tick."""
    w, seen, x = 1.0, 1.0, 0.1 * np.arange(4)
    for _ in range(ticks):
        x = x + 0.1 * seen
        w, seen = w - rate * x.mean(), w
    return w


def test_an_existing_run_name_is_rejected_and_the_run_is_kept(folder):
    words = ["train", *OWN, "--ticks", "2", "--name", "first"]
    assert shoal(folder, *words)[0] == 0
    before = (folder / "runs" / "first" / "summary.json").read_text()
    code, _, err = shoal(folder, *words)
    assert code == 2
    assert "runs/first already holds a run" in err
    assert "another name" in err
    assert (folder / "runs" / "first" / "summary.json").read_text() == before


# Graphs and plans


@pytest.mark.parametrize("command", ["graph", "plan"])
def test_graphs_and_plans_are_shown_as_text_data_and_page(folder, command):
    how = ["--distribute", "mine.py:my_policy"] if command == "plan" else []
    code, text, err = shoal(folder, command, *OWN, *how)
    assert code == 0, err
    shown = ["fit", "env"] + (["mover", "fitter", "gather of 2"] if how else ["level"])
    assert [word for word in shown if word not in text] == []
    for ending in (".txt", ".json", ".html"):
        out = folder / f"picture{ending}"
        code, said, err = shoal(folder, command, *OWN, *how, "--out", out.name)
        assert (code, said) == (0, f"Written to picture{ending}\n"), err
    assert (folder / "picture.txt").read_text() == text
    data = json.loads((folder / "picture.json").read_text())
    names = [f["name"] for f in data["fragments"]] if how else [n["name"] for n in data["nodes"]]
    assert set(names) >= ({"mover", "fitter"} if how else {"env", "fit"})
    page = (folder / "picture.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "mine.py:" in page


def test_verify_reports_whether_the_numbers_are_the_same(folder):
    code, out, err = shoal(folder, "verify", *OWN, "--distribute", "mine.py:my_policy")
    assert code == 0, err
    assert out.startswith("my_policy on threads, 3 ticks, against the fused program: the same numb")
    assert "largest difference" in out


# Errors


def test_an_error_is_one_line_and_has_a_traceback_only_with_debug(folder):
    words = ["train", *OWN, "--set", "grows=True"]
    code, out, err = shoal(folder, *words)
    assert (code, out) == (2, "")
    place = 1 + MINE.splitlines().index("    def tick(self, env, state):")
    (line,) = err.splitlines()
    error = "TraceError: tick changes `w` from float32[] to float32[1]"
    assert line.startswith(f"{error} ({folder.name}/mine.py:{place}). ")
    assert "init" in line
    code, _, debugged = shoal(folder, *words, "--debug")
    assert code == 2
    assert "Traceback (most recent call last)" in debugged
    assert debugged.endswith(err)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "pp", "CartPole-v1"], ["unknown algorithm `pp`", "`ppo`"]),
        (["train", *OWN, "--set", "rat=1"], ["unknown setting of Mine `rat`", "`rate`"]),
        (["train", *OWN, "--set", "rate=fast"], ["Mine.rate is a number, not 'fast'"]),
        (["train", *OWN, "--set", "grows=1"], ["Mine.grows is true/false, not 1"]),
        (["train", *OWN, "--set", "rate"], ["--set rate", "NAME=VALUE"]),
        (["train", *OWN, "--backend", "thread"], ["unknown backend `thread`", "`threads`"]),
        (["train", *OWN, "--ticks", "0"], ["ticks=0", "Set ticks to 1 or more"]),
        (["train", *OWN, "--actors", "2"], ["--actors has no effect without --distribute"]),
        (["plan", *OWN, "--distribute", "sebula"], ["unknown distribution policy", "`sebulba`"]),
        (
            ["plan", *OWN, "--distribute", "central", "--actors", "2"],
            ["central takes no --actors", "--workers"],
        ),
        (
            ["plan", *OWN, "--distribute", "decoupled", "--env-replicas", "3"],
            ["4 environments", "3"],
        ),
        (
            ["plan", *OWN, "--distribute", "mine.py:policy"],
            ["unknown name in mine.py", "my_policy"],
        ),
        (["graph", "yours.py:Mine", "mine.py:World"], ["there is no file yours.py"]),
        (["graph", *OWN, "--out", "graph.pdf"], ["can't write graph.pdf", ".html"]),
    ],
)
def test_a_command_line_error_says_how_to_fix_it(words, expected, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert [word for word in expected if word not in err] == [], err
    assert not (folder / "runs").exists()


def test_an_error_in_user_code_names_its_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["graph", "mine.py:Unsaid", "mine.py:World"]) == 2
    err = capsys.readouterr().err
    expected = ["AssertionError (", "mine.py:", "--debug"]
    assert [word for word in expected if word not in err] == [], err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", *OWN, "--tick", "3"], "did you mean --ticks?"),
        (["trane", *OWN], "`train`"),
        (["train", *OWN, "--ticks", "many"], "--ticks"),
        (["train"], "ALGORITHM is missing"),
    ],
)
def test_invalid_options_are_rejected_in_one_line(words, expected, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert expected in err
    assert not (folder / "runs").exists()


def test_a_file_that_cannot_be_written_is_reported(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "is.txt").mkdir()
    assert main(["graph", *OWN, "--out", "is.txt"]) == 2
    assert "can't write is.txt: it is a folder" in capsys.readouterr().err


def test_settings_reach_an_environment_that_a_file_makes(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "maker.py").write_text(
        "from mine import World\n\ndef make(size=1):\n    print('size', size)\n    return World()\n"
    )
    monkeypatch.syspath_prepend(folder)
    words = ["graph", "mine.py:Mine", "maker.py:make", "--env-set"]
    assert main([*words, "size=3"]) == 0
    assert "size 3" in capsys.readouterr().out
    assert main([*words, "sise=3"]) == 2
    assert "It takes: (size=1)" in capsys.readouterr().err


# Ctrl-C


def interrupt(folder, words, event):
    """Send Ctrl-C once `event` is there; return the exit status and the output."""
    process = subprocess.Popen(
        [*COMMAND, "train", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"},
    )
    try:
        while not event():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, out


def test_ctrl_c_while_compiling_is_recorded_in_the_run_folder(tmp_path):
    pytest.importorskip("gymnax")
    summary = tmp_path / "runs" / "mine" / "summary.json"
    words = ["ppo", "CartPole-v1", "--name", "mine"]
    code, out = interrupt(tmp_path, words, summary.exists)
    assert code == 130, out
    assert "Traceback" not in out
    assert json.loads(summary.read_text())["status"] == "interrupted"
    assert json.loads(summary.read_text())["ticks"] == 0


@pytest.mark.parametrize("how", [[], ["--distribute", "mine.py:my_policy"]], ids=["fused", "cut"])
def test_ctrl_c_while_training_leaves_the_state_after_the_last_whole_tick(folder, how):
    metrics = folder / "runs" / "mine" / "metrics.jsonl"
    words = [*OWN, *how, "--name", "mine", "--ticks", "100000000"]
    code, out = interrupt(folder, words, lambda: metrics.exists() and metrics.stat().st_size)
    assert code == 130, out
    assert "Traceback" not in out
    assert "Results are in runs/mine/" in out
    summary, rows = read(folder, "mine")
    assert summary["status"] == "interrupted"
    assert [row["tick"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 1
    assert summary["ticks"] >= 1
    assert set(state_in(metrics.parent)) == {"w", "x"}


def test_ctrl_c_that_user_code_swallows_still_ends_the_run(folder):
    # With `--steps`, `init` is traced once more when the run has started.
    words = ["mine.py:Deaf", "mine.py:World", "--envs", "4", "--name", "mine", "--steps", "1e6"]
    code, out = interrupt(folder, words, (folder / "deaf").exists)
    assert code == 130, out
    summary = json.loads((folder / "runs" / "mine" / "summary.json").read_text())
    assert summary["status"] == "interrupted"


def test_a_user_policy_accepts_only_its_own_parameters(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["plan", *OWN, "--distribute", "mine.py:my_policy", "--workers", "2"]) == 2
    assert "mine.py:my_policy takes no --workers" in capsys.readouterr().err
