"""A resumed run gives the same results as one that was never stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import jax
import pytest

import shoal
from laws.cases import FOUR, ONE, WRITTEN
from laws.differences import difference
from shoal.errors import CheckpointError, SettingError
from shoal.runs.files.checkpoints import read_newest, read_record, ticks_in
from shoal.runs.files.folder import locked
from unit.toy_loop import Toy, agreeing, check_error, plain

COARSE, LAGGED = shoal.single_learner_coarse(2), shoal.single_learner_coarse(2, lag=1)
HALF, TICKS = 4, 9


def train(folder, name, distribute, ticks=TICKS, loop="chase", **how):
    how = {"envs": 8, "backend": "threads", "cluster": ONE, "seed": 3, **how}
    how |= {"ticks": ticks, "folder": folder, "name": name}
    return shoal.train(*WRITTEN[loop](), distribute, **how)


def resume(folder, *distribute, **how):
    return shoal.resume(folder, *distribute, **{"cluster": ONE, **how})


def rows(folder):
    """The metrics of a run by tick, without the time they took."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def check_same_run(folder, wanted, tolerance=0.0):
    """Check that the folders have the same metrics, summary and final state."""
    got, other = (read_newest(f / "checkpoints", print).snapshot for f in (folder, wanted))
    assert got.tick == other.tick
    for name, x in other.values.items():
        assert difference(got.values[name], x) <= tolerance, name
    if not tolerance:
        assert rows(folder) == rows(wanted)
    assert [row["tick"] for row in rows(folder)] == list(range(got.tick))
    summary, expected = (json.loads((f / "summary.json").read_text()) for f in (folder, wanted))
    for name in ("status", "ticks", "env_steps", "episodes"):
        assert summary[name] == expected[name], name


@pytest.mark.parametrize(
    ("distribute", "backend"),
    [
        (shoal.fused(), "threads"),
        (COARSE, "threads"),
        (LAGGED, "threads"),
        (LAGGED, "inline"),
        pytest.param(LAGGED, "processes", marks=pytest.mark.slow),
    ],
    ids=["fused", "coarse", "lagged", "lagged, in turn", "lagged, processes"],
)
def test_a_run_in_two_parts_is_the_run_in_one(tmp_path, distribute, backend):
    whole = train(tmp_path, "whole", distribute, backend=backend)
    part = train(tmp_path, "part", distribute, HALF, backend=backend)
    again = resume(part.folder, ticks=TICKS)
    check_same_run(part.folder, whole.folder)
    assert again.summary["resumed"] == [HALF]
    assert again.summary["seconds"] > part.summary["seconds"]


def test_a_run_resumes_under_other_policies_replica_counts_and_backends(tmp_path):
    whole = train(tmp_path, "whole", shoal.fused())
    part = train(tmp_path, "part", shoal.fused(), 2).folder
    resume(part, COARSE, ticks=4)
    resume(part, shoal.single_learner_coarse(4), ticks=5, backend="inline")
    resume(part, shoal.decoupled(2, 1, 1), ticks=7)
    resume(part, shoal.fused(2), ticks=TICKS, cluster=FOUR)
    check_same_run(part, whole.folder, 1e-5)
    assert (
        json.loads((part / "run.json").read_text())["distribution"]["settings"]["name"] == "fused"
    )


def test_checkpoints_are_written_during_the_run(tmp_path):
    seen = []
    run = train(tmp_path, "run", COARSE, 400, checkpoint_every=1, keep=2, announce=seen.append)
    kept = ticks_in(run.folder / "checkpoints")
    assert kept[-1] == 400
    assert len(kept) == 2  # nothing here has a return, so none is the best


@pytest.mark.parametrize("backend", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_run_with_workers_keeps_the_newest_and_the_best_checkpoints(tmp_path, backend):
    pytest.importorskip("gymnax")
    how = {"loop": "ppo", "backend": backend, "checkpoint_every": 1, "keep": 2}
    run = train(tmp_path, "run", COARSE, 60, **how).folder
    kept = {t: read_record(run / "checkpoints" / str(t)) for t in ticks_in(run / "checkpoints")}
    means = {row["tick"] + 1: row["return_mean"] for row in rows(run)}
    assert {t: record["return_mean"] for t, record in kept.items()} == {t: means[t] for t in kept}
    *older, before, last = kept
    assert last == 60
    assert len(older) <= 1
    assert all(means[t] > max(means[before], means[last]) for t in older)


def test_a_run_without_a_checkpoint_starts_from_tick_0(tmp_path):
    whole = train(tmp_path, "whole", COARSE)
    part = train(tmp_path, "part", COARSE, HALF).folder
    subprocess.run(["rm", "-r", part / "checkpoints"], check=True)
    check_error(SettingError, lambda: resume(part, ticks=TICKS), "no folder `checkpoints`")
    (part / "checkpoints").mkdir()
    said = []
    resume(part, ticks=TICKS, announce=said.append)
    assert "starts over" in said[0]
    check_same_run(part, whole.folder)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(tmp_path):
    whole = train(tmp_path, "whole", COARSE)
    part = train(tmp_path, "part", COARSE, 2).folder
    resume(part, ticks=HALF)
    damage(part / "checkpoints" / str(HALF))
    said = []
    resume(part, ticks=TICKS, announce=said.append)
    assert f"checkpoints/{HALF} can't be read" in said[0]
    check_same_run(part, whole.folder)


def damage(checkpoint):
    """Change a byte in the middle of the arrays."""
    path = max((p for p in checkpoint.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def test_runs_that_cannot_be_resumed_are_rejected(tmp_path):
    check_error(SettingError, lambda: resume(tmp_path / "nowhere"), "no run", "run.json")
    run = train(tmp_path, "run", COARSE, HALF).folder
    check_error(SettingError, lambda: resume(run), "has done 4 of 4 ticks", "--ticks")
    with locked(run):
        check_error(SettingError, lambda: resume(run, ticks=9), "still running", str(os.getpid()))
    other = Toy(plain)
    check_error(
        SettingError, lambda: resume(run, algorithm=other, ticks=9), "a run of Chase, not of"
    )
    saved = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(saved | {"envs": 4}))
    check_error(CheckpointError, lambda: resume(run, ticks=9), "`keys`", "number of environments")
    damage(run / "checkpoints" / str(HALF))
    check_error(CheckpointError, lambda: resume(run, ticks=9), "none of the 1 checkpoints")


def test_a_checkpoint_of_another_loop_is_rejected(tmp_path):
    run = train(tmp_path, "run", shoal.fused(), HALF).folder
    saved = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(saved | {"algorithm": {"unknown": "Chase"}}))
    check_error(SettingError, lambda: resume(run, ticks=9), "JSON can't describe", "algorithm=...")
    again = Toy(agreeing)
    words = ["of another loop than toy", "has no `age`"]
    check_error(CheckpointError, lambda: resume(run, algorithm=again, ticks=9), *words)


COMMAND = """
import sys, shoal
from unit.test_resume import train
folder, loop, policy, backend = sys.argv[1:]
train(folder, "run", eval(policy), 10**9, loop=loop, backend=backend, checkpoint_every=1)
"""
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("loop", "policy", "backend"),
    [
        ("chase", "shoal.single_learner_coarse(2)", "threads"),
        pytest.param("chase", "shoal.decoupled(2, 1, 1, lag=2)", "processes", marks=SLOW),
    ],
)
def test_after_kill_9_at_a_random_moment_a_run_resumes_bit_for_bit(tmp_path, loop, policy, backend):
    how = [tmp_path, loop, policy, backend]
    run, wanted = tmp_path / "run", random.Random("".join(map(str, how[1:]))).randrange(1, 300)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    driver = subprocess.Popen([sys.executable, "-c", COMMAND, *how], env=env)
    metrics = run / "metrics.jsonl"
    try:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < wanted:
            assert driver.poll() is None
            threading.Event().wait(0.02)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    reached = max((ticks_in(run / "checkpoints") or [0])[-1], wanted) + 20
    again = resume(run, ticks=reached)
    whole = train(tmp_path, "whole", eval(policy), reached, loop=loop, backend=backend)
    check_same_run(again.folder, whole.folder)


def test_python_environments_start_new_episodes(tmp_path):
    pytest.importorskip("gymnasium")
    from shoal.algorithms import PPO

    env = shoal.envs.make("gymnasium:conformance.worlds:World-v0")
    small = PPO(num_steps=4, update_epochs=1, num_minibatches=1, hidden=(4,))
    how = {"envs": 4, "ticks": 2, "folder": tmp_path, "name": "run", "backend": "inline"}
    part = shoal.train(small, env, COARSE, **how)
    said = []
    after = shoal.resume(part.folder, COARSE, ticks=3, announce=said.append)
    assert "4 environments" in said[0]
    assert "new episodes" in said[0]
    assert after.state.env_states.steps.tolist() == [4] * 4  # of the third tick alone
    assert not set(part.state.env_states.seed.tolist()) & set(after.state.env_states.seed.tolist())
    assert [row["tick"] for row in rows(part.folder)] == [0, 1, 2]


def test_a_restart_changes_only_the_episodes(tmp_path):
    pytest.importorskip("gymnasium")
    from shoal.algorithms import PPO
    from shoal.envs.fresh import restart_hosts
    from shoal.tracing.trace import Origin

    env = shoal.envs.make("gymnasium:conformance.worlds:World-v0")
    origin = Origin(PPO(num_steps=4, update_epochs=1, num_minibatches=1, hidden=(4,)), env)
    state = origin.start(0, 4)
    values = dict(enumerate(jax.tree.leaves(state)))
    found = restart_hosts(origin, values, 4, 1)
    again = jax.tree.unflatten(jax.tree.structure(state), found.values())
    assert (again.obs != state.obs).all()
    assert (again.env_states.seed != state.env_states.seed).all()
    same = again._replace(obs=state.obs, env_states=state.env_states)
    for got, wanted in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True):
        assert difference(got, wanted) == 0


@pytest.mark.parametrize("backend", ["threads", pytest.param("processes", marks=SLOW)])
def test_asynchronous_replicas_resume_from_their_latest_ticks(tmp_path, backend):
    part = train(tmp_path, "run", shoal.impala(2), 60, backend=backend, checkpoint_every=5).folder
    after = resume(part, ticks=70)
    assert after.summary["ticks"] == 70
    assert [row["tick"] for row in rows(part)] == list(range(70))
    steps = [row["env_steps"] for row in rows(part)]
    assert len({b - a for a, b in pairwise(steps)}) == 1
