"""Worker processes: how they start, what they say, and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shoal import errors
from shoal.errors import RunError, ShoalError
from shoal.planning.plan import WorkerId
from shoal.runtime.channels.shared_memory import Memory
from shoal.runtime.cluster.machine import oom_kills
from shoal.runtime.cluster.worker_config import ProcessSpec
from shoal.runtime.logs import Say, listener

PATIENCE = 2.0  # seconds that workers have to end when told to


@dataclass
class Child:
    """One worker process."""

    seats: tuple[WorkerId, ...]
    process: subprocess.Popen[bytes]
    report: Any
    output: threading.Thread
    ooms: int
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Who it is, as its output is marked."""
        return "+".join(f"{fragment}[{worker}]" for fragment, worker in self.seats)

    def close(self) -> None:
        """Once it has ended: wait for its last words, and give back its pipes."""
        assert self.process.stdout is not None
        self.output.join(PATIENCE)
        self.report.close()
        if not self.output.is_alive():  # else what it started itself may still speak
            self.process.stdout.close()


def spawn(
    hire: ProcessSpec,
    cores: tuple[int, ...],
    memory: Memory,
    door: socket.socket | None = None,
    again: Mapping[str, Any] | None = None,
) -> Child:
    """Start a process with its orders; others reach it at `door`, which is its own then.

    Where it takes the place of another, `again` tells from where it goes on.
    """
    told, tell = os.pipe()
    heard, hear = os.pipe()
    fds = (memory.fd, told, hear, *([door.fileno()] if door else []))
    ooms = oom_kills()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "shoal.runtime.cluster.worker_process",
            *map(str, (os.getpid(), *fds)),
        ],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **hire.variables, **_threads(cores)},
        start_new_session=True,
    )
    os.close(told)
    os.close(hear)
    if door is not None:
        door.close()
    child = Child(hire.seats, process, os.fdopen(heard, "r"), threading.Thread(), ooms)
    child.output = threading.Thread(target=_relay, args=(child, listener()), daemon=True)
    child.output.start()
    # Sent from a thread: a child that dies early must not leave us writing to nobody.
    path = list(dict.fromkeys([*hire.path, *sys.path]))
    told_first = {
        "path": path, "modules": hire.modules,
        "cores": cores, "size": memory.size, "again": again,
    }  # fmt: skip
    threading.Thread(target=_send, args=(tell, told_first, hire.orders), daemon=True).start()
    return child


def _threads(cores: tuple[int, ...]) -> dict[str, str]:
    count = str(len(cores) or os.cpu_count() or 1)
    return {f"{name}_NUM_THREADS": count for name in ("OMP", "OPENBLAS", "MKL")}


def _send(fd: int, first: Mapping[str, Any], orders: bytes) -> None:
    # How a child died that no longer reads is told by its end.
    with suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(json.dumps(first).encode() + b"\n" + orders)


def _relay(child: Child, say: Say) -> None:
    assert child.process.stdout is not None
    for line in child.process.stdout:
        if not line.startswith(b"[Gloo] Rank"):  # it says how many it sees, each time
            say(f"{child.name} | {line.decode(errors='replace').rstrip()}")


def told_of(child: Child, told: Mapping[str, Any]) -> dict[str, Any]:
    """How a worker ended, as plain data: its own report, or what its end tells."""
    if "kind" in told or not child.process.returncode:
        return {"worker": child.name, **told}
    error = died(child)
    found = {"kind": "LostError", "is_shoal": True, "what": error.what, "fix": error.fix}
    return {"worker": child.name, "where": "", "trace": "", **found}


def told_lost(worker: str) -> dict[str, Any]:
    """How a worker ended whose host is gone."""
    what, fix = f"worker {worker} is lost with its host", "`ray status` shows what is left."
    found = {"kind": "LostError", "is_shoal": True, "what": what, "fix": fix}
    return {"worker": worker, "failed": True, "where": "", "trace": "", **found}


def told_error(told: Mapping[str, Any]) -> ShoalError:
    """A worker's failure as an error of the driver's."""
    if told["is_shoal"]:
        kind = getattr(errors, told["kind"], RunError)
        error = ShoalError.__new__(kind)
        ShoalError.__init__(error, told["what"], told["fix"], told["where"])
    else:
        (fragment, end), tick = told["replica"], told["tick"]
        error = RunError(
            f"{fragment}[{end}] failed at tick {tick}: {told['kind']}: {told['what']}",
            'Run with --debug for the whole traceback, or with backend="inline" to step through.',
            told["where"],
        )
    if told["trace"]:
        error.add_note(f"In worker {told['worker']}:\n{told['trace']}")
    return error


def died(child: Child) -> RunError:
    """The error for a worker that ended without a word."""
    code = child.process.returncode
    if code >= 0:
        return RunError(
            f"worker {child.name} left with exit code {code}",
            "Its own output, marked with its name, says why.",
        )
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and oom_kills() > child.ooms:
        return RunError(
            f"worker {child.name} was killed by the system ({name}): memory ran out",
            "Use fewer environments or workers, or a machine with more memory.",
        )
    return RunError(
        f"worker {child.name} was killed by signal {-code} ({name})",
        "Memory had not run out. Somebody else sent it, or a library crashed: its own output, "
        "marked with its name, may say more.",
    )
