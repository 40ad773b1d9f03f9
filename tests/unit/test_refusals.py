"""What no command can mean is one line with what to do, exit 2, and nothing is written."""

import os
import subprocess
import sys

import pytest

from shoal.algorithms import PPO
from shoal.cli.main import main, parse
from shoal.envs import make
from shoal.errors import SettingError, ShoalError
from shoal.runs.inputs.making import check_actions, make_job

LOOP = """
from dataclasses import dataclass
import jax.numpy as jnp

@dataclass(frozen=True)
class Loop:
    sizes: tuple[int, ...] = (1, 2)
    rate: float = 0.1
    wide: bool = False

    def init(self, key, env, envs):
        return jnp.arange(envs)

    def tick(self, env, state):
        return state + 1, {"level": jnp.sum(state)}

class Needy:
    def __init__(self, size):
        self.size = size

def fails():
    raise RuntimeError("no world today")

def policy(replicas):
    return None
"""
FILES = {
    "loop.py": LOOP,
    "broken.py": "x = (\n",
    "lacking.py": "import nothing_of_that_name\n",
    "list.toml": 'algorithm = "loop.py:Loop"\nticks = 3\n[settings]\nsizes = [4, 5]\n',
    "port.toml": 'port = "x"\n',
}
OWN = ["loop.py:Loop", "none"]
CASES = [
    ("plan loop.py:Loop --save .", "can't write .: it is a folder"),
    ("plan loop.py:Loop --save no/p.shoal", "its folder isn't there"),
    ("plan loop.py:Loop --save p.shoal --out no/x.txt", "its folder isn't there"),
    ("plan loop.py:Loop --save p.shoal --out x.pdf", "End it in .txt, .json, .html"),
    ("plan loop.py:Loop --save loop.py/p.shoal", "its folder isn't there"),
    ("train loop.py:Loop --backend ''", "unknown backend ``"),
    ("verify loop.py:Loop --backend ''", "unknown backend ``"),
    (f"runs plot {'x' * 400}", "there is no run in xxx"),
    ("runs plot /*", "there is no run in /*"),
    ("runs rm '' --yes", "there is no run in "),
    ("runs plot list.toml --out no/x.svg", "its folder isn't there"),
    ("record loop.py:Loop --edge a>b --out .", "it is a folder"),
    ("graph loop.py:Loop --distribute impala", "unknown option --distribute"),
    ("graph loop.py:Loop --actors 2", "unknown option --actors"),
    ("run p.shoal --ticks 0", "ticks=0 is not 1 or more"),
    ("run p.shoal --ticks 1 --seed -1", "seed=-1 is not 0 or more"),
    ("watch --port 65536", "port=65536 is not at most 65,535"),
    ("watch --config port.toml", "port='x' is not a whole number"),
    ("scale run actor=2 actor=3", "a fragment is given two counts"),
    (f"scale run actor={'7' * 5000}", "is no count of a fragment"),
    ("algorithms ''", "unknown algorithm ``"),
    ("train --config= loop.py:Loop", "--config takes one TOML file"),
    ("train --config list.toml --config list.toml", "--config takes one TOML file"),
    ("train loop.py:Loop none --wide false", "Write --wide or --no-wide"),
    ("train loop.py:Loop --sizes 64", "Loop.sizes is a tuple such as 64,64 (of one: 64,), not 64"),
    ("train loop.py:Loop --rate 1 --set rate=2", "--rate and --set rate=2 differ"),
    ("train loop.py:Needy", "missing a required argument: 'size'. It takes: (size)"),
    ("train loop.py:Loop loop.py:Needy --env-set sise=3", "Needy can't be called with sise"),
    ("train loop.py:Loop loop.py:fails", "fails failed: RuntimeError: no world today ("),
    ("train loop.py:Loop --distribute loop.py:policy", "missing a required argument: 'replicas'"),
    ("train broken.py:Loop", "broken.py can't be imported: SyntaxError"),
    ("train lacking.py:Loop", "No module named 'nothing_of_that_name'"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a loop and files that are wrong."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[line[:50] for line, _ in CASES])
def test_a_command_that_cannot_be_meant_is_refused_and_nothing_is_written(
    here, capsys, line, expected
):
    words = ["" if word == "''" else word for word in line.split()]
    assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert expected in said
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == set(FILES)


def test_a_file_that_failed_is_read_again_once_it_is_right(here):
    assert main(["graph", "broken.py:Loop"]) == 2
    (here / "broken.py").write_text(LOOP)
    assert main(["graph", "broken.py:Loop", "--out", "it.txt"]) == 0


@pytest.mark.parametrize("command", ["plan", "graph", "verify", "record --edge a>b"])
def test_a_toml_file_for_train_says_the_loop_of_other_commands(here, command):
    (here / "train.toml").write_text(
        'algorithm = "loop.py:Loop"\nticks = 7\nseed = 3\nname = "x"\nkeep = 2\nenvs = 4\n'
        'distribute = "impala"\n[settings]\nwidth = 5\n[distribute_settings]\nactors = 3\n'
    )
    options = parse([*command.split(), "--config", "train.toml"]).options
    assert (options.algorithm, options.envs, options.settings) == ("loop.py:Loop", 4, {"width": 5})
    assert getattr(options, "ticks", 7) == 7
    assert options.distribute == (None if command == "graph" else "impala")
    (here / "train.toml").write_text('algorithm = "loop.py:Loop"\ntocks = 7\n')
    with pytest.raises(ShoalError, match="tocks"):
        parse([*command.split(), "--config", "train.toml"])


def test_a_list_of_a_toml_file_is_a_tuple_and_a_flag_says_how_long_instead_of_the_file(here):
    options = parse(["train", "--config", "list.toml", "--steps", "1e3"]).options
    assert (options.steps, options.ticks) == (1000.0, None)
    assert make_job(options).algorithm.sizes == (4, 5)
    with pytest.raises(SettingError, match="both say how long"):
        parse(["train", "--config", "list.toml", "--steps", "10", "--ticks", "3"])


def test_devices_are_made_before_an_environment_starts_jax(here):
    pytest.importorskip("gymnax")
    words = ["plan", "a2c", "CartPole-v1", "--distribute", "fused", "--devices", "2"]
    command = [sys.executable, "-m", "shoal", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "2 as one" in done.stdout or (os.cpu_count() == 1 and "has 1" in done.stderr), done


def test_words_after_two_dashes_are_no_flags(here):
    options = parse(["train", "--seed", "3", "--", *OWN]).options
    assert (options.algorithm, options.env, options.seed) == (*OWN, 3)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_steps_in_episode", 0, "not 1 or more"),
        ("max_steps_in_episode", 2.5, "not a whole number"),
        ("max_steps_in_episode", 10**14, "not at most"),
        ("gravity", "low", "not a number"),
        ("gravity", None, "not a number"),
        ("gravity", float("nan"), "not a finite number"),
    ],
)
def test_a_setting_that_gymnax_takes_without_looking_is_refused(name, value, expected):
    pytest.importorskip("gymnax")
    with pytest.raises(SettingError, match=expected) as refused:
        check_actions(PPO(), make("CartPole-v1", **{name: value}))
    assert name in refused.value.what
    check_actions(PPO(), make("CartPole-v1", gravity=9))
