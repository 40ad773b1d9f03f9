"""Stops training runs by one or more signals at every phase, and checks what is left.

    python tests/soak/signal_storms.py ROUNDS SEED

prints a row for each round and a table; it exits with 1 if a process or shared memory is left, a
final checkpoint is lost, or a run in lockstep doesn't resume to the bit.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

TICKS = 400
ENVS = ["gymnax:CartPole-v1", "gymnasium:CartPole-v1"]
SMALL = ["--envs", "4", "--set", "num_steps=4"]
LOOPS = {
    "ppo": ["ppo", *SMALL, "--set", "num_minibatches=1"],
    "impala": ["impala", *SMALL, "--distribute", "impala"],
    "ape_x": ["dqn", "--envs", "4", "--distribute", "ape-x"],
}
PHASES = ["start", "compile", "steady", "checkpoint", "end"]
STORMS = {
    "one SIGTERM": [(signal.SIGTERM, 0.0)],
    "one SIGINT": [(signal.SIGINT, 0.0)],
    "SIGTERM each 20 ms": [(signal.SIGTERM, 0.02)] * 100,
    "SIGTERM each 50 ms": [(signal.SIGTERM, 0.05)] * 60,
    "SIGTERM each 1 s": [(signal.SIGTERM, 1.0)] * 5,
    "both, each 100 ms": [(signal.SIGTERM, 0.1), (signal.SIGINT, 0.1)] * 15,
}
LONGEST_S = 240


def command(*words):
    return [sys.executable, "-m", "shoal.cli.entry", *map(str, words)]


def is_reached(phase, folder):
    """Whether a run is in a phase, as far as its folder shows."""
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    match phase:
        case "start":
            return True
        case "compile":
            return (folder / "run.json").exists()
        case "steady":
            return rows > TICKS // 4
        case "checkpoint":
            return rows > 0 and any((folder / "checkpoints").glob("*.writing"))
    return rows >= TICKS - 2


def session(leader):
    """The alive processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(sid) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def stop(words, folder, phase, storm):
    """Run a command, send it signals in a phase; its exit code, and seconds from the first."""
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             start_new_session=True, text=True)  # fmt: skip
    began = time.monotonic()
    while not is_reached(phase, folder) and child.poll() is None:
        assert time.monotonic() - began < LONGEST_S, f"never in phase {phase}"
        time.sleep(0.005)
    first = time.monotonic()
    for number, pause in storm:
        if child.poll() is not None:
            break
        child.send_signal(number)
        time.sleep(pause)
    _, err = child.communicate(timeout=LONGEST_S)
    return child, time.monotonic() - first, err


def state_of(folder):
    from shoal.runs.checkpoints import read_newest

    return read_newest(folder / "checkpoints", print)


def faults(child, folder, shared, err):
    """The faults of a stopped run."""
    time.sleep(0.5)  # signalled processes may need a moment to end
    found = [f"process {pid} is left" for pid in session(child.pid)]
    if left := set(os.listdir("/dev/shm")) - shared:
        found.append(f"shared memory is left: {left}")
    is_early = not folder.exists()  # Python itself was still starting: its default is to end
    if child.returncode not in (0, 130, 143, *((-2, -15) if is_early else ())):
        found.append(f"exit code {child.returncode}: {err[-300:]}")
    if not (folder / "summary.json").exists():
        return found
    summary = json.loads((folder / "summary.json").read_text())
    if summary["status"] not in ("done", "interrupted"):
        found.append(f"status {summary['status']}")
    if summary.get("signal") or summary["status"] == "done":
        newest = state_of(folder)
        if newest is None or newest.snapshot.tick != summary["ticks"]:
            found.append("the final checkpoint is lost")
    return found


def resumed(folder, whole):
    """The faults of a lockstep run that is resumed to its end."""
    done = subprocess.run(command("resume", folder), capture_output=True, text=True, check=False)
    if done.returncode and "has done" not in done.stderr:
        return [f"resume: {done.stderr[-300:]}"]
    got, wanted = state_of(folder).snapshot.values, state_of(whole).snapshot.values
    return [f"`{name}` differs" for name, x in wanted.items() if not np.array_equal(got[name], x)]


def main(rounds, seed):
    """Stop a number of runs; print the results."""
    draw, table, bad = random.Random(seed), Counter(), 0
    with tempfile.TemporaryDirectory() as place:
        root, wholes = Path(place), {}
        for number in range(rounds):
            loop, env, phase = draw.choice([*LOOPS]), draw.choice(ENVS), draw.choice(PHASES)
            storm = draw.choice([*STORMS])
            folder, shared = root / f"r{number}", set(os.listdir("/dev/shm"))
            algorithm, *more = LOOPS[loop]
            words = ["train", algorithm, env, *more, "--ticks", TICKS, "--folder", root]
            words += ["--checkpoint-every", "1s" if phase == "checkpoint" else "end"]
            is_exact = loop == "ppo" and env == ENVS[0]
            if is_exact and env not in wholes:
                wholes[env] = root / "whole"
                subprocess.run(command(*words, "--name", "whole"), check=True, capture_output=True)
            child, seconds, err = stop(command(*words, "--name", folder.name), folder, phase,
                                       STORMS[storm])  # fmt: skip
            found = faults(child, folder, shared, err)
            if is_exact and (folder / "run.json").exists():
                found += resumed(folder, wholes[env])
            outcome = "; ".join(found) or f"good, exit {child.returncode}, {seconds:.1f} s"
            row = f"{loop:7} {env:22} {phase:11} {storm:20}"
            print(f"{number:4} {row} {outcome}", flush=True)
            table[row, "bad" if found else "good"] += 1
            bad += bool(found)
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(f"{row} {n:3} {outcome}" for (row, outcome), n in sorted(table.items())))
    print(f"{rounds - bad} of {rounds} rounds good")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
