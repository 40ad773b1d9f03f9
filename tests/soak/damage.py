"""Damages files of a run folder, a recording and a saved plan, and runs all commands on them.

    python tests/soak/damage.py CASES SEED

makes a run, and then CASES times: damages one file of a copy and runs a command. It prints what is
wrong: a raw error, more than one line of it, a good file that has changed, or a run that resumes to
other numbers than an undamaged one. It exits with 1 if there is anything.
"""

import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np

from shoal.cli.main import main

LOOP = ["ppo", "CartPole-v1", "--envs", "4", "--set", "num_steps=4", "--set", "num_minibatches=1"]
LOOP += [
    "--set",
    "hidden=(4,)",
    "--set",
    "anneal_lr=false",
    "--distribute",
    "single-learner-coarse",
    "--actors",
    "2",
]
HALF, END = 6, 9
PLAIN = (["status"], ["runs compare"], ["runs plot"], ["report"], ["profile"], ["scale"])
HEAVY = (["resume"], ["eval"], ["load"], ["video"])
WRONG = [
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    "x",
    "",
    "../x",
    [],
    {},
    [[[]]],
    {"a": 1},
    "\x1b[2J",
    "NaN",
]
ASYNCHRONOUS = ("occasions",)  # of an observer: how many evaluations were made depends on speed
RAW = re.compile(
    r"Traceback|\b(Key|Type|Value|Attribute|Index|Assertion|Recursion|Unicode\w*|OS|Permission|EOF|"
    r"JSONDecode|Overflow|ZeroDivision|Memory|BadZipFile|FileNotFound|IsADirectory)Error\b"
)


def call(words):
    """The exit code of a command, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def load(folder):
    """As a user would, from Python."""
    import shoal

    try:
        shoal.load(folder).act(np.zeros(4, np.float32))
    except shoal.ShoalError as error:
        return 2, "", f"{type(error).__name__}: {error.what}\n"
    return 0, "", ""


def run(command, folder, out):
    """Run a command on a folder or file."""
    more = {
        "resume": ["--ticks", END],
        "scale": ["actor=1"],
        "eval": ["--episodes", 1],
        "report": ["--out", out / "page.html"],
        "runs plot": ["--out", out / "page.svg"],
        "video": ["--out", out / "film.gif", "--steps", 3],
        "run": ["--ticks", 2],
    }
    words = [*command.split(), folder, *more.get(command, [])]
    return load(folder) if command == "load" else call(words)


def spoil_json(text, draw):
    """JSON with one value replaced or dropped, anywhere in it."""
    places = []

    def walk(data):
        for key in data if isinstance(data, dict) else range(len(data)):
            places.append((data, key))
            if isinstance(data[key], dict | list):
                walk(data[key])

    data = json.loads(text)
    walk(data)
    inside, key = draw.choice(places)
    if draw.random() < 0.2:
        del inside[key]
    else:
        inside[key] = draw.choice(WRONG)
    return json.dumps(data)


def spoilt(data, kind, draw):
    """Bytes damaged in a way."""
    match kind:
        case "cut":
            return data[: draw.randrange(len(data) + 1)]
        case "bit" | "bits":
            flipped = bytearray(data or b"-")
            for _ in range(1 if kind == "bit" else 30):
                flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            return bytes(flipped)
        case "bytes":
            return draw.randbytes(draw.randrange(400))
        case "constant":
            return draw.choice([b"null\n", b"[]", b"{}", b"1e999", b'"x"', b"\n\n"])
        case "deep":
            return draw.choice([b"[", b'{"a":']) * 100_000
    return b""


def spoil_lines(path, draw):
    """Put a wrong value into a file of JSON, or into one of its lines."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    if lines:
        at = draw.randrange(len(lines))
        lines[at] = spoil_json(lines[at], draw)
    path.write_text("\n".join(lines) + "\n")


def damage(path, draw):
    """Damage a file; what was done."""
    kinds = [
        "empty",
        "cut",
        "bit",
        "bits",
        "bytes",
        "constant",
        "deep",
        "missing",
        "folder",
        "link",
    ]
    kinds += ["json"] * 6 if path.suffix in (".json", ".jsonl") else []
    kind = draw.choice(kinds)
    if kind == "json":
        spoil_lines(path, draw)
    elif kind not in ("missing", "folder", "link"):
        path.write_bytes(spoilt(path.read_bytes(), kind, draw))
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(path.name)
    return kind


def contents(folder):
    """Every plain file with its bytes, without the lock."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def state_of(folder):
    from shoal.runs.files.checkpoints import read_newest

    return read_newest(folder / "checkpoints", lambda line: None)


def faults(command, folder, before, result, whole):
    """What is wrong with the result of a command on a damaged folder."""
    code, out, err = result
    found = [f"exit code {code}: {err[-300:]}"] if code not in (0, 2) else []
    if raw := RAW.search(out + err):
        found.append(f"raw: {(out + err)[max(0, raw.start() - 100) : raw.end() + 200]}")
    if code == 2 and len(err.splitlines()) != 1:
        found.append(f"{len(err.splitlines())} lines: {err[:300]}")
    if code == 2 or command not in ("resume", "eval"):
        after = contents(folder)
        found += [f"{name} has changed" for name in before if after.get(name) != before[name]]
    if command == "resume" and code == 0 and whole is not None:
        got = state_of(folder)
        if got is None or got.snapshot.tick != END:
            found.append(f"resumed to tick {got and got.snapshot.tick}")
        else:
            pairs = {n: (got.snapshot.values[n], x) for n, x in whole.snapshot.values.items()}
            differ = [n for n, pair in pairs.items() if not np.array_equal(*pair)]
            found += [f"`{n}` differs" for n in differ if n not in ASYNCHRONOUS][:3]
    return found


def prepared(root):
    """Make a good run, recording and saved plan; the final state of the run when it is resumed."""
    words = ["train", *LOOP, "--ticks", HALF, "--checkpoint-every", "2", "--evaluate", "3"]
    words += ["--folder", root, "--name", "good", "--log", "csv"]
    assert call(words)[0] == 0
    assert call(["record", *LOOP, "--edge", "actor>learner", "--out", root / "it.tape"])[0] == 0
    assert call(["plan", *LOOP, "--save", root / "it.shoal"])[0] == 0
    assert call(["eval", root / "good", "--episodes", 1])[0] == 0
    whole = Path(shutil.copytree(root / "good", root / "whole"))
    assert call(["resume", whole, "--ticks", END])[0] == 0
    return state_of(whole)


def cases(root, draw):
    """A damaged copy, a command for it, and what was done; without end."""
    good = root / "good"
    files = [p.relative_to(good) for p in sorted(good.rglob("*")) if p.is_file()]
    while True:
        copy = root / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        if draw.random() < 0.1:
            copy.mkdir()
            name, command = draw.choice([("it.tape", "replay"), ("it.shoal", "run")])
            file = Path(shutil.copy(root / name, copy / name))
            yield command, copy, file, f"{name}: {damage(file, draw)}"
            continue
        file = draw.choice(files)
        (command,) = draw.choice(PLAIN + HEAVY)
        shutil.copytree(good, copy)
        yield command, copy, copy, f"{file}: {damage(copy / file, draw)}"


def go(count, seed):
    """Run many cases; print the faults and a table."""
    draw, table = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        os.chdir(root)
        whole = prepared(root)
        for number, (command, folder, target, what) in enumerate(cases(root, draw)):
            if number == count:
                break
            before = contents(folder)
            is_other = what.startswith("run.json")  # other settings are no damage
            result = run(command, target, root)
            found = faults(command, folder, before, result, None if is_other else whole)
            table[command, "bad" if found else ("refused" if result[0] else "done")] += 1
            if found:
                print(f"{number:4} {command:12} {what:40} {'; '.join(found)}", flush=True)
    for (command, outcome), n in sorted(table.items()):
        print(f"{command:12} {outcome:8} {n:4}")
    bad = sum(n for (_, outcome), n in table.items() if outcome == "bad")
    print(f"{count - bad} of {count} cases good")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(go(*map(int, sys.argv[1:])))
