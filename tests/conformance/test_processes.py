"""Plans over real processes: the same numbers, the cause of every fault, and nothing left."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
import pytest

import shoal
from conformance.lines import until
from conformance.plain import Plain
from laws.cases import ENVS, ONE, graph_of, no_gymnax, start_of
from laws.differences import difference
from shoal.algorithms import PPO
from shoal.planning.policies import environments, impala
from shoal.runs.files.checkpoints import ticks_in
from shoal.runtime.cluster.recovery import RecoveryPolicy
from shoal.runtime.logs import listening
from shoal.runtime.run import RunCallbacks

pytest.importorskip("gymnasium")
PLAIN, SMALL_PPO = Plain(), PPO(num_steps=8, update_epochs=1, num_minibatches=2, hidden=(8,))
WORLD = "gymnasium:conformance.worlds:World-v0"
POLICIES = {
    "coarse(2)": shoal.single_learner_coarse(2),
    "fine(2)": shoal.single_learner_fine(2),
    "fine, served": shoal.single_learner_fine(2, ring=2),
    "environments(2)": environments(2),
    "multi_learner(2)": shoal.multi_learner(2),
    "central(2)": shoal.central(2),
    "decoupled(2,1,1)": shoal.decoupled(2, 1, 1),
    "decoupled(2,2,2)": shoal.decoupled(2, 2, 2),
    "decoupled, served": shoal.decoupled(2, 1, 1, ring=2),
    "sebulba(1,2)": shoal.sebulba(1, 2, lag=0),
}
ON_HOST = ["fine(2)", "fine, served", "environments(2)", "decoupled, served"]
XDIST = (
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_TESTRUNUID",
)  # which of several processes of tests this is


def children():
    """Processes that this one started, or that lost their parent and run Shoal's worker."""
    found = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    mine = [line.split(None, 2) for line in found[1:]]
    return [
        pid for pid, parent, args in mine
        if "shoal.runtime.cluster.worker_process" in args
        and parent in (str(os.getpid()), "1")
        and _is_ours(pid)
    ]  # fmt: skip


def _is_ours(pid):
    """Whether a process was started by tests of this process, not by parallel ones."""
    marks = [f"{name}={os.environ[name]}".encode() for name in XDIST if name in os.environ]
    with suppress(OSError):
        return set(marks) <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return False


def held(kind):
    """The number of open files of a kind in this process."""
    gc.collect()
    return sum(kind in link for link in _links())


def _links():
    """What the open files of this process are; other threads may close some meanwhile."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")


@pytest.fixture(autouse=True)
def nothing_left():
    memory, pipes = held("memfd:shoal"), held("pipe:")
    yield
    assert children() == []
    assert held("memfd:shoal") <= memory + 1, "shared memory is still open"
    assert held("pipe:") <= pipes, "pipes to workers are still open"


@cache
def fused(loop):
    plan = shoal.plan(graph_of(loop), shoal.fused(), ONE)
    return shoal.run(plan, "inline", ticks=3, state=start_of(loop)).values


def largest(got, wanted):
    return max(difference(got[name], wanted[name]) for name in wanted)


def check_numbers(loop, name):
    plan = shoal.plan(graph_of(loop), POLICIES[name], ONE)
    result = shoal.run(plan, "processes", ticks=3, state=start_of(loop))
    assert result.ticks == 3
    assert largest(result.values, fused(loop)) < 1e-5


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_fused_numbers(name):
    check_numbers("chase", name)


@no_gymnax
@pytest.mark.parametrize("name", ["coarse(2)", "decoupled, served"])
def test_ppo_gives_the_fused_numbers(name):
    check_numbers("ppo", name)


@no_gymnax
@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_ppo_gives_the_fused_numbers_under_every_policy(name):
    check_numbers("ppo", name)


def test_a_lag_on_processes_is_that_of_the_inline_run():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2, lag=1), ONE)
    runs = [
        shoal.run(plan, b, ticks=3, state=start_of("chase")).values for b in ("inline", "processes")
    ]
    assert largest(*runs) == 0


def world(**settings):
    return shoal.envs.make(WORLD, **settings)


@cache
def on_world(algorithm=PLAIN):
    return shoal.trace(algorithm, world(), envs=ENVS)


@cache
def alone_on_world(algorithm=PLAIN):
    plan = shoal.plan(on_world(algorithm), shoal.single_learner_coarse(1), ONE)
    return shoal.run(plan, "inline", ticks=3).values


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [(PLAIN, name) for name in ON_HOST]
    + [
        pytest.param(SMALL_PPO, name, marks=() if name == "fine(2)" else pytest.mark.slow)
        for name in ON_HOST
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_policies_agree_on_a_seeded_python_environment(algorithm, name):
    plan = shoal.plan(on_world(algorithm), POLICIES[name], ONE)
    result = shoal.run(plan, "processes", ticks=3)
    assert largest(result.values, alone_on_world(algorithm)) < 1e-5


@pytest.mark.parametrize("name", ["fine(2)", "decoupled, served"])
@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_other_backends_agree_on_it_too(name, backend):
    plan = shoal.plan(on_world(), POLICIES[name], ONE)
    assert largest(shoal.run(plan, backend, ticks=3).values, alone_on_world()) < 1e-5


@pytest.mark.parametrize("backend", ["inline", "threads", "processes"])
def test_lag_stays_within_its_bound(backend):
    graph = shoal.trace(PLAIN, world(seconds=1e-4), envs=ENVS)
    for policy, bound in ((impala(4, 2, 2), 2), (shoal.decoupled(2, 1, 1, lag=1, ring=2), 1)):
        lags = []
        plan = shoal.plan(graph, policy, ONE)
        shoal.run(plan, backend, ticks=6, watch=lambda _, m, lags=lags: lags.extend(m["lag"]))
        assert len(lags) >= 6
        assert 0 <= min(lags) <= max(lags) <= bound


def fails(fault, policy=None, **settings):
    """The error of a run whose environment 5 fails, and its workers' output."""
    env = world(fault=fault, **settings)
    plan = shoal.plan(
        shoal.trace(PLAIN, env, envs=ENVS), policy or shoal.single_learner_fine(2), ONE
    )
    said = []
    with pytest.raises(shoal.ShoalError) as caught, listening(said.append):
        shoal.run(plan, "processes", ticks=10)
    return str(caught.value), said


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("step", "ValueError: the ball is out of the field"),
        ("reset", "OSError: the level file is gone"),
        ("shape", "environment"),
        ("nan", "environment"),
    ],
)
def test_a_faulty_environment_is_named_with_its_replica_and_tick(fault, message):
    error, _ = fails(fault)
    assert message in error
    assert "env[" in error
    assert "environment 0" in error or "environment 4" in error
    assert "at tick 2" in error


@pytest.mark.parametrize(
    ("fault", "message"), [("kill", "signal 9 (SIGKILL)"), ("exit", "exit code 3")]
)
def test_a_worker_that_dies_without_a_report_is_named(fault, message):
    error, _ = fails(fault)
    assert "worker env[" in error
    assert message in error
    assert "memory ran out" not in error


def test_workers_words_are_marked_and_an_environment_worker_has_no_jax():
    plan = shoal.plan(
        shoal.trace(PLAIN, world(fault="print"), envs=2), shoal.single_learner_fine(2), ONE
    )
    said = []
    with listening(said.append):
        shoal.run(plan, "processes", ticks=3)
    assert "env[0] | half way there" in said
    assert "env[1] | False" in said


def test_what_each_worker_waits_for_is_reported():
    graph = shoal.trace(PLAIN, world(seconds=0.4), envs=2)
    plan = shoal.plan(graph, shoal.single_learner_fine(2), ONE)
    found = []
    watching = RunCallbacks(lambda *_: None, stand=lambda standing: found.append(standing()))
    shoal.run(plan, "processes", ticks=1, watch=watching)
    waited = [workers["learner[0]"] for workers in found]
    assert any("learner[0] waits for env" in one.waits_for for one in waited)
    assert any(one.stage == "env" and one.pid for workers in found for one in workers.values())
    assert {name for workers in found for name in workers} == {"learner[0]", "env[0]", "env[1]"}


def test_a_plan_that_needs_more_memory_than_there_is_says_how_much(monkeypatch):
    monkeypatch.setattr("shoal.runtime.cluster.machine.free_memory", lambda: 1000)
    plan = shoal.plan(on_world(), shoal.single_learner_fine(2), ONE)
    with pytest.raises(shoal.ShoalError, match=r"need .*B of shared memory, and 1.0 kB are free"):
        shoal.run(plan, "processes", ticks=1)


def test_a_port_that_is_taken_is_reported(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(
            "shoal.runtime.cluster.host_agent.free_port", lambda host: other.getsockname()[1]
        )
        plan = shoal.plan(graph_of("ppo"), shoal.multi_learner(2), ONE)
        with pytest.raises(shoal.ShoalError, match="the address of a data-parallel group"):
            shoal.run(plan, "processes", ticks=1, state=start_of("ppo"))


def test_a_killed_learner_stops_the_run_and_the_newest_state_is_kept():
    plan = shoal.plan(on_world(), shoal.single_learner_fine(2), ONE)

    def kill(tick, metrics):
        if tick == 20:
            os.kill(int(children()[-1]), signal.SIGKILL)

    with pytest.raises(shoal.ShoalError, match="SIGKILL") as caught:
        shoal.run(plan, "processes", ticks=100_000, watch=kill)
    assert caught.value.tick >= 16
    assert set(caught.value.state) == set(on_world().inputs)


COMMAND = """
import sys, shoal
from conformance.plain import Plain
env = shoal.envs.make({world!r}, seconds=1e-3)
shoal.train(Plain(), env, shoal.{policy}, envs=4, ticks=100000, backend="processes",
            folder={folder!r}, name="run")
"""


@pytest.mark.parametrize("policy", ["single_learner_fine(2)", "impala(2)"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_driver_leaves_nothing_running(tmp_path, policy, number):
    code = COMMAND.format(world=WORLD, policy=policy, folder=str(tmp_path))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    driver = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert driver.poll() is None
        threading.Event().wait(0.05)
    driver.send_signal(number)
    driver.wait(20)
    until = time.monotonic() + 20
    while _session(driver.pid) and time.monotonic() < until:
        threading.Event().wait(0.05)
    assert _session(driver.pid) == []
    if number == signal.SIGINT:
        assert '"status": "interrupted"' in (tmp_path / "run" / "summary.json").read_text()
        assert ticks_in(tmp_path / "run" / "checkpoints")


def _session(pid):
    """Workers that a process started, alive or orphaned; each names its driver's memory."""
    found = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    lines = [line.split(None, 2) for line in found[1:]]
    return [
        p
        for p, parent, args in lines
        if "shoal.runtime.cluster.worker_process" in args and parent in (str(pid), "1")
    ]


def test_a_loop_of_ones_own_in_a_script_runs_on_processes(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        (Path(__file__).parents[1] / "laws" / "outside_loop.py").read_text()
        + """

import shoal
plan = shoal.plan(shoal.trace(Chase(), envs=4), shoal.single_learner_coarse(2))
print(shoal.run(plan, "processes", ticks=2).ticks)
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr


def test_results_are_ordinary_state():
    plan = shoal.plan(on_world(), shoal.single_learner_fine(2), ONE)
    result = shoal.run(plan, "processes", ticks=2)
    again = shoal.run(plan, "inline", ticks=2).state
    assert jax.tree.structure(result.state) == jax.tree.structure(again)


def test_no_tick_is_missing_though_workers_were_ahead_of_the_metrics():
    asks, seen, went_back = [], [], []

    def see(tick, metrics):
        seen.append(tick)
        if len(seen) == 1:
            until(lambda: max(one.tick for one in asks[-1]().values()) > 32)
            asks.clear()  # the closure holds the run's memory
            one = int(children()[0])
            os.kill(one, signal.SIGKILL)
            os.waitid(os.P_PID, one, os.WEXITED | os.WNOWAIT)  # its parent may still ask

    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), ONE)
    recovery = RecoveryPolicy(1, on_failure=lambda error, tick: went_back.append((tick, len(seen))))
    watching = RunCallbacks(see, stand=lambda standing: None if seen else asks.append(standing))
    result = recovery.run(plan, "processes", ticks=90, state=start_of("chase"), watch=watching)
    assert seen == list(range(90))
    ((start, shown),) = went_back
    assert shown - 16 <= start <= shown
    assert result.ticks == 90
