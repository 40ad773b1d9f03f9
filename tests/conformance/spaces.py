"""Hosts of their own in one machine: network namespaces with addresses, joined by a bridge."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

BRIDGE = "shoalbr"


def is_allowed():
    """Whether namespaces can be made here."""
    if not shutil.which("ip") or os.geteuid() != 0:
        return False
    made = subprocess.run(["ip", "netns", "add", "shoaltry"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "shoaltry"], capture_output=True, check=False)
    return made.returncode == 0


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def inside(number, *command, **how):
    """A command as it runs on one of the hosts; nobody else is on their network."""
    words = ["ip", "netns", "exec", name(number), *map(str, command)]
    return subprocess.Popen(words, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, **how)


def name(number):
    return f"shoal{number}"


def address(number):
    return f"10.77.0.{number + 1}"


@contextmanager
def hosts(count):
    """So many hosts, each with an address of its own, and nothing left of them afterwards."""
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
    space, here, there = name(number), f"shoalv{number}", f"shoalw{number}"
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


def join_cluster(number, cpus, *where):
    """Start a raylet on a host; unless said otherwise it joins the first host's."""
    ray = Path(sys.executable).parent / "ray"
    where = where or (f"--address={address(0)}:6379",)
    return inside(
        number, ray, "start", "--block", *where, f"--num-cpus={cpus}",
        f"--node-ip-address={address(number)}", "--disable-usage-stats",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@contextmanager
def raylets(count, cpus):
    """A Ray cluster with a raylet on each of so many hosts."""
    # Ray's sockets lie there, whose names must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder, hosts(count):
        started = []
        try:
            head = ("--head", "--include-dashboard=false", f"--temp-dir={folder}")
            started.append(join_cluster(0, cpus, *head))
            _wait_for_head()
            started.extend(join_cluster(number, cpus) for number in range(1, count))
            yield started
        finally:
            for one in reversed(started):
                one.terminate()
            for one in started:
                try:
                    one.wait(40)
                except subprocess.TimeoutExpired:
                    one.kill()
                    one.wait()


def wait_for_all(count):
    """Wait until so many hosts have joined the cluster."""
    code = f"""
import ray, time
ray.init("{address(0)}:6379", log_to_driver=False, logging_level="error")
while sum(node["Alive"] for node in ray.nodes()) < {count}:
    time.sleep(0.2)
"""
    inside(0, sys.executable, "-c", code, stderr=subprocess.DEVNULL).wait(120)


def _wait_for_head():
    code = f"import socket; socket.create_connection(('{address(0)}', 6379), 1)"
    until = time.monotonic() + 120
    while time.monotonic() < until:
        tried = inside(0, sys.executable, "-S", "-c", code, stderr=subprocess.DEVNULL)
        if tried.wait() == 0:
            return
    raise TimeoutError("the head did not start")
