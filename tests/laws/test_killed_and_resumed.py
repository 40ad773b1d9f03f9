"""After kill -9 at a random moment every algorithm resumes to the bit; under another cut, alike.

`KILL_SEED` (0) draws the moments.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gymnax")
from laws.differences import difference
from laws.killed import resume, train
from matrix.cells import TOLERANCE, TRIED
from shoal.runs.files.checkpoints import read, ticks_in
from unit.test_resume import check_same_run

SEED = os.environ.get("KILL_SEED", "0")
STARTED = 400  # seconds until there is a first checkpoint, on a machine with much else to do
AFTER = 3  # ticks
# Cuts of each algorithm, and where; a fused run resumes under the first that has no lag.
CUTS = {
    "a2c": (("single_learner_coarse", "processes"), ("environments", "threads")),
    "ddpg": (("single_learner_coarse, lag=1", "inline"), ("ape_x", "processes")),
    "dqn": (("single_learner_fine", "threads"), ("ape_x", "processes")),
    "impala": (("multi_learner", "processes"), ("central", "threads")),
    "ippo": (("decoupled", "inline"), ("environments", "processes")),
    "mappo": (("sebulba", "threads"), ("fused, devices=2", "inline")),
    "ppo": (("single_learner_coarse", "processes"), ("single_learner_coarse, lag=1", "processes")),
    "qmix": (("single_learner_coarse, lag=1", "inline"), ("single_learner_fine", "processes")),
    "r2d2": (("ape_x", "threads"), ("environments", "inline")),
    "sac": (("multi_learner", "processes"), ("central", "threads")),
    "td3": (("decoupled", "inline"), ("ape_x", "processes")),
    "vdn": (("sebulba", "threads"), ("ape_x", "inline")),
}
CELLS = [(a, *cut) for a, cuts in CUTS.items() for cut in (("fused", "threads"), *cuts)]


def killed(folder, cell, moment):
    """Kill a run `moment` seconds after its first checkpoint."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "laws.killed", folder, *cell]
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    until = time.monotonic() + STARTED
    try:
        while not ticks_in(folder / "run" / "checkpoints"):
            assert driver.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(moment)
        assert driver.poll() is None
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_a_run_killed_at_a_random_moment_resumes_to_the_bit(tmp_path, cell):
    moment = random.Random(f"{SEED}{cell}").uniform(0, 1.5)
    run = killed(tmp_path, cell, moment)
    written = (run / "metrics.jsonl").read_bytes().count(b"\n")
    saved = ticks_in(run / "checkpoints")[-1]
    reached = max(written, saved) + AFTER
    if cell[1] == "fused":
        other = shutil.copytree(run, tmp_path / "other")
        check_resumes_alike(other, resumed(run, cell, saved + 1), cell[0])
    resume(run, cell, reached)
    train(tmp_path, "whole", cell, reached, checkpoint_every="end")
    check_same_run(run, tmp_path / "whole")


def resumed(run, cell, tick):
    """The state of a run resumed until `tick`."""
    resume(run, cell, tick)
    return read(run / "checkpoints" / str(tick)).snapshot


def check_resumes_alike(run, wanted, algorithm):
    """A fused run, resumed under another cut, gives the same numbers.

    One tick later: after more, a rounding difference may have changed an action.
    """
    form, backend = next(cut for cut in CUTS[algorithm] if "lag" not in cut[0])
    resume(run, (algorithm, form, backend), wanted.tick)
    found = read(run / "checkpoints" / str(wanted.tick)).snapshot.values
    worst = {name: difference(found[name], x) for name, x in wanted.values.items()}
    assert max(worst.values()) <= TOLERANCE, (form, backend, worst)


def test_every_algorithm_is_killed():
    assert CUTS.keys() == TRIED.keys()
