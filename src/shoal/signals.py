"""Handling of Ctrl-C and SIGTERM, with one owner during a whole command or run.

The first signal asks for a graceful stop where there is something to save, and interrupts where
there is nothing. Everything that follows is the same request, except a second Ctrl-C some time
after the first, which gives up the final checkpoint. Handlers take no lock and start no thread, so
a signal can never cause a deadlock.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORCE_AFTER_S = (
    5.0  # after the first Ctrl-C, from when on another one gives up the final checkpoint
)
LEAVE_GRACE_S = 1.5  # that an interrupted command has to end by itself
DONE_GRACE_S = 10.0  # that one has in addition whose run is saved: on a busy machine it ends late
# What is raised in these functions of libraries is printed and lost.
_SWALLOWS = frozenset({"_xla_gc_callback"})


class Phase(Enum):
    """The phase of a command: nothing to save yet, a run with state to save, or all saved."""

    IDLE = "idle"
    SAVING = "saving"
    DONE = "done"


@dataclass(frozen=True)
class Received:
    """The signals so far: the first of all, when the first Ctrl-C came, and the last interrupt."""

    first: int = 0
    first_sigint: float | None = None
    interrupted: float | None = None


def on_signal(phase: Phase, received: Received, number: int, now: float) -> tuple[Received, bool]:
    """The signals received with this one, and whether it interrupts the current work."""
    forces = (
        number == signal.SIGINT
        and received.first_sigint is not None
        and now - received.first_sigint >= FORCE_AFTER_S
    )
    recent = received.interrupted is not None and now - received.interrupted < LEAVE_GRACE_S
    interrupts = {Phase.IDLE: True, Phase.SAVING: forces, Phase.DONE: False}[phase] and not recent
    if number == signal.SIGINT and received.first_sigint is None:
        received = replace(received, first_sigint=now)
    if interrupts:
        received = replace(received, interrupted=now)
    return replace(received, first=received.first or number), interrupts


class SignalOwner:
    """Handles the stop signals of this process while it is installed."""

    def __init__(self) -> None:
        self.received = Received()
        self.phase = Phase.IDLE
        self._after_run = Phase.IDLE

    @property
    def requested(self) -> int:
        """The signal that asked for a stop; 0 if none has."""
        return self.received.first

    @property
    def message(self) -> str:
        """A message about the received signal and its effect."""
        again = f"Ctrl-C again in {FORCE_AFTER_S:g} s or later leaves without its last state"
        return f"{signal.Signals(self.requested).name}: stopping the run after this tick; {again}"

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which signals are recorded, and the run polls `requested`."""
        self.phase = Phase.SAVING
        try:
            yield
        finally:
            self.phase = self._after_run

    @contextmanager
    def job(self) -> Iterator[None]:
        """The context of a run and its folder, whose final state is saved before the exit."""
        self._after_run = Phase.SAVING
        try:
            yield
        finally:
            self.phase = self._after_run = Phase.DONE

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; raise where it interrupts."""
        lost = frame is not None and frame.f_code.co_name in _SWALLOWS
        phase = Phase.DONE if lost else self.phase
        self.received, interrupts = on_signal(phase, self.received, number, time.monotonic())
        if interrupts:
            raise KeyboardInterrupt(number)


_owner: SignalOwner | None = None


def requested() -> int:
    """The signal that has asked this process to stop; 0 if none has, or none is handled."""
    return _owner.requested if _owner is not None else 0


@contextmanager
def owned() -> Iterator[SignalOwner]:
    """The owner of this process's stop signals; the outermost use installs it.

    Only the main thread can: elsewhere the owner receives nothing.
    """
    global _owner  # noqa: PLW0603  a process has one
    if threading.current_thread() is not threading.main_thread():
        yield SignalOwner()
        return
    if _owner is not None:
        yield _owner
        return
    _owner = owner = SignalOwner()
    before = {number: signal.signal(number, owner.handle) for number in STOP_SIGNALS}
    try:
        yield owner
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == owner.handle:
                signal.signal(number, handler)
        _owner = None


def leave_soon(owner: SignalOwner, leave: Callable[[int], None]) -> None:
    """From now on call `leave(number)` a moment after a signal, if the process still runs.

    It isn't called while there is something to save. A thread polls for the signal, so it works
    while XLA compiles, or after a library has swallowed the interrupt.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := os.read(reader, 4096):
            stops = [number for number in numbers if number in STOP_SIGNALS]
            if not stops:
                continue
            time.sleep(LEAVE_GRACE_S)
            forced = owner.received.interrupted is not None
            if owner.phase is Phase.DONE and not forced:
                time.sleep(DONE_GRACE_S)
            if owner.phase is not Phase.SAVING or forced:
                leave(owner.requested or stops[0])

    threading.Thread(target=watch, name="signals", daemon=True).start()


def end_at_once(code: int) -> None:
    """Make a stop signal end this process at once from now on: everything is written."""
    for number in STOP_SIGNALS:
        with suppress(ValueError):  # not the main thread
            signal.signal(number, lambda *_: os._exit(code))
