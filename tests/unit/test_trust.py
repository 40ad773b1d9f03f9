"""Run folders and recordings are data: no code of theirs runs unless the user trusts it."""

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.algorithms import PPO, PRESETS
from shoal.cli.main import main
from shoal.envs import registry
from shoal.errors import SettingError, TrustError
from shoal.planning.policies import POLICIES
from shoal.runs.files.folder import write_json
from shoal.runs.inputs import trust
from shoal.runs.inputs.recipes import recipe_of
from shoal.runs.inputs.trust import REGISTERED, SIMULATORS, code_in, make
from unit.toy_loop import TWO_CPUS, Toy, plain

RAN = []  # calls made by hostile recipes


def ran(*args, **kwargs):
    RAN.append((args, kwargs))


@dataclass(frozen=True)
class Hostile:
    """A third-party dataclass that records when it is constructed."""

    text: str = ""

    def __post_init__(self):
        ran(self.text)


HERE = {"module": __name__, "file": __file__}
CALL = {"name": "ran", **HERE}
# Each would run code if it was loaded: a function, a class, a file or a module, known to
# this process or importable.
HOSTILE = {
    "a function of the standard library": {
        "name": "system", "module": "os", "settings": {"command": "touch ran"}
    },
    "a class of the standard library": {
        "name": "Popen", "module": "subprocess", "settings": {"args": {"tuple": ["touch", "ran"]}}
    },
    "a bare name": CALL,
    "a name with settings": {**CALL, "settings": {}},
    "a third-party dataclass": {"name": "Hostile", **HERE, "settings": {"text": "x"}},
    "a file": {"from": "hostile.py", "name": "thing"},
    "a file behind a registered name": {
        "name": "PPO", "module": "shoal.algorithms.ppo", "from": "hostile.py", "settings": {}
    },
    "a module of a file": {"name": "thing", "module": "hostile", "file": "hostile.py"},
    "a module beside the command": {"name": "thing", "module": "hostile"},
    "a function of Shoal's own": {
        "name": "load_file", "module": "shoal.runs.inputs.recipes",
        "settings": {"path": "hostile.py"},
    },
    "a part of a registered type": {
        "name": "PPO.init", "module": "shoal.algorithms.ppo", "settings": {}
    },
    "a type that is no text": {"name": ["PPO"], "module": "shoal.algorithms.ppo", "settings": {}},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of Shoal's own types whose folder tests modify."""
    folder = tmp_path_factory.mktemp("run")
    pytest.importorskip("gymnax")
    algorithm = PPO(hidden=(4,), num_steps=4, num_minibatches=1, update_epochs=1)
    record = {
        "form": 1, "algorithm": recipe_of(algorithm),
        "env": recipe_of(shoal.envs.make("CartPole-v1")),
        "distribution": recipe_of(shoal.single_learner_coarse(2)), "backend": "threads", "envs": 4,
        "ticks": 3, "seed": 0, "checkpoint_every": "end", "keep": 3, "restarts": 0,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    write_json(folder / "summary.json", {"status": "done", "ticks": 3})
    return folder


def places(data, path=()):
    """Every place in JSON data, from the outermost in."""
    if isinstance(data, dict | list):
        for key, inner in data.items() if isinstance(data, dict) else enumerate(data):
            yield (*path, key)
            yield from places(inner, (*path, key))


def spoilt(data, path, hostile):
    """`data` with `hostile` at a place."""
    copy = json.loads(json.dumps(data))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = hostile
    return copy


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A working folder with a file that leaves a trace when it is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hostile.py").write_text("from pathlib import Path\nPath('ran').touch()\nthing=int")
    RAN.clear()
    yield tmp_path
    assert RAN == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", HOSTILE)
def test_code_in_no_field_of_a_run_folder_runs(run, watched, what, capsys):
    record = json.loads((run / "run.json").read_text())
    fields = [path for path in places(record) if path[0] in ("algorithm", "env", "distribution")]
    assert len(fields) > 60
    folder = watched / "somebodys"
    folder.mkdir()
    write_json(folder / "summary.json", {"status": "done", "ticks": 3})
    for path in fields:
        (folder / "run.json").write_text(json.dumps(spoilt(record, path, HOSTILE[what])))
        for do in (shoal.load, shoal.resume):
            with pytest.raises(shoal.ShoalError):
                do(folder)
    assert main(["resume", str(folder)]) == 2
    assert main(["status", str(folder)]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert {path.name for path in folder.iterdir()} <= {"run.json", "summary.json", "lock"}


COMMANDS = ("eval", "video", "export", "report", "profile", "runs compare", "runs plot", "runs")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_that_a_run_folder_names(run, watched, command, capsys):
    record = json.loads((run / "run.json").read_text())
    folder = watched / "somebodys"
    folder.mkdir()
    write_json(folder / "summary.json", {"status": "done", "ticks": 3})
    for hostile, field in itertools.product(HOSTILE.values(), ("algorithm", "env", "distribution")):
        (folder / "run.json").write_text(json.dumps(spoilt(record, (field,), hostile)))
        code = main([*command.split(), str(folder)])
        text = capsys.readouterr()
        assert code in (0, 2), text.err
        assert len(text.err.splitlines()) <= 1 + (code == 0), text.err


def test_the_error_names_the_code_and_how_to_trust_it(run, watched, capsys):
    record = json.loads((run / "run.json").read_text())
    evil = HOSTILE["a class of the standard library"]
    (watched / "run.json").write_text(json.dumps(spoilt(record, ("algorithm", "settings"), evil)))
    assert main(["resume", str(watched)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`Popen` of `subprocess`" in line
    assert "--trust" in line
    assert "trust=True" in line


@pytest.mark.parametrize(
    "env",
    ["hostile:World-v0", "GymV26Environment-v0", "no-such-world-v0"],
)
def test_a_third_party_environment_needs_trust(run, watched, env):
    pytest.importorskip("gymnasium")
    record = json.loads((run / "run.json").read_text())
    simulator = {"name": "GymnasiumSimulator", "module": "shoal.envs.gymnasium"}
    simulator["settings"] = {"id": env, "settings": {"tuple": []}}
    record["env"] = {"name": "HostEnvironment", "module": "shoal.envs.hosted"}
    record["env"]["settings"] = {"name": "gymnasium:CartPole-v1", "simulator": simulator}
    (watched / "run.json").write_text(json.dumps(record))
    for do in (shoal.load, shoal.resume):
        with pytest.raises(TrustError, match="whatever registers"):
            do(watched)


def test_wrappers_of_an_environment_need_trust(run, watched):
    pytest.importorskip("gymnasium")
    recipe = recipe_of(shoal.envs.make("gymnasium:CartPole-v1", wrappers=("hostile:thing",)))
    with pytest.raises(TrustError, match="wrappers"):
        make(recipe, "here", trusted=False)


def write_tape(**loop):
    """A recording that names this loop, as another author may have written it."""
    known = {"algorithm": "ppo", "env": "none", "distribute": None, "envs": 4}
    known |= {key: {"dict": {}} for key in ("settings", "env_settings", "distribute_settings")}
    about = {"form": 2, "edge": "a>b", "ticks": 1, "loop": known | loop, "reader": "b", "plan": ""}
    with zipfile.ZipFile("it.tape", "w") as file:
        file.writestr("tape.json", json.dumps({**about, "rows": []}))


@pytest.mark.parametrize(
    "loop",
    [
        {"algorithm": "hostile.py:thing"},
        {"algorithm": "hostile.py:thing", "settings": {"dict": {"learning_rate": 1}}},
        {"env": "hostile.py:thing"},
        {"distribute": "hostile.py:thing"},
        {"env": "gymnasium:hostile:World-v0"},
        {"env": "hostile:World-v0"},
        {"env": "gymnasium:CartPole-v1",
         "env_settings": {"dict": {"wrappers": {"tuple": ["hostile:thing"]}}}},
        *({"settings": {"dict": {"hidden": evil}}} for evil in HOSTILE.values()),
        *({"settings": evil} for evil in HOSTILE.values()),
        {"envs": HOSTILE["a bare name"]},
        {"words": ["record", "hostile.py:thing"]},
    ],
)  # fmt: skip
def test_a_recording_runs_no_code(watched, capsys, loop):
    write_tape(**loop)
    assert main(["replay", "it.tape"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_users_own_recording_needs_no_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from unit.toy_loop import *\ndef toy(): return Toy(plain)\n")
    words = ["--distribute", "single-learner-coarse", "--edge", "actor>learner", "--envs", "8"]
    assert main(["record", "mine.py:toy", "none", *words]) == 0, capsys.readouterr().err
    assert main(["replay", "edge.tape"]) == 0
    (tmp_path / "edge.tape").rename("moved.tape")
    assert main(["replay", "moved.tape"]) == 2
    assert str(tmp_path / "mine.py") in capsys.readouterr().err
    assert main(["replay", "moved.tape", "--trust"]) == 0


def test_arrays_of_a_recording_are_not_unpickled(watched, capsys):
    class Evil:
        def __reduce__(self):
            return ran, ("unpickled",)

    out = io.BytesIO()
    np.save(out, np.array([Evil()], dtype=object), allow_pickle=True)
    said = "record ppo CartPole-v1 --envs 4 --ticks 1 --set num_steps=4 --set num_minibatches=1"
    words = said.split()
    words += ["--distribute", "single-learner-coarse", "--edge", "actor>learner"]
    pytest.importorskip("gymnax")
    assert main([*words, "--out", "good.tape"]) == 0
    with zipfile.ZipFile("good.tape") as good, zipfile.ZipFile("bad.tape", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, out.getvalue() if name.endswith(".npy") else good.read(name))
    capsys.readouterr()
    assert main(["replay", "bad.tape"]) == 2
    assert "can't be read as a recording" in capsys.readouterr().err


def test_a_users_own_run_resumes_without_a_flag_until_its_recipe_changes(tmp_path):
    how = {"envs": 8, "cluster": TWO_CPUS}
    folder = shoal.train(Toy(plain), None, ticks=2, folder=tmp_path, name="mine", **how).folder
    assert shoal.resume(folder, ticks=3, cluster=TWO_CPUS).summary["ticks"] == 3
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(TrustError, match="`Toy` of "):
        shoal.resume(moved, ticks=4)
    assert shoal.resume(moved, ticks=4, trust=True, cluster=TWO_CPUS).summary["ticks"] == 4
    assert shoal.resume(moved, ticks=5, cluster=TWO_CPUS).summary["ticks"] == 5
    record = json.loads((moved / "run.json").read_text())
    record["algorithm"]["settings"]["turn"] = CALL
    (moved / "run.json").write_text(json.dumps(record))
    with pytest.raises(TrustError, match="`ran` of "):
        shoal.resume(moved, ticks=6)
    assert shoal.resume(moved, ticks=6, algorithm=Toy(plain), cluster=TWO_CPUS)


def test_only_runs_with_code_of_their_own_are_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    how = {"ticks": 1, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path}
    shoal.train(Toy(plain), None, **how)
    (note,) = (tmp_path / "state").rglob("*/trusted/*")
    assert note.parent.stat().st_mode & 0o077 == 0
    assert not list(code_in(recipe_of(PPO())))


def test_a_read_only_home_directory_only_requires_the_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    how = {"envs": 8, "cluster": TWO_CPUS}
    folder = shoal.train(Toy(plain), None, ticks=1, folder=tmp_path, **how).folder
    with pytest.raises(TrustError):
        shoal.resume(folder, ticks=2)
    assert shoal.resume(folder, ticks=2, trust=True, cluster=TWO_CPUS)


def test_workers_import_nothing_of_the_current_folder_that_the_driver_would_not(tmp_path):
    (tmp_path / "socket.py").write_text("open('ran', 'w').close()\n")
    code = """if 1:
        from conformance.test_env_faults import run
        run("none", ticks=2)
    """
    path = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(shoal.__file__).parents[1])))
    words = [sys.executable, "-P", "-c", code]
    subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)
    assert not (tmp_path / "ran").exists()


def test_commands_look_for_modules_in_the_current_folder_only_where_the_user_names_one(tmp_path):
    (tmp_path / "worlds.py").write_text("open('ran', 'w').close()\n")
    code = """if 1:
        import os, sys
        from shoal.cli.entry import entry
        def run(*words):
            sys.argv = ["shoal", *words]
            try:
                entry()
            except SystemExit as end:
                return end.code
        assert run("status", ".") == run("resume", ".") == 2
        assert os.getcwd() not in sys.path
        assert run("plan", "ppo", "gymnasium:worlds:World-v0") == 2
        print("as expected")
    """
    env = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "as expected" in done.stdout, done.stderr
    assert (tmp_path / "ran").exists()


def test_a_report_or_a_request_is_not_written_through_a_link(run, tmp_path, capsys):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    target = tmp_path / "precious"
    target.write_text("keep me\n")
    for name in ("report.html", "scale.tmp"):
        (folder / name).symlink_to(target)
    record = json.loads((folder / "run.json").read_text())
    record |= {"backend": "processes", "elastic": {"actor": [1, 4]}}
    (folder / "run.json").write_text(json.dumps(record))
    write_json(folder / "summary.json", {"status": "running", "ticks": 3})
    write_json(folder / "status.json", {"at": time.time(), "workers": {}})
    assert main(["report", str(folder)]) == 2
    assert main(["scale", str(folder), "actor=2"]) == 2
    for line, why in zip(
        capsys.readouterr().err.splitlines(), ("is a link", "can't write in"), strict=True
    ):
        assert why in line
    assert target.read_text() == "keep me\n"


def test_a_pipe_for_a_lock_does_not_block_a_status(run, tmp_path, capsys):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    os.mkfifo(folder / "lock")
    write_json(folder / "summary.json", {"status": "running", "ticks": 3})
    assert main(["status", str(folder)]) == 0
    assert "killed" in capsys.readouterr().out


def test_links_out_of_a_run_folder_are_not_followed(run, tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep me\n")
    for name in ("workers.log", "metrics.jsonl", "plan.txt", "lock"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / "run.json").write_text((run / "run.json").read_text())
        (folder / name).symlink_to(target)
        with pytest.raises(SettingError, match="is a link"):
            shoal.resume(folder)
    os.mkfifo(run / "metrics.jsonl")
    try:
        with pytest.raises(SettingError, match="no plain file"):
            shoal.resume(run)
    finally:
        (run / "metrics.jsonl").unlink()
    assert target.read_text() == "keep me\n"


def test_all_that_is_registered_is_plain_and_shoals_own():
    for (module, name), kind in REGISTERED.items():
        assert module.startswith(("shoal.algorithms.", "shoal.envs.", "shoal.planning."))
        if kind is not None:
            assert is_dataclass(kind)
            assert kind.__dataclass_params__.frozen
            assert (kind.__module__, kind.__qualname__) == (module, name)


def test_presets_and_policies_need_no_trust():
    presets = [preset.algorithm for named in PRESETS.values() for preset in named.values()]
    for thing in [*presets, *(make_policy() for make_policy in POLICIES.values())]:
        recipe = json.loads(json.dumps(recipe_of(thing)))
        assert make(recipe, "here", trusted=False) == thing


@pytest.mark.parametrize("family", sorted(set(SIMULATORS.values())))
def test_environments_of_every_family_need_no_trust(family):
    try:
        known = registry.load_family(family).names()
    except shoal.ShoalError:
        pytest.skip(f"{family} is not installed")
    name = next(name for name in known if not name.startswith(trust.IMPORTING))
    simulator = getattr(registry.load_family(family), registry.FAMILIES[family][1])
    env = registry.FAMILIES[family][2](f"{family}:{name}", simulator(name, (("size", (1, 2)),)))
    recipe = json.loads(json.dumps(recipe_of(env)))
    assert not list(code_in(recipe))
    assert make(recipe, "here", trusted=False) == env


def test_arguments_that_are_not_overridden_come_from_the_folder(run, watched):
    record = json.loads((run / "run.json").read_text())
    (watched / "run.json").write_text(json.dumps(spoilt(record, ("env",), CALL)))
    with pytest.raises(TrustError):
        shoal.resume(watched, shoal.fused(), algorithm=Toy(plain), cluster=TWO_CPUS, ticks=1)
