"""The entry point of the `shoal` command: handles signals before JAX is imported."""

import atexit
import os
import signal
import sys

from shoal.signals import SignalOwner, end_at_once, leave_soon, owned

SIGNALLED = 128  # and the signal's number: the exit code of a command that was stopped


def entry() -> None:
    """Run the command; stopped with nothing to save, it ends soon, even while compiling."""
    codes: list[int] = []
    atexit.register(_end, codes)  # before all others, so that it runs after them
    try:
        with owned() as owner:
            codes.append(_exit_code(owner))
            end_at_once(codes[0])
    except KeyboardInterrupt as stop:  # just before or after that
        codes.append(SIGNALLED + (stop.args or (signal.SIGINT,))[0])
    if codes[0] > SIGNALLED:  # compiling threads and the like could hold up the interpreter
        _end(codes)
    sys.exit(codes[0])


def _exit_code(owner: SignalOwner) -> int:
    """Run the command; its exit code, or 128 and the signal that stopped it."""
    try:
        leave_soon(owner, _leave)
        from shoal.cli.main import main

        code = main()
    except BaseException:  # imports may have turned the interrupt into any exception
        if not owner.requested:
            raise
        code = SIGNALLED + owner.requested
    return SIGNALLED + owner.requested if code > SIGNALLED and owner.requested else code


def _end(codes: list[int]) -> None:
    """End the process while its signals are handled, as they aren't while Python is taken down."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def _leave(number: int) -> None:
    """Exit at once, from any thread; marks the folders of running runs as interrupted."""
    try:
        mark = getattr(sys.modules.get("shoal.runs.files.folder"), "mark_interrupted", None)
        if mark:
            mark()
    finally:
        os._exit(SIGNALLED + number)
