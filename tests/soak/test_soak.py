"""Whatever is killed whenever, nothing is left running, and the folder says what happened.

Every round starts a training run in a process of its own and disturbs it at a random moment. A
round is drawn from the seed and its number alone, so one that failed can be had again:
SOAK_SEED=3 .venv/bin/python -m pytest -m soak -k "why and [40]"
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shoal.runs.files.checkpoints import read_newest
from soak.driver import DIE, FOLDER, POLICIES

pytest.importorskip("gymnasium")
pytest.importorskip("gymnax")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("SOAK_SEED", "0"))
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "200"))
END_TIMEOUT_S = 20.0  # seconds after which no process of a disturbed run may be left
STARTED = 120.0  # seconds that a run may take to get where it is to be disturbed
MARK = "SHOAL_SOAK_ROUND"
MOMENTS = ("loading", "starting", "running")
SIGNALS = {
    "kill driver": signal.SIGKILL,
    "interrupt driver": signal.SIGINT,
    "terminate driver": signal.SIGTERM,
}
DEEDS = ("kill worker", *SIGNALS)


@dataclass(frozen=True)
class Round:
    """What is trained, what is done to it, and so many seconds after which moment."""

    number: int
    policy: str
    deed: str
    moment: str
    delay: float
    draw: float  # which worker

    @staticmethod
    def of(number: int) -> "Round":
        """The round of this number: policies in turn, all else at random."""
        rng = random.Random(f"{SEED}:{number}")
        policy = POLICIES[number % len(POLICIES)]
        deed, moment = rng.choice(DEEDS), rng.choice(MOMENTS)
        longest = {"loading": 3.0, "starting": 5.0, "running": 1.5}[moment]
        return Round(number, policy, deed, moment, rng.uniform(0, longest), rng.random())

    def __str__(self) -> str:
        return (
            f"SOAK_SEED={SEED} round {self.number}: {self.policy}, {self.deed} "
            f"{self.delay:.2f} s after {self.moment}"
        )


@dataclass(frozen=True)
class Run:
    """A running run: its driver, the mark of all its processes, and where it writes."""

    driver: subprocess.Popen
    mark: str
    folder: Path

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def processes(self) -> list[int]:
        """All alive processes with the mark."""
        mark = f"{MARK}={self.mark}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if has(pid, mark)]

    def workers(self) -> dict[int, str]:
        """Names of the workers that were started."""
        path = self.folder / "workers.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(pid): name for pid, name in (line.split(" ", 1) for line in lines)}

    def said(self) -> str:
        """The end of the driver's output."""
        return (self.folder / "said.txt").read_text(errors="replace")[-3000:]


def has(pid: int, mark: bytes) -> bool:
    with suppress(OSError):
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


@contextmanager
def started(policy: str, folder: Path, **more: str):
    """A driver in a process of its own; nothing of it is left afterwards, even by a failed test."""
    mark = uuid.uuid4().hex
    (folder / "temporary").mkdir()
    env = {
        **os.environ,
        **more,
        MARK: mark,
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(folder / "temporary"),
        # A cache of its own: JAX doesn't write its entries whole or not at all.
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "soak"),
    }
    command = [sys.executable, ROOT / "tests" / "soak" / "driver.py", policy, folder]
    with open(folder / "said.txt", "wb") as said:
        driver = subprocess.Popen(
            command, env=env, stdout=said, stderr=said, start_new_session=True
        )
    run = Run(driver, mark, folder)
    try:
        yield run
    finally:
        for pid in run.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.wait()


def wait(until: Callable[[], object], seconds: float) -> bool:
    """Whether something came true in time."""
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.02)
    return True


def reach(run: Run, one: Round) -> None:
    """Wait for the moment of a round, which for a worker is not before there is one."""
    metrics = run.folder / "run" / "metrics.jsonl"
    moments = {
        "loading": lambda: True,
        "starting": run.workers,
        "running": lambda: metrics.exists() and metrics.stat().st_size,
    }
    ended = run.driver.poll
    first = ["starting"] if one.deed == "kill worker" else []
    for moment in [*first, one.moment]:
        came = wait(lambda m=moment: moments[m]() or ended() is not None, STARTED)
        assert ended() is None, f"{one}: the run ended by itself\n{run.said()}"
        assert came, f"{one}: not {moment} after {STARTED} s\n{run.said()}"
    threading.Event().wait(one.delay)


def disturb(run: Run, one: Round) -> str:
    """Do it; the name of the worker, if one was killed."""
    if one.deed != "kill worker":
        run.driver.send_signal(SIGNALS[one.deed])
        return ""
    workers = run.workers()
    pid = list(workers)[int(one.draw * len(workers))]
    os.kill(pid, signal.SIGKILL)
    return workers[pid]


def check_folder(run: Run, one: Round, killed: str) -> None:
    """The folder is valid and says what happened."""
    path = run.folder / "run" / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {"status": "none"}
    report = f"{one}\nsummary: {summary}\ndriver left with {run.driver.returncode}:\n{run.said()}"
    match one.deed:
        case "kill driver":
            assert summary["status"] in ("none", "running"), report
        case "interrupt driver" | "terminate driver":
            assert run.driver.returncode == 128 + SIGNALS[one.deed], report
            assert summary["status"] in ("none", "interrupted"), report
            assert summary["status"] == "interrupted" or one.moment == "loading", report
        case _:
            assert summary["status"] == "failed", report
            assert f"worker {killed} was killed by signal 9 (SIGKILL)" in summary["error"], report
    if saved := read_newest(run.folder / "run" / "checkpoints", pytest.fail):
        values = [x for x in saved.snapshot.values.values() if x.dtype.kind == "f"]
        assert all(np.isfinite(x).all() for x in values), report


@pytest.mark.parametrize("number", range(ROUNDS))
def test_nothing_is_left_and_the_folder_says_why(number, tmp_path):
    one, shared = Round.of(number), set(os.listdir("/dev/shm"))
    with started(one.policy, tmp_path) as run:
        reach(run, one)
        killed = disturb(run, one)
        ended = wait(lambda: run.driver.poll() is not None, END_TIMEOUT_S)
        assert ended, f"{one}: the driver still runs after {END_TIMEOUT_S} s\n{run.said()}"
        gone = wait(lambda: not run.processes(), END_TIMEOUT_S)
        assert gone, (
            f"{one}: after {END_TIMEOUT_S} s there are still {run.processes()}\n{run.said()}"
        )
        assert wait(lambda: not set(os.listdir("/dev/shm")) - shared, 5), f"{one}: shared memory"
        left = list(run.temporary.rglob("*"))
        assert not left, f"{one}: temporary files are left: {left}"
        check_folder(run, one, killed)


def test_workers_that_are_loading_when_their_driver_is_killed_end(tmp_path):
    with started("fine", tmp_path, **{DIE: "yes"}) as run:
        assert wait(lambda: run.driver.poll() is not None, STARTED)
        assert run.workers()
        gone = wait(lambda: not run.processes(), END_TIMEOUT_S)
        assert gone, f"after {END_TIMEOUT_S} s there are still {run.processes()}\n{run.said()}"


def test_workers_end_if_another_cannot_be_started(monkeypatch):
    import shoal
    from shoal.algorithms import PPO
    from shoal.runtime.cluster import host_agent as site

    spawn, children = site.spawn, []

    def spawn_one(*args):
        if children:
            raise OSError("no more processes")
        children.append(spawn(*args))
        return children[0]

    monkeypatch.setattr(site, "spawn", spawn_one)
    algorithm = PPO(num_steps=8, update_epochs=1, num_minibatches=2, hidden=(8,))
    graph = shoal.trace(algorithm, shoal.envs.make("CartPole-v1"), envs=4)
    plan = shoal.plan(graph, shoal.single_learner_coarse(2))
    with pytest.raises(OSError, match="no more processes"):
        shoal.run(plan, "processes", ticks=3)
    assert children[0].process.poll() is not None
