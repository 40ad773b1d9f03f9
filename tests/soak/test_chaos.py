"""Training on a cluster goes on whatever happens to its workers, hosts, links and disk.

`CHAOS_SECONDS` (600) and `CHAOS_SEED` (0) say for how long, and which faults.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("ray")
from conformance.spaces import (
    address,
    inside,
    ip,
    is_allowed,
    join_cluster,
    name,
    raylets,
    wait_for_all,
)

SECONDS, SEED = int(os.environ.get("CHAOS_SECONDS", "600")), int(os.environ.get("CHAOS_SEED", "0"))
HANG = 180  # seconds without a new tick that no fault here may cause
TICKS = 10 * SECONDS
COMMAND = (
    "train", "ppo", "CartPole-v1", "--distribute", "single-learner-coarse", "--actors", "2",
    "--backend", "ray", "--address", f"{address(0)}:6379", "--restarts", "1000",
    "--ticks", str(TICKS), "--checkpoint-every", "10s", "--name", "run",
)  # fmt: skip
ENTRY = "from shoal.cli.entry import entry; entry()"


@contextmanager
def small_disk(folder):
    """A disk of its own, that can be filled."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def workers():
    found = subprocess.run(
        ["pgrep", "-f", "shoal.runtime.child"], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


class Chaos:
    """One fault at a time, each over before the next."""

    def __init__(self, hosts, disk):
        self._hosts, self._disk, self._random = hosts, disk, random.Random(SEED)
        self.done = []

    def strike(self):
        fault = self._random.choice([self.kill, self.kill, self.cut, self.slow, self.fill])
        fault()
        self.done.append(fault.__name__)

    def kill(self):
        """Kill a worker."""
        if pids := workers():
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)

    def cut(self):
        """Kill a host, and bring it back."""
        number = self._random.randrange(1, len(self._hosts))
        self._hosts[number].kill()
        for pid in _pids_in(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._hosts[number].wait()
        self._hosts[number] = join_cluster(number, cpus=2)

    def slow(self):
        """Delay and drop what goes to and from a host; where the kernel can't, drop all of it."""
        link = f"shoalv{self._random.randrange(len(self._hosts))}"
        rough = ["netem", "delay", "20ms", "10ms", "loss", "2%"]
        made = subprocess.run(["tc", "qdisc", "add", "dev", link, "root", *rough], check=False)
        if made.returncode == 0:
            time.sleep(5)
            subprocess.run(["tc", "qdisc", "del", "dev", link, "root"], check=True)
            return
        ip("link", "set", link, "down")
        time.sleep(3)
        ip("link", "set", link, "up")

    def fill(self):
        """Leave no room on the disk, for longer than a checkpoint is due."""
        file = self._disk / "full"
        with suppress(OSError), file.open("wb") as out:
            while True:
                out.write(b"x" * (1 << 20))
        time.sleep(12)
        file.unlink()


def _pids_in(number):
    found = subprocess.run(
        ["ip", "netns", "pids", name(number)], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in found.stdout.split()]


def last_tick(metrics):
    with suppress(OSError):
        rows = re.findall(r'^\{"tick": (\d+)', metrics.read_text(encoding="utf-8"), re.MULTILINE)
        return int(rows[-1]) if rows else -1
    return -1


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.skipif(not is_allowed(), reason="network namespaces can't be made here")
def test_training_survives_what_clusters_do(tmp_path):
    with raylets(3, cpus=2) as hosts, small_disk(tmp_path / "disk") as disk:
        wait_for_all(3)
        driver = inside(0, sys.executable, "-c", ENTRY, *COMMAND, "--folder", disk)
        metrics, chaos = disk / "run" / "metrics.jsonl", Chaos(hosts, disk)
        began = seen_at = time.monotonic()
        tick = -1
        while driver.poll() is None:
            time.sleep(1)
            now = last_tick(metrics)
            if now > tick:
                tick, seen_at = now, time.monotonic()
            assert time.monotonic() - seen_at < HANG, f"nothing since tick {tick}: {chaos.done}"
            left = SECONDS - (time.monotonic() - began)
            if tick >= 0 and left > 0 and int(left) % 15 == 0:
                chaos.strike()
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        summary = json.loads((disk / "run" / "summary.json").read_text(encoding="utf-8"))
        print(json.dumps({"faults": chaos.done, **summary}))
        assert driver.returncode == 0
        assert [row["tick"] for row in rows] == list(range(TICKS))
        assert summary["return_mean"] >= 475
        assert len(chaos.done) >= SECONDS // 60
    assert workers() == []
