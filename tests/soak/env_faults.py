"""The error, delay and leftover processes for every environment fault.

`python -m soak.env_faults [BACKEND ...]` (in tests/) prints a table of every fault under every
backend, in lockstep and asynchronous; `... one FAULT BACKEND FLOW FOLDER` makes one run of it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import shoal
from conformance.faulty import FAULTS, HostLoop, faulty, processes_with
from shoal.planning.policies import impala
from shoal.runtime.cluster.recovery import RecoveryPolicy
from shoal.runtime.logs import listening
from shoal.runtime.run import RunCallbacks

TESTS = Path(__file__).parents[1]
BACKENDS, FLOWS = ("threads", "processes", "ray"), ("lockstep", "asynchronous")
FAILS = {
    "raise": "ValueError: the ball is out of the field",
    "hang": "in stage `env` at tick .*, longer than the step timeout of 2 s",
    "hang and hold the GIL": "in stage `env` at tick .*, longer than the step timeout of 2 s",
    "print without end": "in stage `env` at tick .*, longer than the step timeout of 2 s",
    "exit 0": "ended with exit code 0 in stage `env` at tick",
    "exit 1": "ended with exit code 1 in stage `env` at tick",
    "sys.exit": "failed in actor.* at tick .*SystemExit: 0",
    "segfault": r"killed by signal 11 \(SIGSEGV\) in stage `env` at tick",
    "kill": r"killed by signal 9 \(SIGKILL\) in stage `env` at tick",
    "fork and die": r"killed by signal 9 \(SIGKILL\) in stage `env` at tick",
    "popen and die": r"killed by signal 9 \(SIGKILL\) in stage `env` at tick",
    "nan": "environment .* showed nan",
    "inf": "environment .* showed inf",
    "wrong shape": r"it returned float32\[2, 2\], but promised float32\[2, 1\]",
    "wrong dtype": "it returned complex",
    "memory": "MemoryError|Unable to allocate",
}
# In threads these end or hold up the user's own process, and what it starts is its own.
USERS = (
    "popen detached",
    "kill",
    "hang and hold the GIL",
    "exit 0",
    "exit 1",
    "segfault",
    "fork and die",
    "popen and die",
)


def is_users(fault: str, backend: str) -> bool:
    """Whether a fault is one of the user's own process, which Shoal doesn't end."""
    return backend == "threads" and fault in USERS


def one(fault: str, backend: str, flow: str, folder: str) -> None:
    """Make a run and print its error and time as JSON."""
    env = faulty(fault, folder=folder)
    policy = shoal.single_learner_coarse(2) if flow == "lockstep" else impala(2, 1, 3)
    graph = shoal.trace(HostLoop(), env, envs=4)
    cluster = None
    if backend == "ray":
        from shoal.runtime.cluster.ray import ray_cluster

        cluster = ray_cluster()
    plan = shoal.plan(graph, policy, cluster)
    said: list[str] = []
    watch = RunCallbacks(lambda *_: None, say=said.append, step_timeout=2.0)
    with listening(said.append):
        try:
            recovery = RecoveryPolicy(0, say=said.append, replaces=0)
            read = f"done: {recovery.run(plan, backend, ticks=20, watch=watch).ticks} ticks"
        except shoal.ShoalError as error:
            read = f"{type(error).__name__}: {error}"
    (Path(folder) / "result").write_text(json.dumps([read, time.time()]))


def outcome(fault: str, backend: str, flow: str) -> tuple[str, float, list[int], str]:
    """The error, its delay in seconds, leftover processes, and what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "soak.env_faults", "one", fault, backend, flow, folder]
        driver = subprocess.Popen(words, cwd=TESTS, stdout=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(120)
        code = driver.poll()
        driver.kill()
        ended = time.time()
        marks = {p.name: p.read_text() for p in Path(folder).iterdir()}
        left = [*processes_with(), *processes_with(folder)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    failing = float(marks["failing"].split()[1]) if "failing" in marks else ended
    if "result" not in marks:
        read = "nothing, until it is killed"
        if code is not None:
            read = f"the process ends with exit code {code}"
        return read, ended - failing, left, "" if is_users(fault, backend) else "nothing to read"
    read, at = json.loads(marks["result"])
    wanted = FAILS.get(fault, "done: 20 ticks")
    wrong = "" if re.search(wanted, read) else f"wanted {wanted!r}"
    if fault in ("none", "popen", "print") and "closed" not in marks:
        wrong = "environments weren't closed"
    return read, at - failing, left, wrong


def start_ray() -> None:
    """Start a cluster of this machine with room for all workers, which the runs join."""
    import ray

    from shoal.runtime.cluster.ray import QUIET, make_token, on_loopback

    make_token()
    calm: dict[str, Any] = {"memory_monitor_refresh_ms": 0}  # it kills where others need memory
    with on_loopback():
        ray.init(address="local", num_cpus=4, include_dashboard=False, _system_config=calm, **QUIET)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # runs join on loopback, too


def main(backends: list[str]) -> int:
    """Print the table; the number of wrong rows."""
    bad = 0
    if "ray" in backends:
        start_ray()
    print("| fault | backend | flow | what the user reads | seconds | left |")
    print("|---|---|---|---|---|---|")
    for fault in ("none", *FAULTS):
        for backend in backends:
            for flow in FLOWS:
                read, seconds, left, wrong = outcome(fault, backend, flow)
                bad += bool(wrong) or (bool(left) and not is_users(fault, backend))
                first = read.splitlines()[0].replace("|", "/")
                bold = f" **{wrong}**" if wrong else ""
                print(
                    f"| {fault} | {backend} | {flow} | {first}{bold} | {max(0.0, seconds):.1f} | "
                    f"{len(left) or 'nothing'} |",
                    flush=True,
                )
    return bad


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        one(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:] or list(BACKENDS)))
