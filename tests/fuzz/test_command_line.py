"""Very many command lines: each is refused in one line with nothing written, or does what it says.

COMMANDS=1000 says how many, COMMANDS_SEED=0 where to begin; a failure prints the words.
"""

import json
import os
import random
import shutil
from collections import Counter
from inspect import signature
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.cli.flags import literal, policy_parameters, whole
from shoal.cli.main import main
from shoal.planning.policies import POLICIES
from shoal.runs.inputs.options import option_of

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]
COUNT, SEED = int(os.environ.get("COMMANDS", "1000")), int(os.environ.get("COMMANDS_SEED", "0"))
LOOP = '''
from dataclasses import dataclass
import jax, jax.numpy as jnp, shoal

@shoal.stage(per="env")
def move(x, *, w):
    return x + 0.1 * w

@shoal.stage
def learn(w, xs):
    return w - 0.1 * shoal.mean(jnp.mean(xs))

@dataclass(frozen=True)
class Loop:
    """A loop that compiles at once."""

    rate: float = 0.1
    width: int = 2
    title: str = "x"
    wide: bool = False
    sizes: tuple[int, ...] = (1, 2)

    def init(self, key, env, envs):
        return jnp.float32(1), jnp.arange(envs, dtype=jnp.float32)

    def tick(self, env, state):
        w, x = state
        x = move(x, w=w)
        return (learn(w, x), x), {"loss": w * self.rate}

class World:
    name = "world"
    def __init__(self, size=1):
        self.size = size

def policy(replicas=1):
    return shoal.single_learner_coarse(replicas)
'''
HUGE, LONG = "9" * 20, "7" * 5000
WHOLE = ["1", "2", "4", "3"]
WRONG = ["0", "-1", "2.5", "abc", "", "1e3", "nan", HUGE, LONG, "inf", "0x10", "a\nb", "None"]
SETS = ["rate=0.5", "width=4", "title=abc", "wide=true", "wide=False", "sizes=(3,)"]
BAD_SETS = ["rate=x", "width=2.5", "wide=1", "sizes=3", "sizes=('a',)", "lr=1e-3", "rate", "="]
BAD_SETS += ["rate=", "title=3", "width=None", "rate==1", "no=1", "rate=[[[", "__class__=1"]
BAD_SETS += ["tick=3", f"width={LONG}", "width=True"]
BAD_NAMES = ["", " ", "..", ".", "/abs", "a/b", "../out", "a\nb", "\x1b[2J", "x" * 300, "-x"]
BAD_NAMES += [" a", "a\\b", "a\0b"]
BAD_PLACES = ["file.txt", "file.txt/x", "/dev/null/x", "a\0b"]
BAD_OUTS = ["out", ".", "runs", "no/out.txt", "file.txt/x.txt", "o.pdf", "a\0.txt"]
BAD_PACES = ["0", "infs", "nans", "-1", "s", "1e999", "", "never", "9" * 400 + "s", "9" * 400]
POLICY_NAMES = [*(name.replace("_", "-") for name in POLICIES), "loop.py:policy"]
# What may follow an option: what is right, what is not, and how often that comes.
VALUES = {
    "--backend": (["threads", "inline"], ["thread", "", "PROCESSES", "a\nb"], 0.12),
    "--seed": (["0", "7", "4294967295"], ["-1", "4294967296", HUGE, "x", "1.0"], 0.2),
    "--set": (SETS, BAD_SETS, 0.3),
    "--env-set": (["size=2"], ["size", "no=1", "=", "size=a\nb"], 0.4),
    "--name": (["a", "b.c", "run 1", "ü", "x" * 200], BAD_NAMES, 0.4),
    "--folder": (["runs", "new/deep", ""], BAD_PLACES, 0.2),
    "--out": (["out.txt", "out.json", "out.html"], BAD_OUTS, 0.4),
    "--checkpoint-every": (["1", "2", "5s", "end", "100"], BAD_PACES, 0.3),
    "--distribute": (POLICY_NAMES, ["", "fusd", "loop.py:no", "no.py:x", "loop.py:Loop"], 0.12),
    "--step-timeout": (["5", "1.5"], ["0", "-1", "nan", "inf", "x"], 0.3),
    "--address": (["localhost:1"], [""], 0.5),
    "--edge": (["actor>learner"], ["", "a"], 0.5),
    "--save": (["a.shoal"], ["", "no/a.shoal", ".", "runs"], 0.5),
    "--config": (["right.toml"], ["", "no.toml", "wrong.toml", "file.txt", "runs"], 0.4),
    "--port": (["1"], ["-1", "65536", "x", ""], 0.5),
    "--which": (["newest", "best"], ["", "x"], 0.3),
    "--over": (["tick", "seconds", "env_steps"], ["", "x"], 0.3),
    "--metric": (["loss"], ["", "no"], 0.5),
    "--rate": (["0.5", "1e-3", "2"], ["x", "nan", "-inf", "", "None", "1,2"], 0.2),
    "--width": (["4", "1"], ["2.5", "1e2", "", "True", LONG], 0.2),
    "--title": (["abc", "a b"], ["3", "None", "(1,)"], 0.2),
    "--sizes": (["3,", "(1,2)", "()"], ["3", "a,b", "", "(1"], 0.2),
    "--wide": ([None], ["false", "1"], 0.1),
    "--no-wide": ([None], ["false"], 0.1),
    **dict.fromkeys(["--restarts", "--lag", "--max-lag"], (["0", "1", "2"], WRONG[1:], 0.12)),
}
FOR_TRAIN = ["--ticks", "--envs", "--seed", "--backend", "--set", "--name", "--folder", "--keep"]
FOR_TRAIN += ["--restarts", "--checkpoint-every", "--env-set", "--evaluate", "--step-timeout"]
SETTINGS = ["--rate", "--width", "--title", "--sizes", "--wide", "--no-wide"]
FOR_LOOP = ["--envs", "--set", "--env-set", "--config", *SETTINGS]
OPTIONS = {
    "train": [*FOR_TRAIN, "--address", "--config", *SETTINGS],
    "resume": ["--ticks", "--backend", "--keep", "--restarts", "--checkpoint-every", "--trust"],
    "plan": [*FOR_LOOP, "--out", "--save"],
    "graph": [*FOR_LOOP, "--out"],
    "verify": [*FOR_LOOP, "--seed", "--ticks"],
    "record": [*FOR_LOOP, "--seed", "--ticks", "--out"],
    "replay": ["--trust"],
    "run": ["--ticks", "--seed", "--backend"],
    "eval": ["--episodes", "--seed", "--steps", "--which"],
    "report": ["--out"],
    "watch": ["--port"],
    "runs plot": ["--out", "--metric", "--over"],
    "runs rm": ["--yes"],
}
ODD = [
    "--steps",
    "--nonsense",
    "--debugg",
    "--tick",
    "--edge",
    "--save",
    "--out",
    "--lag",
    "--trust",
]
COMMANDS = [*["train"] * 6, *["plan"] * 5, *["resume"] * 4, "graph", "status", "scale", "verify"]
COMMANDS += ["record", "run", "run", "eval", "report", "watch", "algorithms", "replay"]
COMMANDS += ["runs", "runs compare", "runs plot", "runs rm"]
OF_LOOPS = ("train", "plan", "graph", "verify", "record")
OF_RUNS = ("resume", "status", "report", "eval", "runs compare", "runs plot", "runs rm")
RUNS = ["", "none", "file.txt", "..", "a\0b", "x" * 400]
LOOPS = ["loop.py:Lop", "no.py:Loop", "ppo", "", "loop.py:", "x"]


POLICY = {"--distribute", *map(option_of, policy_parameters())}


class Words:
    """Command lines drawn from a seed: mostly right, with a mistake here and there."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def one(self, right, wrong, chance=0.12):
        return self.draw.choice(wrong if self.draw.random() < chance else right)

    def value(self, option):
        return self.one(*VALUES.get(option, (WHOLE, WRONG, 0.12)))

    def line(self):
        """The words of one command."""
        command = self.one(COMMANDS, ["trian", "", "plan ", "runs compar"], 0.06)
        words = command.split(" ") if command in COMMANDS else [command]
        words += self.about(command)
        if command in ("train", "plan", "verify", "record") and self.draw.random() < 0.4:
            words += self.policy()
        if command == "record":
            cut = ["--distribute", "single-learner-coarse", "--actors", "2"]
            words += [*cut, "--edge", self.one(["actor>learner"], ["", "a", "learner>learner"])]
        for option in self.chosen(command):
            words += self.option(option)
        return words

    def about(self, command):
        """What a command is about: a loop, a run, a file."""
        if command in OF_LOOPS:
            env = self.one(["none"], ["Cart", ""])
            envs = self.draw.choice([[], ["none"], ["loop.py:World"], [env]])
            return [self.one(["loop.py:Loop"], LOOPS), *envs]
        if command == "scale":
            counts = ["actor=2", "actor", "actor=x", "=1", "actor=-1", f"actor={LONG}"]
            return [self.one(["good"], RUNS), *self.draw.choices(counts, k=2)]
        if command in ("algorithms", "runs"):
            return self.one([[], ["ppo"], ["runs"]], [[""], ["x", "y"], ["a\0b"]], 0.4)
        wrong = ["file.txt", "runs", "none", "a\0b", ""]
        named = {
            **dict.fromkeys(OF_RUNS, (["good", "runs/good"], RUNS, 0.12)),
            "watch": (["none"], RUNS[1:]),  # any other would be served for ever
            "replay": (["edge.tape"], wrong, 0.5),
            "run": (["plan.shoal"], wrong, 0.3),
        }
        return [self.one(*named[command])] if command in named else []

    def option(self, option):
        """An option with its value, if it takes one."""
        is_plain = option in ("--trust", "--nonsense", "--yes")
        value = None if is_plain else self.value(option)
        return [option] if value is None else [option, value]

    def policy(self):
        """A distribution policy, mostly with parameters of its own."""
        name = self.value("--distribute")
        make = POLICIES.get(name.replace("-", "_"))
        known = [option_of(p) for p in signature(make).parameters] if make else sorted(POLICY)
        chosen = self.draw.sample(known, min(self.draw.choice([0, 0, 1, 2]), len(known)))
        more = [word for option in chosen for word in (option, self.value(option))]
        return ["--distribute", name, *more]

    def chosen(self, command):
        known = OPTIONS.get(command, [])
        count = self.draw.choice([0, 1, 1, 2, 2, 3])
        right = self.draw.sample(known, min(count, len(known)))
        extra = [self.draw.choice(ODD)] if self.draw.random() < 0.05 else []
        if command == "resume" and "--ticks" not in right and self.draw.random() < 0.8:
            right.append("--ticks")
        if command in ("train", "run") and "--ticks" not in right:
            right.append("--ticks")
        return right + extra


def contents(folder):
    """Every file with its size and time of change, but for locks and compiled Python."""
    kept = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in (*files, *folders):
            path = Path(place) / name
            if name != "lock":
                kept[str(path)] = (
                    (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else ()
                )
    return kept


def said(words, option):
    """The last value of an option, if it is among the words."""
    values = [value for name, value in pairwise(words) if name == option]
    return values[-1] if values else None


def check_meant(words, folder):
    """What a run says of itself is what the words said."""
    summary = json.loads((folder / "summary.json").read_text())
    record = json.loads((folder / "run.json").read_text())
    assert summary["status"] == "done"
    counts = {
        "--ticks": "ticks",
        "--envs": "envs",
        "--seed": "seed",
        "--keep": "keep",
        "--restarts": "restarts",
    }
    for option, name in counts.items():
        if (value := said(words, option)) is not None:
            assert record[name] == whole(value), option
    for option, name in {"--backend": "backend", "--checkpoint-every": "checkpoint_every"}.items():
        if (value := said(words, option)) is not None:
            assert str(record[name]) == value, option
    assert summary["ticks"] == record["ticks"]
    algorithm = record["algorithm"]
    if algorithm["name"] == "Evaluated":
        algorithm = algorithm["settings"]["algorithm"]
    settings = {"title": "abc"} if said(words, "--config") else {}
    settings |= dict(text.split("=", 1) for word, text in pairwise(words) if word == "--set")
    flags = (option.removeprefix("--") for option in SETTINGS[:4])
    settings |= {name: value for name in flags if (value := said(words, f"--{name}")) is not None}
    switches = [word for word in words if word in SETTINGS[4:]]
    settings |= {"wide": str(switches[-1] == "--wide")} if switches else {}
    for name, value in settings.items():
        kept = algorithm["settings"][name]
        kept = tuple(kept["tuple"]) if isinstance(kept, dict) else kept
        assert kept == literal(value), name
    if (name := said(words, "--distribute")) and ".py" not in name:
        assert summary["distribution_policy"] == name.replace("-", "_")
    if words[0] == "train" and (name := said(words, "--name")):
        assert folder.name == name


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """A folder with a loop, a run that was stopped, and a file that is no folder."""
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "file.txt").write_text("text\n")
    (tmp_path / "right.toml").write_text('ticks = 3\n[settings]\ntitle = "abc"\n')
    (tmp_path / "wrong.toml").write_text("keep = 0\n[settings]\nwidth = [1, 2]\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "loop.py:Loop", "--ticks", "2", "--envs", "8", "--name", "good"]) == 0
    cut = ["loop.py:Loop", "--envs", "8", "--distribute", "single-learner-coarse"]
    assert main(["record", *cut, "--edge", "actor>learner"]) == 0
    assert main(["plan", *cut, "--save", "plan.shoal", "--out", "x.txt"]) == 0
    shutil.copytree("runs", "kept")
    capsys.readouterr()
    return tmp_path


def test_command_lines_are_refused_in_one_line_or_do_what_they_say(here, capsys):
    found, wrong = Counter(), []
    for number in range(SEED, SEED + COUNT):
        words = Words(number).line()
        for made in ("runs", "new"):
            shutil.rmtree(made, ignore_errors=True)
        shutil.copytree("kept/good", "runs/good")
        before = contents(here)
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code
        except BaseException as error:
            code = repr(error)
        _, err = capsys.readouterr()
        found[words[0] if words[0] in OPTIONS else "other", code] += 1
        try:
            assert code in (0, 2), "neither done nor refused"
            if code == 2:
                assert len(err.splitlines()) == 1, "not one line"
                assert err.isascii() or err.strip().isprintable()
                assert contents(here) == before, "something was written"
            elif words[0] in ("train", "resume"):
                newer = [p for p in here.rglob("summary.json") if str(p) not in before
                         or before[str(p)] != contents(here)[str(p)]]  # fmt: skip
                (summary,) = [p for p in newer if "kept" not in p.parts]
                check_meant(words, summary.parent)
            for made in (said(words, "--out"), said(words, "--save")) if code == 0 else ():
                if made:
                    assert Path(made).is_file()
                    Path(made).unlink()
        except Exception as error:
            wrong.append(f"{number}: {words} -> {code}: {error}\n    {err[:500]}")
    print(
        "\n".join(
            f"{command:12} exit {code}: {n}"
            for (command, code), n in sorted(found.items(), key=str)
        )
    )
    assert not wrong, f"{len(wrong)} of {COUNT}:\n" + "\n".join(wrong[:40])
    assert sum(n for (_, code), n in found.items() if code == 0) > COUNT / 6
