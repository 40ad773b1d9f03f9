"""Benchmarks one learner with up to a thousand environment workers, on one or more hosts.

Each worker is a process that takes what the learner sends to all, sleeps instead of stepping an
environment, and sends its row back; the learner waits for all rows. One host is shared memory,
several are network namespaces of this machine (addresses of its loopback where none can be made).
Prints, for each number of workers and hosts: seconds until the first tick was over, milliseconds
of a tick, then for a message to or from a worker the clock's time (without the sleep) and the
learner's CPU time, the learner's connections and threads, and memory of the learner and a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from conformance import spaces  # noqa: E402
from shoal.planning.channel_specs import ArraySpec, ChannelSpec, Gate  # noqa: E402
from shoal.planning.policy import Lockstep  # noqa: E402
from shoal.runtime.channels.shared_memory import (  # noqa: E402
    LINE,
    Allocator,
    FutexWaker,
    Memory,
    join_fences,
)
from shoal.runtime.channels.shm import ChannelLayouts  # noqa: E402
from shoal.runtime.net.sockets import listen  # noqa: E402
from shoal.runtime.net.tcp_channel import join_channels  # noqa: E402
from shoal.runtime.net.wiring import RemoteChannels  # noqa: E402

PORT = 23_000
SPIN = 50e-6


def specs_of(workers: int, row: int, params: int) -> dict[str, ChannelSpec]:
    """The channels: rows of all workers to the learner, and its broadcast to them."""
    everyone = tuple(range(workers))
    rows = Gate("rows", "w", "r", (everyone,), Lockstep(), 2)
    news = Gate("params", "r", "w", ((0,),) * workers, Lockstep(), 2)
    obs = ArraySpec("obs", (workers, row), "uint8", 0)
    shared = ArraySpec("p", (params,), "uint8", None)
    return {
        "rows": ChannelSpec(rows, (obs,), workers, workers),
        "params": ChannelSpec(news, (shared,), 1, workers),
    }


class Side:
    """One worker's side of the channels; the learner is worker 0."""

    def __init__(self, me: int, job: dict[str, Any], memory: Memory | None, wakers: int) -> None:
        self.me, self.links = me, None
        specs = specs_of(job["workers"], job["row"], job["params"])
        room = Allocator()
        layouts = ChannelLayouts.plan(specs, room)
        join_fences()
        if memory is not None:
            every = [FutexWaker(memory, wakers + n * LINE, SPIN) for n in range(1 + job["workers"])]
            self.waker: Any = every[me]
            self.channels: dict[str, Any] = dict(layouts.open(memory))
            for channel in self.channels.values():
                gate = channel.state.spec.gate
                of = {"r": every[:1], "w": every[1:]}
                channel.state.subscribe(of[gate.reader], of[gate.writer])
            return
        waker = FutexWaker(Memory.make(LINE), 0)
        numbers = {"r": (0,), "w": tuple(range(1, 1 + job["workers"]))}
        names = ("r[0]", *(f"w[{n}]" for n in range(job["workers"])))
        addresses = ((job["address"], job["port"]),) * len(names)
        token = bytes.fromhex(job["token"])
        remote = RemoteChannels(layouts, room.size, numbers, names, addresses, token)
        listener = socket.create_server(addresses[0], backlog=4096) if me == 0 else listen()
        wakers_of = {"r": [waker], "w": [waker] * job["workers"]}
        self.links, self.channels = join_channels(remote, me, listener, lambda: None, wakers_of)
        self.waker = self.links.waker(waker, alone=True, spin=SPIN)

    def put(self, name: str, end: int, message: dict[str, np.ndarray]) -> None:
        """Put a message as soon as there is room."""
        channel = self.channels[name]
        state = channel.state
        while not state.may_put(end):
            self.waker.wait(lambda: state.may_put(end), 1.0)
        channel.put(end, message, 0)

    def take(self, name: str, end: int) -> None:
        """Take a message as soon as there is one."""
        channel = self.channels[name]
        state = channel.state
        while not state.may_take(end, 0):
            self.waker.wait(lambda: state.may_take(end, 0), 1.0)
        channel.take(end, 0, lambda message, _: message)


def work(me: int, job: dict[str, Any], memory: Memory | None, wakers: int) -> None:
    """A worker: takes, sleeps, and sends its row, until it is killed."""
    side, row = Side(me, job, memory, wakers), np.ones((1, job["row"]), np.uint8)
    row.flags.writeable = False
    end = me - 1
    for _ in range(job["ticks"]):
        side.take("params", end)
        time.sleep(job["sleep"])
        side.put("rows", end, {"obs": row})
    signal.pause()


def learn(job: dict[str, Any], memory: Memory | None, wakers: int) -> dict[str, float]:
    """The learner: sends to all and takes from all; returns its measurements."""
    side, params = Side(0, job, memory, wakers), np.ones(job["params"], np.uint8)
    params.flags.writeable = False
    start: np.ndarray = np.zeros(2)
    first = 0.0
    for tick in range(job["ticks"]):
        side.put("params", 0, {"p": params})
        side.take("rows", 0)
        if tick == 0:
            first = time.time() - job["began"]
            start = now()
    seconds, cpu = now() - start
    moves = (
        2 * job["workers"] * (job["ticks"] - 1)
    )  # each worker receives one message and sends one
    return {
        "start": first,
        "wall_us": 1e6 * (seconds - job["sleep"] * (job["ticks"] - 1)) / moves,
        "cpu_us": 1e6 * cpu / moves,
        "tick_ms": 1e3 * seconds / (job["ticks"] - 1),
        "connections": len(side.links.links) if side.links is not None else 0,
        "threads": threading.active_count(),
        "learner_mb": memory_of(os.getpid(), "Rss:"),
    }


def now() -> np.ndarray:
    """Wall-clock seconds, and CPU seconds of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def memory_of(pid: int, kind: str = "Pss:") -> float:
    """Megabytes of a process (its proportional set size)."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def run_host(job: dict[str, Any]) -> None:
    """Run one host's workers: the first host's process is the learner, the others wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    memory, wakers = None, 0
    if job["hosts"] == 1:
        room = Allocator()
        ChannelLayouts.plan(specs_of(job["workers"], job["row"], job["params"]), room)
        wakers = room.take((1 + job["workers"]) * LINE)
        memory = Memory.make(room.size)
    children = []
    for me in job["own"]:
        pid = os.fork()  # all workers of a host share the imported modules
        if pid == 0:
            try:
                work(me, job, memory, wakers)
            finally:
                os._exit(1)
        children.append(pid)
    try:
        found = learn(job, memory, wakers) if job["host"] == 0 else {}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        sys.stdin.read()  # until all hosts shall end
        some = children[:: max(1, len(children) // 20)]
        each = sum(map(memory_of, some)) / max(1, len(some))
        sys.stdout.write(json.dumps({"worker_mb": each}) + "\n")
        sys.stdout.flush()
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def measure(workers: int, hosts: int, how: argparse.Namespace, *, apart: bool) -> dict[str, float]:
    """Measure one number of workers on one number of hosts."""
    address = spaces.address(0) if apart else "127.0.0.1"
    every = [[n for n in range(1, workers + 1) if n % hosts == host] for host in range(hosts)]
    running = []
    job = {
        "workers": workers, "hosts": hosts, "ticks": how.ticks, "sleep": how.sleep,
        "row": how.row, "params": how.params, "address": address, "port": PORT + workers + hosts,
        "token": os.urandom(32).hex(), "began": time.time(),
    }  # fmt: skip
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        for host in range(hosts):
            words = json.dumps({**job, "host": host, "own": every[host]})
            command = [sys.executable, __file__, "--host", words]
            start = (
                spaces.inside if apart else lambda _, *words, **how: subprocess.Popen(words, **how)
            )
            running.append(start(host, *command, **pipes))
        found, *_ = [json.loads(one.stdout.readline()) for one in running]
        for one in running:
            one.stdin.close()
        ends = [json.loads(one.stdout.readline()) for one in running]
        return found | {"worker_mb": sum(end["worker_mb"] for end in ends) / hosts}
    finally:
        for one in running:
            one.wait(60)


COLUMNS = (
    ("start", "start s", ".1f"),
    ("tick_ms", "ms a tick", ".1f"),
    ("wall_us", "us a message", ".1f"),
    ("cpu_us", "learner's CPU us", ".1f"),
    ("connections", "connections", ".0f"),
    ("threads", "threads", ".0f"),
    ("learner_mb", "learner MB", ".0f"),
    ("worker_mb", "worker MB", ".1f"),
)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 workers over one and two hosts")
    parser.add_argument("--workers", type=int, nargs="*", default=[1000, 2000])
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--ticks", type=int, default=20)
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds instead of a step")
    parser.add_argument("--row", type=int, default=1024, help="bytes that a worker sends")
    parser.add_argument("--params", type=int, default=65_536, help="bytes that the learner sends")
    parser.add_argument("--host", help=argparse.SUPPRESS)
    said = parser.parse_args(words)
    if said.host:
        run_host(json.loads(said.host))
        return
    if said.quick:
        said.workers, said.hosts, said.ticks = [64], [1, 2], 10
    apart = max(said.hosts) > 1 and spaces.is_allowed()
    where = "network namespaces" if apart else "addresses of loopback"
    print(
        f"hosts are {where}; {said.row} bytes a row, {said.params} to each, {said.sleep} s a step"
    )
    print("| workers | hosts | " + " | ".join(title for _, title, _ in COLUMNS) + " |")
    print("|" + "---|" * (2 + len(COLUMNS)))
    with spaces.hosts(max(said.hosts)) if apart else nullcontext():
        for workers in said.workers:
            for hosts in said.hosts:
                found = measure(workers, hosts, said, apart=apart)
                cells = [format(found[name], form) for name, _, form in COLUMNS]
                print(f"| {workers} | {hosts} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
