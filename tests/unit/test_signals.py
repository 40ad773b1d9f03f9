"""A stop signal is a request; only a later second Ctrl-C skips saving the final state."""

import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.execution.limit import Limit
from shoal.signals import (
    DONE_GRACE_S,
    FORCE_AFTER_S,
    LEAVE_GRACE_S,
    Phase,
    Received,
    leave_soon,
    on_signal,
    owned,
    requested,
)

NUMBERS = st.sampled_from([signal.SIGINT, signal.SIGTERM])
STORMS = st.lists(st.tuples(NUMBERS, st.floats(0, FORCE_AFTER_S / 2)), min_size=1, max_size=50)


def interrupts(phase, storm):
    """The times at which a sequence of signals interrupts; `storm` has pauses in seconds."""
    received, now, found = Received(), 100.0, []
    for number, pause in storm:
        now += pause
        received, does = on_signal(phase, received, number, now)
        if does:
            found.append(now)
    assert received.first == storm[0][0]
    return found


@given(STORMS)
def test_while_saving_only_a_late_second_ctrl_c_interrupts(storm):
    times = itertools.accumulate((pause for _, pause in storm), initial=100.0)
    next(times)
    pressed = [at for at, (number, _) in zip(times, storm, strict=True) if number == signal.SIGINT]
    late = [at for at in pressed if at - pressed[0] >= FORCE_AFTER_S]
    assert interrupts(Phase.SAVING, storm)[:1] == late[:1]


@given(st.lists(st.tuples(st.just(signal.SIGTERM), st.floats(0, 100)), min_size=1))
def test_repeated_sigterm_is_one_request(storm):
    assert interrupts(Phase.SAVING, storm) == []


@given(st.sampled_from(Phase), STORMS)
def test_interrupts_leave_time_to_exit(phase, storm):
    found = interrupts(phase, storm)
    assert all(b - a >= LEAVE_GRACE_S for a, b in itertools.pairwise(found))


@given(STORMS)
def test_the_first_signal_interrupts_when_idle_and_none_does_when_done(storm):
    assert interrupts(Phase.IDLE, storm)[0] == 100.0 + storm[0][1]
    assert interrupts(Phase.DONE, storm) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_recorded_while_the_thread_holds_the_locks_of_the_run(number):
    limit = Limit(10)
    with owned() as owner, owner.saving(), limit._lock:
        os.kill(os.getpid(), number)
        assert requested() == number
    assert signal.getsignal(number) != owner.handle


def test_previous_handlers_are_restored_and_owners_nest():
    before = signal.getsignal(signal.SIGTERM)
    with owned() as outer:
        with owned() as inner:
            assert inner is outer
        assert signal.getsignal(signal.SIGTERM) == outer.handle
    assert signal.getsignal(signal.SIGTERM) is before
    assert requested() == 0


def test_a_job_keeps_the_saving_phase_between_its_runs():
    with owned() as owner:
        with owner.saving():
            assert owner.phase is Phase.SAVING
        assert owner.phase is Phase.IDLE
        with owner.job():
            assert owner.phase is Phase.IDLE
            with owner.saving():
                pass
            assert owner.phase is Phase.SAVING
        assert owner.phase is Phase.DONE


@pytest.mark.skipif(sys.platform != "linux", reason="calls glibc")
def test_a_command_ends_while_its_signals_are_handled():
    code = """if 1:
        import ctypes, sys
        from shoal.cli.entry import entry
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc.abort, None, None)  # runs after Python has given up its handlers
        sys.argv = ["shoal", "--version"]
        entry()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout


STOPPED_WHILE_IT_IMPORTS = """if 1:
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)
    class Finder:
        def find_spec(self, name, *_):
            if name == "shoal.signals":
                os.kill(os.getpid(), signal.SIGINT)
    sys.meta_path.insert(0, Finder())
    import shoal.__main__
"""
STOPPED_BEFORE_IT_RUNS = """if 1:
    import os, signal
    from shoal.cli import entry
    entry._exit_code = lambda owner: os.kill(os.getpid(), signal.SIGTERM)
    entry.entry()
"""


@pytest.mark.parametrize(
    ("code", "number"),
    [(STOPPED_WHILE_IT_IMPORTS, signal.SIGINT), (STOPPED_BEFORE_IT_RUNS, signal.SIGTERM)],
)
def test_a_command_that_is_stopped_while_it_starts_ends_without_a_word(code, number):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"")


@pytest.mark.parametrize(
    ("is_saved", "seconds"), [(False, LEAVE_GRACE_S), (True, LEAVE_GRACE_S + DONE_GRACE_S)]
)
def test_a_saved_run_has_time_to_report_before_the_command_is_left(monkeypatch, is_saved, seconds):
    slept, left = [], threading.Event()
    with owned() as owner:
        monkeypatch.setattr("shoal.signals.time.sleep", slept.append)
        before = signal.set_wakeup_fd(-1)
        try:
            leave_soon(owner, lambda _: left.set())
            if is_saved:
                with owner.job(), owner.saving():
                    pass
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGTERM)
            assert left.wait(60)
        finally:
            signal.set_wakeup_fd(before)
    assert sum(slept) == seconds


def test_only_the_main_thread_receives_signals():
    found = []

    def look():
        with owned() as owner:
            found.append(signal.getsignal(signal.SIGTERM) == owner.handle)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [False]
