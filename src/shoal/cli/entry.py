"""Where the `shoal` command begins: signals count from the first moment, before JAX is loaded."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SOON = 1.5  # seconds
STOPS = (signal.SIGINT, signal.SIGTERM)
SIGNALLED = 128  # and the signal's number: how a command ends that was told to stop
_stops: list[int] = []


def entry() -> None:
    """Run the command; when told to stop leave at once, even if XLA is still compiling."""
    for number in STOPS:
        signal.signal(number, _interrupt)
    try:
        from shoal.cli.main import main

        code = main()
    except BaseException:  # of whatever kind what was loading has made of it
        if not _stops:
            raise
        code = _code()
    if code > SIGNALLED:
        code = _code() if _stops else code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise as usual; what is loading or tracing may lose the exception, so leave soon."""
    _stops.append(number)
    _later(SOON, _leave)
    # What is raised while JAX collects garbage is printed and lost: come again a moment later.
    if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
        _later(0.01, lambda: os.kill(os.getpid(), number))
        return
    raise KeyboardInterrupt


def _later(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def _leave() -> None:
    mark = getattr(sys.modules.get("shoal.records"), "mark_interrupted", None)
    if mark:
        mark()
    os._exit(_code())


def _code() -> int:
    return SIGNALLED + _stops[0]


if __name__ == "__main__":
    entry()
