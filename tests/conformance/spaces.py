"""Hosts of their own in one machine: network namespaces with addresses, joined by a bridge."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

OWN = os.getpid()  # so that several test runs can share one machine
BRIDGE = f"sb{OWN}"
JOINED = 240  # seconds that hosts may take to join a cluster


def is_allowed():
    """Whether namespaces can be made here."""
    if not shutil.which("ip") or os.geteuid() != 0:
        return False
    made = subprocess.run(["ip", "netns", "add", BRIDGE], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", BRIDGE], capture_output=True, check=False)
    return made.returncode == 0


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def inside(number, *command, **how):
    """Run a command on one of the hosts, which share a network of their own."""
    words = ["ip", "netns", "exec", name(number), *map(str, command)]
    return subprocess.Popen(words, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, **how)


def name(number):
    return f"shoal{OWN}-{number}"


def link(number):
    """The name of a host's link to the others, outside of it."""
    return f"sv{OWN}-{number}"


def pids_in(number):
    """The processes of a host."""
    command = ["ip", "netns", "pids", name(number)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def address(number):
    return f"10.77.0.{number + 1}"


@contextmanager
def hosts(count):
    """Several hosts, each with an address of its own; removed afterwards."""
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number in range(count):
            _add(number)
        yield
    finally:
        for number in range(count):
            subprocess.run(["ip", "netns", "del", name(number)], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{name(number)}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def _add(number):
    space, here, there = name(number), link(number), f"sw{OWN}-{number}"
    # A host knows its own name by its own address.
    folder = Path("/etc/netns") / space
    folder.mkdir(parents=True, exist_ok=True)
    own = f"127.0.0.1 localhost\n{address(number)} {socket.gethostname()}\n"
    (folder / "hosts").write_text(own, encoding="utf-8")
    ip("netns", "add", space)
    ip("link", "add", here, "type", "veth", "peer", "name", there)
    ip("link", "set", here, "master", BRIDGE, "up")
    ip("link", "set", there, "netns", space)
    ip("-n", space, "addr", "add", f"{address(number)}/24", "dev", there)
    ip("-n", space, "link", "set", there, "up")
    ip("-n", space, "link", "set", "lo", "up")


class Raylets:
    """A Ray cluster with a raylet on each of several hosts."""

    def __init__(self, folder, cpus):
        self._folder, self._cpus = Path(folder), cpus
        (self._folder / "ray").mkdir()
        self.started = {}

    def start(self, number):
        """Start a raylet on a host; all but the first join the first."""
        ray, shared = Path(sys.executable).parent / "ray", self._folder / "ray"
        own = self._folder / str(number)
        shutil.rmtree(own, ignore_errors=True)  # of a host that was there before
        own.mkdir()
        head = ("--head", "--include-dashboard=false", f"--temp-dir={shared}")
        where = (f"--address={address(0)}:6379",) if number else head
        words = (ray, "start", "--block", *where, f"--num-cpus={self._cpus}",
                 f"--node-ip-address={address(number)}", "--disable-usage-stats")  # fmt: skip
        # Each sees a disk of its own where Ray keeps its files: raylets that start at the same time
        # in one folder take each other's names. Clients that connect there use the first one's.
        if number:
            words = ("sh", "-c", f'mount --bind {own} {shared} && exec "$@"', "sh", *words)
        with open(self._folder / f"{number}.log", "ab") as log:
            self.started[number] = inside(number, *words, stdout=log, stderr=log)

    def kill(self, number):
        """Kill all that runs on a host, as if it had lost its power."""
        for pid in pids_in(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.started[number].wait()

    def wait_for_all(self):
        """Wait until all hosts have joined the cluster; a raylet that fails to is started again."""
        code = f"""
import ray, sys, time
ray.init("{address(0)}:6379", log_to_driver=False, logging_level="error")
while sum(node["Alive"] for node in ray.nodes()) < {len(self.started)}:
    time.sleep(0.2)
"""
        waiting = inside(0, sys.executable, "-c", code, stderr=subprocess.DEVNULL)
        until = time.monotonic() + JOINED
        try:
            while waiting.poll() is None:
                if time.monotonic() > until:
                    raise TimeoutError(f"not all hosts have joined after {JOINED} s\n{self.said()}")
                self.restart_raylets()
                time.sleep(0.2)
        finally:
            waiting.kill()
            waiting.wait()

    def restart_raylets(self):
        """Restart raylets that have ended, as the operator of a cluster would."""
        for number, one in list(self.started.items()):
            if one.poll() is not None:
                self.start(number)

    def said(self):
        """The end of each raylet's log."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def close(self):
        """End them all."""
        for one in self.started.values():
            one.terminate()
        for one in self.started.values():
            try:
                one.wait(40)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


@contextmanager
def raylets(count, cpus):
    """A Ray cluster with a raylet on each of several hosts, all joined."""
    # Ray's sockets lie there, whose names must be short.
    place = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    with place as folder, hosts(count):
        cluster = Raylets(folder, cpus)
        try:
            cluster.start(0)
            _wait_for_head()
            for number in range(1, count):
                cluster.start(number)
            cluster.wait_for_all()
            yield cluster
        finally:
            cluster.close()


def _wait_for_head():
    code = f"import socket; socket.create_connection(('{address(0)}', 6379), 1)"
    until = time.monotonic() + 120
    while time.monotonic() < until:
        tried = inside(0, sys.executable, "-S", "-c", code, stderr=subprocess.DEVNULL)
        if tried.wait() == 0:
            return
    raise TimeoutError("the head did not start")
