"""Cluster faults for a run in network namespaces, drawn from a seed."""

import os
import random
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from conformance.spaces import BRIDGE, ip, link, pids_in
from soak.rough import rough_link

FULL = 12  # seconds that a disk stays full: longer than a checkpoint is due
EARLY = 0.2  # chance of a fault before the run has recovered from another; never twice in a row
ROUGH = 10  # seconds that a link stays rough


@contextmanager
def small_disk(folder):
    """A separate small disk that can be filled."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def workers(hosts):
    """The processes of Shoal's workers on all hosts."""
    return [pid for number in range(hosts) for pid in pids_in(number) if _is_worker(pid)]


def _is_worker(pid):
    with suppress(OSError):
        return b"shoal.runtime.cluster.worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class Chaos:
    """One fault at a time, each over before the next."""

    def __init__(self, cluster, disk, run, seed):
        self._cluster, self._disk, self._run = cluster, disk, run
        self._hosts, self._random = len(cluster.started), random.Random(seed)
        self.done, self._began, self._early = [], time.monotonic(), False
        self.carried = []  # over rough links

    @property
    def seconds(self):
        """Seconds since the start."""
        return round(time.monotonic() - self._began)

    def comes(self, recovered):
        """Whether the next fault is due: sometimes before the run has recovered from the last."""
        return recovered or self._early

    def strike(self):
        """Cause a fault, and record it."""
        often = {self.kill_worker: 4, self.kill_host: 2, self.cut_link: 2, self.roughen_link: 3}
        often |= {self.fill_disk: 2, self.kill_driver: 1}
        (fault,) = self._random.choices([*often], weights=often.values())
        self.done.append(fault.__name__)
        self._early = not self._early and self._random.random() < EARLY
        fault()

    def kill_worker(self):
        """Kill a worker."""
        if pids := workers(self._hosts):
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)

    def kill_host(self):
        """Kill a host, and restart it a while later."""
        number = self._random.randrange(1, self._hosts)
        self._cluster.kill(number)
        time.sleep(self._random.uniform(0, 8))
        self._cluster.start(number)

    def cut_link(self):
        """Drop all that goes to and from a host, for a while."""
        one = self._some_link()
        ip("link", "set", one, "down")
        time.sleep(self._random.uniform(0.5, 8))
        ip("link", "set", one, "up")

    def roughen_link(self):
        """Delay what goes to and from a host, and drop some of it."""
        with rough_link(self._some_link(), BRIDGE, self._random.randrange(1 << 16)) as carrier:
            time.sleep(ROUGH)
        self.carried.append(carrier.stdout.read().strip())

    def _some_link(self):
        return link(self._random.randrange(1, self._hosts))

    def fill_disk(self):
        """Fill the disk, for longer than the checkpoint interval."""
        file = self._disk / "full"
        with suppress(OSError), file.open("wb", buffering=0) as out:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        out.write(b"x" * size)
        time.sleep(FULL)
        file.unlink()

    def kill_driver(self):
        """Kill the driver, and resume its run."""
        self._run.kill()
