"""Starts worker processes, reads their reports and output, and cleans up after them."""

from __future__ import annotations

import json
import os
import pickle
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

from shoal import errors
from shoal.errors import RunError, ShoalError
from shoal.planning.plan import WorkerId
from shoal.runtime.channels.shared_memory import Memory
from shoal.runtime.cluster.machine import oom_kills
from shoal.runtime.cluster.worker_config import ProcessSpec, Restart
from shoal.runtime.logs import Log, listener

OUTPUT_GRACE_S = 1.0  # for output to arrive after an exit: a forked process may hold the pipe
LINES_A_SECOND = 1000  # of output that are relayed per worker; more blocks the worker
LONGEST_LINE = 2**16  # bytes
MARK = "SHOAL_RUN"  # environment variable that marks all processes that workers start


@dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker, as plain data."""

    worker: str
    kind: str = ""  # of the error; empty after a normal exit
    what: str = ""
    fix: str = ""
    where: str = ""
    trace: str = ""
    sent: Mapping[str, int] = field(default_factory=dict)  # bytes to other hosts, by channel

    @property
    def error(self) -> ShoalError:
        """The failure as an exception in the driver."""
        error = ShoalError.__new__(getattr(errors, self.kind, RunError))
        ShoalError.__init__(error, self.what, self.fix, self.where)
        if self.trace:
            error.add_note(f"In worker {self.worker}:\n{self.trace}")
        return error


def lost(worker: str, what: str, fix: str) -> WorkerExit:
    """The exit of a worker that ended without a report."""
    return WorkerExit(worker, "LostError", what, fix)


class WorkerProcess:
    """A handle of one worker process, held by the host that started it."""

    def __init__(
        self, spec: ProcessSpec, process: subprocess.Popen[bytes], report: int, ooms: int
    ) -> None:
        self.worker_ids, self.process, self._ooms = spec.worker_ids, process, ooms
        self.name = name_of(spec.worker_ids)
        self.exit: WorkerExit | None = None
        self._report, self._line = report, b""
        os.set_blocking(report, False)
        self._relay = threading.Thread(target=relay, args=(self, listener()), daemon=True)
        self._relay.start()

    def poll(self, doing: str = "") -> WorkerExit | None:
        """The exit, once the worker has reported it or has ended; `doing` is its last stage."""
        if self.exit is None:
            is_gone = self._is_gone()
            self._read_report()
            if self._line.endswith(b"\n"):
                self.exit = WorkerExit(self.name, **json.loads(self._line))
            elif is_gone:
                self.exit = died(self.name, self.process.wait(), self._ooms, doing)
        return self.exit

    def _is_gone(self) -> bool:
        """Whether the process has ended; the rest of its process group is killed then."""
        if self.process.returncode is None:
            look = os.WEXITED | os.WNOWAIT | os.WNOHANG
            with suppress(ChildProcessError):  # this process ignores how its children end
                if os.waitid(os.P_PID, self.process.pid, look) is None:
                    return False
            self.kill()  # until the process is reaped, its pid is not reused
        return True

    def _read_report(self) -> None:
        """Read the available part of the report, without blocking: a fork may hold the pipe."""
        with suppress(BlockingIOError):
            while self._report >= 0 and (data := os.read(self._report, 2**16)):
                self._line += data

    def kill(self, exit: WorkerExit | None = None) -> None:
        """Kill the process group; `exit` is reported as its exit."""
        self.exit = self.exit or exit
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self, until: float, doing: str = "") -> WorkerExit:
        """Wait for it to end, kill it after `until`, and close its pipes; its exit."""
        while not self._is_gone() and time.monotonic() < until:
            self._read_report()  # it may block on a full pipe
            time.sleep(0.005)
        exit = self.poll(doing)
        self.kill()
        self._relay.join(2 * OUTPUT_GRACE_S)
        if self._report >= 0:
            os.close(self._report)
            self._report = -1
        return exit or self.poll(doing) or WorkerExit(self.name)


def name_of(worker_ids: tuple[WorkerId, ...]) -> str:
    """The name of a worker process."""
    return "+".join(f"{fragment}[{worker}]" for fragment, worker in worker_ids)


def spawn(
    spec: ProcessSpec,
    cores: tuple[int, ...],
    memory: Memory,
    mark: str,
    listener_socket: socket.socket | None = None,
    restart: Restart | None = None,
) -> WorkerProcess:
    """Start a worker process with its configuration; it takes over `listener_socket`."""
    config, config_end = os.pipe()
    report, report_end = os.pipe()
    fds = (memory.fd, config, report_end, *([listener_socket.fileno()] if listener_socket else []))
    ooms = oom_kills()
    words = ["-m", "shoal.runtime.cluster.worker_process", *map(str, (os.getpid(), *fds))]
    # No module of the current folder is imported that this process wouldn't import either.
    is_here = sys.path[:1] and sys.path[0] in ("", os.getcwd())
    process = subprocess.Popen(
        [sys.executable, *(() if is_here else ("-P",)), *words],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **spec.variables, **_threads(cores), MARK: mark},
        start_new_session=True,
    )
    os.close(config)
    os.close(report_end)
    if listener_socket is not None:
        listener_socket.close()
    # Sent from a thread: if the child dies early, writing must not block this process.
    path = list(dict.fromkeys([*spec.path, *sys.path]))
    first = {"path": path, "modules": spec.modules, "cores": cores, "size": memory.size}
    data = json.dumps(first).encode() + b"\n" + spec.config + pickle.dumps(restart)
    threading.Thread(target=_send, args=(config_end, data), daemon=True).start()
    return WorkerProcess(spec, process, report, ooms)


def _threads(cores: tuple[int, ...]) -> dict[str, str]:
    count = str(len(cores) or os.cpu_count() or 1)
    return {f"{name}_NUM_THREADS": count for name in ("OMP", "OPENBLAS", "MKL")}


def _send(fd: int, data: bytes) -> None:
    # If the child died before reading, `poll` reports its exit.
    with suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(data)


def relay(worker: WorkerProcess, say: Log) -> None:
    """Relay a worker's output line by line, at a limited rate, until it has ended."""
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
                if not line.startswith(
                    b"[Gloo] Rank"
                ):  # Gloo prints the number of its peers at each start
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
    """Kill processes with this mark that have left the process groups of their workers."""
    variable = f"{MARK}={mark}".encode()
    found, until = True, time.monotonic() + OUTPUT_GRACE_S
    while found and time.monotonic() < until:  # a process may start others before it is killed
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True


def died(worker: str, code: int, ooms: int, doing: str = "") -> WorkerExit:
    """The exit of a worker that ended without a report; `doing` is its last stage."""
    at = f" in {doing}" if doing else ""
    if code >= 0:
        return lost(
            worker,
            f"worker {worker} ended with exit code {code}{at}",
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
