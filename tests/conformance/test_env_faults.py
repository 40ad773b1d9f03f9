"""Every environment fault ends with a clear error at once, and leaves nothing running."""

import os
import signal

import pytest

import shoal
from conformance.faulty import HostLoop, faulty, processes_with
from conformance.lines import until
from conformance.test_processes import nothing_left
from laws.cases import ONE
from shoal.errors import LostError, RunError, SettingError
from shoal.planning.policies import impala
from shoal.runtime import run as running
from shoal.runtime.cluster.recovery import RecoveryPolicy
from shoal.runtime.logs import listening
from shoal.runtime.run import RunCallbacks
from soak import env_faults

__all__ = ["nothing_left"]
LOCKSTEP, ASYNCHRONOUS = shoal.single_learner_coarse(2), impala(2, 1, 3)


def planned(fault="none", policy=LOCKSTEP, **settings):
    graph = shoal.trace(HostLoop(), faulty(fault, **settings), envs=4)
    return shoal.plan(graph, policy, ONE)


def run(fault, policy=LOCKSTEP, backend="processes", watch=None, ticks=20, **settings):
    """A run of environments with this fault, which leaves no simulator whatever happens."""
    try:
        return shoal.run(planned(fault, policy, **settings), backend, ticks=ticks, watch=watch)
    finally:
        until(lambda: not processes_with())


def pids(path):
    return sorted(int(line.split()[0]) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    "policy",
    [LOCKSTEP, pytest.param(ASYNCHRONOUS, marks=pytest.mark.slow)],
    ids=["lockstep", "asynchronous"],
)
def test_environments_are_closed_at_the_end_of_a_run(tmp_path, policy):
    run("popen", policy, folder=str(tmp_path))
    assert len(pids(tmp_path / "opened")) == 2
    assert pids(tmp_path / "closed") == pids(tmp_path / "opened")


@pytest.mark.slow
def test_environments_are_closed_when_another_fails(tmp_path):
    with pytest.raises(RunError, match="the ball is out of the field"):
        run("raise", folder=str(tmp_path))
    assert len(pids(tmp_path / "closed")) == 2


def test_environments_are_closed_when_the_run_is_stopped(tmp_path):
    class Enough(Exception):
        pass

    def stop(tick, metrics):
        raise Enough

    with pytest.raises(Enough):
        run("none", ticks=10**9, watch=stop, folder=str(tmp_path))
    assert pids(tmp_path / "closed") == pids(tmp_path / "opened")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("exit 0", r"worker actor\[.\] ended with exit code 0 in stage `env` at tick 2"),
        ("fork and die", r"worker actor\[.\] was killed by signal 9 \(SIGKILL\) in stage `env`"),
    ],
)
def test_a_worker_that_ends_without_a_report_is_lost(fault, error):
    with pytest.raises(LostError, match=error):
        run(fault)


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_sys_exit_is_reported_with_its_stage_and_tick(backend):
    with pytest.raises(RunError, match=r"`env` failed in actor\[.\] at tick 2: SystemExit: 0"):
        run("sys.exit", backend=backend)


@pytest.mark.parametrize("fault", ["fork", "popen detached"])
def test_what_a_stage_starts_ends_with_the_run_and_does_it_no_harm(fault):
    said = []
    with listening(said.append):
        assert run(fault).ticks == 20
    assert any("called os.fork()" in line for line in said) == (fault == "fork")


def test_the_copy_that_an_environment_forks_ends_in_threads_too(capfd):
    assert run("fork", backend="threads").ticks == 20
    assert "called os.fork() and returned in both processes" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        ("hang", "threads"),
        pytest.param("hang", "processes", marks=pytest.mark.slow),
        ("hang and hold the GIL", "processes"),
    ],
)
def test_a_step_that_takes_longer_than_it_may_ends_the_run(fault, backend):
    watch = RunCallbacks(lambda *_: None, step_timeout=0.5)
    message = (
        r"actor\[.\] \(pid \d+\) has been in stage `env` at tick 2 .* the step timeout of 0.5 s"
    )
    with pytest.raises(RunError, match=message):
        run(fault, backend=backend, watch=watch)


def test_a_worker_whose_step_hangs_is_restarted_under_the_restart_policy(tmp_path):
    class Enough(Exception):
        pass

    losses, ticks = [], []

    def replaced(loss):
        losses.append(loss)

    def see(tick, metrics):
        ticks.append(tick)
        if losses and not losses[-1].is_new:
            raise Enough

    plan = planned("hang once", ASYNCHRONOUS, folder=str(tmp_path))
    watch = RunCallbacks(see, step_timeout=0.5)
    with pytest.raises(Enough):
        RecoveryPolicy(0, replaces=1, replaced=replaced).run(
            plan, "processes", ticks=10**9, watch=watch
        )
    assert "longer than the step timeout" in losses[0].why
    assert ticks == list(range(len(ticks)))


def test_a_step_that_hangs_is_reported_once(monkeypatch):
    monkeypatch.setattr(running, "HUNG_STEP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(running, "LOOK_S", 0.05)
    said, looks = [], []

    class Enough(Exception):
        pass

    def look(statuses):
        looks.extend([None] * bool(said))
        if len(looks) > 10:
            raise Enough

    watch = RunCallbacks(lambda *_: None, stand=look, say=said.append)
    with pytest.raises(Enough):
        run("hang", backend="threads", watch=watch)
    workers = [line.partition(" (pid")[0] for line in said]
    assert workers == list(dict.fromkeys(workers)), "each once"
    assert all("has been in stage `env` at tick 2 for 0 s; --step-timeout" in x for x in said)


@pytest.mark.parametrize(
    ("seconds", "backend", "message"),
    [
        (0.0, "threads", "is not a valid timeout"),
        (float("nan"), "threads", "is not a valid timeout"),
        (5.0, "inline", "on the caller's thread"),
    ],
)
def test_a_step_timeout_that_can_not_be_enforced_is_refused(seconds, backend, message):
    with pytest.raises(SettingError, match=message):
        run("none", backend=backend, watch=RunCallbacks(lambda *_: None, step_timeout=seconds))


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ctrl_c_ends_a_run_whose_step_hangs(tmp_path, backend):
    sent = []

    def interrupt(statuses):
        if (tmp_path / "failing").exists() and not sent:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    watch = RunCallbacks(lambda *_: None, stand=interrupt)
    result = run("hang", backend=backend, watch=watch, folder=str(tmp_path))
    assert result.stopped_by == signal.SIGINT
    assert result.ticks <= 2


@pytest.mark.slow
@pytest.mark.parametrize("flow", env_faults.FLOWS)
@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("fault", ["none", *env_faults.FAULTS])
def test_every_fault_is_reported_and_leaves_nothing(fault, backend, flow):
    *_, left, wrong = env_faults.outcome(fault, backend, flow)
    assert not wrong
    assert not left or env_faults.is_users(fault, backend)
