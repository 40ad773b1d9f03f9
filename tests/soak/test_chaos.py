"""Training on a cluster survives faults of its workers, hosts, links, disk and driver.

`CHAOS_SECONDS` (600) and `CHAOS_SEED` (0) say for how long, and which faults. `CHAOS_KIND=impala`
is a run of asynchronous actors, which are replaced while the others continue;
`CHAOS_KIND=served` one whose actors are served by inference, and both are replaced together.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from statistics import mean

import pytest

pytest.importorskip("ray")
from conformance.spaces import address, inside, is_allowed, raylets
from shoal.runs.files.checkpoints import read_newest, ticks_in
from soak.chaos import Chaos, small_disk, workers

SECONDS, SEED = int(os.environ.get("CHAOS_SECONDS", "600")), int(os.environ.get("CHAOS_SEED", "0"))
KIND = os.environ.get("CHAOS_KIND", "lockstep")
HOSTS = 3
HANG = 180  # seconds without a new tick after a fault is over that none here may cause
STARTED = 300  # seconds until there is a first one
PAUSE = 12  # seconds between faults
OPEN = 100  # descriptors that a driver may have open at most, however often the run restarted
GRACE = 30  # seconds for a run to stop after SIGTERM
TICKS = 10**6  # more than it comes to
# So slowly that it stays at what it has learnt, for however many ticks.
SLOWLY = ("--distribute", "impala", "--set", "learning_rate=3e-4")
WHAT = {
    "lockstep": ("ppo", "CartPole-v1", "--distribute", "single-learner-coarse"),
    "impala": ("impala", "CartPole-v1", *SLOWLY),
    "served": ("impala", "CartPole-v1", *SLOWLY, "--inference", "2"),
}[KIND]
TRAIN = ("train", *WHAT, "--actors", "2", "--ticks", str(TICKS), "--checkpoint-every", "10s")
ON_RAY = ("--backend", "ray", "--address", f"{address(0)}:6379", "--restarts", "1000")
ENTRY = (sys.executable, "-c", "from shoal.cli.entry import entry; entry()")


class Run:
    """A run on the cluster whose driver may be killed, and its observed progress."""

    def __init__(self, folder, log):
        self.folder, self._log = folder, log
        self._start(*TRAIN, "--folder", str(folder.parent), "--name", folder.name)
        self.longest, self._tick, self._seen_at = 0.0, -1, time.monotonic()
        self.lost, self.opened = [], 0

    def _start(self, *words):
        with open(self._log, "ab") as log:
            self.driver = inside(0, *ENTRY, *words, *ON_RAY, stdout=log, stderr=log)

    def kill(self):
        """Kill the driver and resume; no tick before the last checkpoint may be lost."""
        if not ticks_in(self.folder / "checkpoints"):
            return
        self.driver.kill()
        self.driver.wait()
        tick, newest = self.look(), ticks_in(self.folder / "checkpoints")[-1]
        self.lost.append(tick - newest)
        self._start("resume", str(self.folder))
        self._tick = newest - 1

    def look(self):
        """The last tick that was logged; fails if the next one takes too long."""
        with suppress(OSError):
            text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
            rows = re.findall(r'^\{"tick": (\d+)', text, re.MULTILINE)
            now = int(rows[-1]) if rows else -1
            if now > self._tick:
                self._tick, self._seen_at = now, time.monotonic()
        waited = time.monotonic() - self._seen_at
        self.longest = max(self.longest, waited if self._tick >= 0 else 0.0)
        longest = HANG if self._tick >= 0 else STARTED
        assert waited < longest, f"nothing for {waited:.0f} s since tick {self._tick}"
        with suppress(OSError):
            self.opened = max(self.opened, len(os.listdir(f"/proc/{self.driver.pid}/fd")))
        return self._tick

    def recovered(self, since):
        """Whether there was a new tick since then."""
        return self._seen_at > since

    def wait_from(self, now):
        """Restart the wait for a new tick, after a fault is over."""
        self._seen_at = now

    def said(self):
        """The end of the driver's output."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def stop(self):
        """Send SIGTERM, as a job scheduler does."""
        began = time.monotonic()
        self.driver.terminate()
        assert self.driver.wait(GRACE) == 143, self.said()
        return round(time.monotonic() - began, 1)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.skipif(not is_allowed(), reason="network namespaces can't be made here")
def test_training_survives_what_clusters_do(tmp_path, monkeypatch):
    # A cache of its own: JAX doesn't write its entries whole or not at all.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    with raylets(HOSTS, cpus=2) as cluster, small_disk(tmp_path / "disk") as disk:
        run = Run(disk / "run", tmp_path / "said.txt")
        chaos = Chaos(cluster, disk, run, SEED)
        try:
            disturb(run, chaos, cluster)
            stopped = run.stop()
        except (AssertionError, TimeoutError) as error:
            report = f"{error}\n{chaos.done}\n{cluster.said()}\n{run.said()}"
            raise AssertionError(report) from error
        assert workers(HOSTS) == []
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        seen, saved = rows_of(run.folder), ticks_in(run.folder / "checkpoints")
        read_newest(run.folder / "checkpoints", pytest.fail)
    report = {"faults": dict(Counter(chaos.done)), "longest wait": round(run.longest, 1)}
    report |= {"over rough links": chaos.carried}
    report |= {"stopped within": stopped, "lost with its driver": run.lost, "open": run.opened}
    print(json.dumps(report | {"after": chaos.seconds, "summary": summary}, indent=1))
    assert (summary["status"], saved[-1]) == ("interrupted", summary["ticks"])
    assert [row["tick"] for row in seen] == list(range(summary["ticks"]))
    assert run.opened <= OPEN
    alone = undisturbed(tmp_path, summary["ticks"])
    if KIND == "lockstep":
        assert seen == alone  # to the bit
    else:
        reached = [late_return(rows) for rows in (seen, alone)]
        print("mean return of the second half, disturbed and not:", reached)
        assert reached[0] >= 0.8 * reached[1] > 100


def late_return(rows):
    """The mean return of the second half of a run."""
    return round(mean(row["return_mean"] for row in rows[len(rows) // 2 :]), 1)


def disturb(run, chaos, cluster):
    """Cause faults for `SECONDS`, and wait until the run recovers."""
    while run.look() < 0:
        assert run.driver.poll() is None, "the driver has ended"
        time.sleep(0.5)
    began = struck = time.monotonic()
    while (now := time.monotonic()) - began < SECONDS:
        assert run.driver.poll() is None, "the driver has ended"
        cluster.restart_raylets()
        run.look()
        if now - struck > PAUSE and chaos.comes(run.recovered(struck)):
            chaos.strike()
            struck = time.monotonic()
            run.wait_from(struck)
        time.sleep(0.5)
    last = run.look()
    while run.look() <= last:
        assert run.driver.poll() is None, "the driver has ended"
        time.sleep(0.5)


def undisturbed(folder, ticks):
    """The rows of the same run without faults."""
    words = (*TRAIN, "--backend", "processes", "--folder", str(folder), "--name", "alone")
    driver = subprocess.Popen([*ENTRY, *words], stdout=subprocess.DEVNULL)
    path = folder / "alone" / "metrics.jsonl"
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < ticks:
            assert driver.poll() is None
            time.sleep(0.5)
    finally:
        driver.terminate()
        driver.wait()
    return rows_of(path.parent)[:ticks]


def rows_of(folder):
    """The metrics that a run logged, without the time of each tick."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
