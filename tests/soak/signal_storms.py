"""Stops training runs by one or more signals at every phase, and checks what is left.

    python tests/soak/signal_storms.py ROUNDS SEED [FIRST]

prints a row for each round and a table; it exits with 1 if a process, shared memory or a temporary
file is left, a final checkpoint is lost, a stopped run doesn't resume, or one in lockstep doesn't
resume to the bit. The seed shuffles all combinations, so 180 rounds try each once. All runs of PPO
on gymnax are resumed, and each fourth of the others.
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
from itertools import islice, product
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
BACKENDS = ["threads", "processes"]
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
    return [sys.executable, "-m", "shoal", *map(str, words)]


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
    from shoal.runs.files.checkpoints import read_newest

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
    """The faults of a stopped run that is resumed: a little, or to its end if it has an equal."""
    saved = state_of(folder)
    tick = saved.snapshot.tick if saved else 0
    if tick == TICKS:
        return [] if whole is None else differing(saved, state_of(whole))
    more = [] if whole else ["--ticks", tick + 4]
    done = subprocess.run(
        command("resume", folder, *more), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return [f"resume: {done.stderr[-300:]}"]
    return differing(state_of(folder), state_of(whole)) if whole else []


def differing(got, wanted):
    """The values of two checkpoints that aren't equal to the bit."""
    pairs = {name: (got.snapshot.values[name], x) for name, x in wanted.snapshot.values.items()}
    return [f"`{name}` differs" for name, pair in pairs.items() if not np.array_equal(*pair)]


def words_of(loop, env, phase, backend, root):
    """The command of a run, without its name."""
    algorithm, *more = LOOPS[loop]
    words = ["train", algorithm, env, *more, "--ticks", TICKS, "--folder", root]
    words += ["--backend", backend]
    return [*words, "--checkpoint-every", "1s" if phase == "checkpoint" else "end"]


def rounds_of(seed):
    """All combinations in a random order, and a backend for each; again and again."""
    draw = random.Random(seed)
    while True:
        every = [*product(LOOPS, ENVS, PHASES, STORMS)]
        draw.shuffle(every)
        for one in every:
            yield *one, draw.choice(BACKENDS)


def main(rounds, seed, first=0):
    """Stop a number of runs; print the results."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    table = Counter()
    with tempfile.TemporaryDirectory() as place:
        root, temporary, whole = Path(place), Path(place) / "tmp", Path(place) / "whole"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        plain = words_of("ppo", ENVS[0], "end", "threads", root)
        subprocess.run(command(*plain, "--name", "whole"), check=True, capture_output=True)
        for number, one in islice(enumerate(rounds_of(seed)), first, first + rounds):
            loop, env, phase, storm, backend = one
            folder, shared = root / f"r{number}", set(os.listdir("/dev/shm"))
            words = command(*words_of(loop, env, phase, backend, root), "--name", folder.name)
            child, seconds, err = stop(words, folder, phase, STORMS[storm])
            found = faults(child, folder, shared, err)
            found += [f"a temporary file is left: {path.name}" for path in temporary.iterdir()]
            is_exact = loop == "ppo" and env == ENVS[0]
            if (folder / "run.json").exists() and (is_exact or number % 4 == 0):
                found += resumed(folder, whole if is_exact else None)
            outcome = "; ".join(found) or f"good, exit {child.returncode}, {seconds:.1f} s"
            row = f"{loop:6} {env:22} {phase:10} {storm:18} {backend:9}"
            print(f"{number:4} {row} {outcome}", flush=True)
            for kind in ((loop, env), (phase, ""), (storm, ""), (backend, "")):
                table[*kind, "bad" if found else "good"] += 1
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(temporary)
            temporary.mkdir()
    for (*kind, outcome), n in table.items():
        print(f"{' '.join(kind):30} {n:4} {outcome}")
    bad = sum(n for (loop, _, outcome), n in table.items() if loop in LOOPS and outcome == "bad")
    print(f"{rounds - bad} of {rounds} rounds good")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
