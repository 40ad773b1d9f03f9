"""Worker processes: how they start, what they report, how they end, and that they leave nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.errors import RunError, ShoalError
from shoal.planning.plan import WorkerId
from shoal.runtime.channels.shared_memory import Memory
from shoal.runtime.cluster.machine import oom_kills
from shoal.runtime.cluster.worker_config import ProcessSpec
from shoal.runtime.logs import Say, listener

OUTPUT_GRACE_S = 1.0  # for output to arrive once a worker is gone: what it forked may hold the pipe
LINES_A_SECOND = 1000  # of output that a worker may relay; it is slowed down beyond that
LONGEST_LINE = 2**16  # bytes
MARK = "SHOAL_RUN"  # the variable by which all that workers start can be found


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended, as plain data."""

    worker: str
    kind: str = ""  # of the error; empty if it ended as it should
    what: str = ""
    fix: str = ""
    where: str = ""
    trace: str = ""
    is_shoal: bool = True
    replica: tuple[str, int] = ("", 0)
    tick: int = 0
    sent: Mapping[str, list[int]] = field(default_factory=dict)  # to other hosts, by channel

    @property
    def error(self) -> ShoalError:
        """The failure as an error of the driver's."""
        if self.is_shoal:
            error = ShoalError.__new__(getattr(errors, self.kind, RunError))
            ShoalError.__init__(error, self.what, self.fix, self.where)
        else:
            error = RunError(
                f"{self.replica[0]}[{self.replica[1]}] failed at tick {self.tick}: "
                f"{self.kind}: {self.what}",
                'Run with --debug for the whole traceback, or with backend="inline" to step '
                "through.",
                self.where,
            )
        if self.trace:
            error.add_note(f"In worker {self.worker}:\n{self.trace}")
        return error


def lost(worker: str, what: str, fix: str) -> WorkerExit:
    """The exit of a worker that is gone without a report."""
    return WorkerExit(worker, "LostError", what, fix)


class WorkerProcess:
    """One worker process, as the host that started it sees it."""

    def __init__(
        self, spec: ProcessSpec, process: subprocess.Popen[bytes], report: int, ooms: int
    ) -> None:
        self.seats, self.process, self._ooms = spec.seats, process, ooms
        self.name = name_of(spec.seats)
        self.exit: WorkerExit | None = None
        self._report, self._line = report, b""
        os.set_blocking(report, False)
        self._relay = threading.Thread(target=relay, args=(self, listener()), daemon=True)
        self._relay.start()

    def poll(self, doing: str = "") -> WorkerExit | None:
        """How it ended, once it has reported that or is gone; `doing` is where it was then."""
        if self.exit is None:
            is_gone = self._is_gone()
            self._read_report()
            if self._line.endswith(b"\n"):
                self.exit = WorkerExit(self.name, **json.loads(self._line))
            elif is_gone:
                self.exit = died(self.name, self.process.wait(), self._ooms, doing)
        return self.exit

    def _is_gone(self) -> bool:
        """Whether it has ended; what it leaves in its process group is ended with it."""
        if self.process.returncode is None:
            look = os.WEXITED | os.WNOWAIT | os.WNOHANG
            with suppress(ChildProcessError):  # this process ignores how its children end
                if os.waitid(os.P_PID, self.process.pid, look) is None:
                    return False
            self.kill()  # while the process isn't reaped, its number is nobody else's
        return True

    def _read_report(self) -> None:
        """Read what there is, without waiting: a process that it forked may hold the pipe open."""
        with suppress(BlockingIOError):
            while self._report >= 0 and (data := os.read(self._report, 2**16)):
                self._line += data

    def kill(self, exit: WorkerExit | None = None) -> None:
        """End it and its process group at once; `exit` is what is reported of it."""
        self.exit = self.exit or exit
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self, until: float, doing: str = "") -> WorkerExit:
        """Give it time to end, end it otherwise, and give its pipes back; how it ended."""
        while not self._is_gone() and time.monotonic() < until:
            self._read_report()  # it may wait for room
            time.sleep(0.005)
        exit = self.poll(doing)
        self.kill()
        self._relay.join(2 * OUTPUT_GRACE_S)
        if self._report >= 0:
            os.close(self._report)
            self._report = -1
        return exit or self.poll(doing) or WorkerExit(self.name)


def name_of(seats: tuple[WorkerId, ...]) -> str:
    """What a worker is called."""
    return "+".join(f"{fragment}[{worker}]" for fragment, worker in seats)


def spawn(
    spec: ProcessSpec,
    cores: tuple[int, ...],
    memory: Memory,
    mark: str,
    door: socket.socket | None = None,
    again: Mapping[str, Any] | None = None,
) -> WorkerProcess:
    """Start a process with its config; others reach it at `door`, which is its own then.

    Where it takes the place of another, `again` says from where it goes on.
    """
    config, config_end = os.pipe()
    report, report_end = os.pipe()
    fds = (memory.fd, config, report_end, *([door.fileno()] if door else []))
    ooms = oom_kills()
    words = map(str, (os.getpid(), *fds))
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.runtime.cluster.worker_process", *words],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **spec.variables, **_threads(cores), MARK: mark},
        start_new_session=True,
    )
    os.close(config)
    os.close(report_end)
    if door is not None:
        door.close()
    # Sent from a thread: a child that dies early must not leave us writing to nobody.
    path = list(dict.fromkeys([*spec.path, *sys.path]))
    first = {
        "path": path, "modules": spec.modules,
        "cores": cores, "size": memory.size, "again": again,
    }  # fmt: skip
    args = config_end, first, spec.orders
    threading.Thread(target=_send, args=args, daemon=True).start()
    return WorkerProcess(spec, process, report, ooms)


def _threads(cores: tuple[int, ...]) -> dict[str, str]:
    count = str(len(cores) or os.cpu_count() or 1)
    return {f"{name}_NUM_THREADS": count for name in ("OMP", "OPENBLAS", "MKL")}


def _send(fd: int, first: Mapping[str, Any], orders: bytes) -> None:
    # How a child died that no longer reads is known by its end.
    with suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(json.dumps(first).encode() + b"\n" + orders)


def relay(worker: WorkerProcess, say: Say) -> None:
    """Pass on what a worker prints, line by line and only so fast, until it is gone."""
    assert worker.process.stdout is not None
    with worker.process.stdout as pipe:
        poll, rest, until, second, count = select.poll(), b"", 0.0, 0.0, 0
        poll.register(pipe, select.POLLIN)
        while True:
            data = os.read(pipe.fileno(), 2**14) if poll.poll(100) else None
            *lines, rest = (rest + (data or b"")).split(b"\n")
            if data == b"" or len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in filter(None, lines):
                if not line.startswith(b"[Gloo] Rank"):  # it says how many it sees, each time
                    say(f"{worker.name} | {line.decode(errors='replace').rstrip()}")
            now = time.monotonic()
            if worker.process.returncode is not None:
                until = until or now + OUTPUT_GRACE_S
            if data == b"" or (until and (data is None or now > until)):
                return
            second, count = (second, count + len(lines)) if now - second < 1 else (now, len(lines))
            if count > LINES_A_SECOND and not until:
                time.sleep(max(0.0, second + 1 - now))


def kill_marked(mark: str) -> None:
    """End what workers with a mark have started that has left their process groups."""
    variable = f"{MARK}={mark}".encode()
    found, until = True, time.monotonic() + OUTPUT_GRACE_S
    while found and time.monotonic() < until:  # what is found may have started others meanwhile
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True


def died(worker: str, code: int, ooms: int, doing: str = "") -> WorkerExit:
    """The exit of a worker that ended without a report; `doing` is where it was."""
    at = f" in {doing}" if doing else ""
    if code >= 0:
        return lost(
            worker,
            f"worker {worker} left with exit code {code}{at}",
            "Something in it called sys.exit() or os._exit(): its own output, marked with its "
            "name, may say more.",
        )
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and oom_kills() > ooms:
        return lost(
            worker,
            f"worker {worker} was killed by the system ({name}){at}: memory ran out",
            "Use fewer environments or workers, or a machine with more memory.",
        )
    return lost(
        worker,
        f"worker {worker} was killed by signal {-code} ({name}){at}",
        "Memory had not run out. Another process sent it, or a library crashed: its own output, "
        "marked with its name, may say more.",
    )
