"""Runs stopped by schedulers or full disks exit in time and resume bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import shoal
from shoal.runs.files.checkpoints import read_newest, ticks_in
from shoal.signals import FORCE_AFTER_S
from unit.test_resume import check_same_run

pytest.importorskip("gymnax")
# A rate that falls over the run's length would differ between a run and a longer one.
SMALL = ("num_steps=4", "hidden=4,", "update_epochs=1", "num_minibatches=1", "anneal_lr=false")
GRACE = 20  # seconds; schedulers give 30
ENTRY = "from shoal.cli.entry import entry; entry()"
SLOW = pytest.mark.slow
CUT = ("--distribute", "single-learner-coarse", "--actors", "2")


def shoal_train(folder, *words):
    """Start training with the command line, without an end."""
    given = [word for setting in SMALL for word in ("--set", setting)]
    command = [sys.executable, "-c", ENTRY, "train", "ppo", "CartPole-v1", *given, "--envs", "4"]
    return subprocess.Popen(
        [*command, "--folder", str(folder), "--name", "run", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for_rows(run, driver, count=3):
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.02)


def workers_of(pid):
    """The child processes of a process."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


@pytest.mark.parametrize(
    ("backend", "cut"),
    [
        ("inline", CUT),
        pytest.param("threads", (), marks=SLOW),
        pytest.param("processes", CUT, marks=SLOW),
    ],
    ids=["inline", "fused", "processes"],
)
def test_sigterm_leaves_a_final_checkpoint_in_time_and_resumes_bit_for_bit(tmp_path, backend, cut):
    run = tmp_path / "run"
    words = (*cut, "--backend", backend, "--ticks", "100000000", "--checkpoint-every", "end")
    driver = shoal_train(tmp_path, *words)
    try:
        wait_for_rows(run, driver)
        # Some schedulers send it to every process of a job, and some twice.
        for pid in [*workers_of(driver.pid), driver.pid, driver.pid]:
            os.kill(pid, signal.SIGTERM)
        out, _ = driver.communicate(timeout=GRACE)
    finally:
        driver.kill()
    assert driver.returncode == 128 + signal.SIGTERM, out
    assert "Traceback" not in out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["signal"]) == ("interrupted", "SIGTERM")
    reached = summary["ticks"]
    assert ticks_in(run / "checkpoints") == [reached]
    assert f"shoal resume {run}" in out
    more = shoal.resume(run, ticks=reached + 5)
    made = shoal.train(
        shoal.load(run).algorithm, "CartPole-v1", more.plan.distribution, envs=4,
        ticks=reached + 5, backend=backend, folder=tmp_path, name="whole",
    )  # fmt: skip
    check_same_run(run, made.folder)


@pytest.mark.parametrize(
    ("number", "pause"),
    [
        (signal.SIGTERM, 0.02),
        pytest.param(signal.SIGTERM, 0.05, marks=SLOW),
        pytest.param(signal.SIGINT, 0.02, marks=SLOW),
        pytest.param(signal.SIGINT, 0.2, marks=SLOW),
    ],
)
def test_repeated_signals_are_one_request_until_the_command_has_ended(tmp_path, number, pause):
    run = tmp_path / "run"
    words = (*CUT, "--backend", "inline", "--ticks", "100000000", "--checkpoint-every", "end")
    driver = shoal_train(tmp_path, *words)
    try:
        wait_for_rows(run, driver)
        since = time.monotonic()
        while driver.poll() is None and time.monotonic() - since < FORCE_AFTER_S:
            driver.send_signal(number)
            time.sleep(pause)
        out, _ = driver.communicate(timeout=GRACE)
    finally:
        driver.kill()
    assert driver.returncode == 128 + number, out
    assert "Traceback" not in out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert ticks_in(run / "checkpoints") == [summary["ticks"]]


@contextmanager
def disk_of(folder, size):
    """Mount a disk of this size, or skip the test."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk):
    """Fill the disk completely."""
    with open(disk / "full", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def test_on_a_full_disk_training_continues_reports_it_and_catches_up(tmp_path):
    with disk_of(tmp_path / "disk", "8m") as disk:
        run = disk / "run"
        words = ("--ticks", "100000000", "--checkpoint-every", "0.5s", *CUT, "--backend", "inline")
        driver = shoal_train(disk, *words)
        try:
            wait_for_rows(run, driver)
            while not ticks_in(run / "checkpoints"):
                time.sleep(0.05)
            fill(disk)
            lines = []
            while "not written" not in (lines or [""])[-1]:
                lines.append(driver.stdout.readline())
            before = ticks_in(run / "checkpoints")
            assert read_newest(run / "checkpoints", pytest.fail).snapshot.tick == before[-1]
            printed = subprocess.run(
                [sys.executable, "-c", ENTRY, "status", run], capture_output=True, text=True,
                check=True,
            ).stdout  # fmt: skip
            assert f"newest checkpoint of tick {before[-1]:,}, no room for another" in printed
            (disk / "full").unlink()
            while ticks_in(run / "checkpoints")[-1] == before[-1]:
                assert driver.poll() is None
                time.sleep(0.05)
            driver.terminate()
            out, _ = driver.communicate(timeout=GRACE)
        finally:
            driver.kill()
        assert driver.returncode == 143, out
        words = ("not written: no space left on device (", " needed, ", " free); ", "trying again")
        assert all(word in lines[-1] for word in words), lines
        assert "Traceback" not in "".join(lines) + out
        summary = json.loads((run / "summary.json").read_text())
        assert summary["checkpoints_not_written"] >= 1
        assert "lost" not in summary
        rows = (run / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["tick"] for row in rows] == list(range(summary["ticks"]))
        assert ticks_in(run / "checkpoints")[-1] == summary["ticks"]


def test_a_run_that_ends_on_a_full_disk_reports_the_loss_and_fails(tmp_path):
    with disk_of(tmp_path / "disk", "4m") as disk:
        run = disk / "run"
        driver = shoal_train(disk, "--ticks", "100000000", "--checkpoint-every", "end", *CUT)
        try:
            wait_for_rows(run, driver)
            fill(disk)
            driver.terminate()
            out, _ = driver.communicate(timeout=GRACE)
        finally:
            driver.kill()
        assert driver.returncode == 1, out
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert f"everything up to tick {summary['ticks']} is lost" in out
        assert summary["lost"] in out
        assert "Traceback" not in out
