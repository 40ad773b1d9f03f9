"""A damaged file in a run folder: the run resumes from an intact one, or fails with one line."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.cli.main import main
from shoal.pages import RunView
from shoal.pages.updates import Cursor, updates
from shoal.runs.files.checkpoints import read_newest, ticks_in
from shoal.runs.files.folder import as_json, cut_rows, locked
from unit.toy_loop import TWO_CPUS, Toy, plain

HALF, END = 4, 6
JSON = ["run.json", "summary.json", "checkpoints/4/metadata.json"]
FILES = [*JSON, "metrics.jsonl", "workers.log", "plan.txt", "lock", "checkpoints/4/state"]
COMMANDS = {
    "status": ["status"],
    "resume": ["resume", "--trust", "--ticks", str(END)],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A run that was stopped half-way, with checkpoints at ticks 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    how = {"envs": 8, "cluster": TWO_CPUS, "folder": folder, "seed": 3, "checkpoint_every": "end"}
    shoal.train(Toy(plain), None, ticks=2, name="good", **how)
    return shoal.resume(folder / "good", ticks=HALF, cluster=TWO_CPUS).folder


@pytest.fixture(scope="module")
def whole(good, tmp_path_factory):
    """The state and rows of the run if nothing is damaged."""
    folder = Path(shutil.copytree(good, tmp_path_factory.mktemp("whole") / "run"))
    assert main(["resume", str(folder), "--trust", "--ticks", str(END)]) == 0
    return state_of(folder), rows_of(folder)


def state_of(folder):
    return read_newest(folder / "checkpoints", print).snapshot.values


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if name != "seconds"} for row in rows]


def contents(folder):
    """Every file with its bytes, without the lock file."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def biggest(path):
    """The file itself, or the largest in a folder, which has the arrays."""
    inside = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return max(inside, key=lambda p: p.stat().st_size)


def flip(path, at):
    data = bytearray(path.read_bytes() or b"-")
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def replaced_by_folder(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.mkdir()
    (path / "inside").touch()


def removed(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def written(text):
    return lambda path: biggest(path).write_text(text)


DAMAGES = {
    "empty": written(""),
    "cut off": lambda path: os.truncate(biggest(path), biggest(path).stat().st_size // 2),
    "a bit at the start": lambda path: flip(biggest(path), 0),
    "a bit in the middle": lambda path: flip(biggest(path), 0.5),
    "a bit at the end": lambda path: flip(biggest(path), 0.9),
    "null": written("null\n"),
    "a list": written("[1]\n"),
    "an object": written("{}\n"),
    "a number": written("1e999\n"),
    "no text": lambda path: biggest(path).write_bytes(b"\xff\xfe\x00" * 50),
    "deep": written("[" * 100_000),
    "deep object": written('{"a":' * 100_000 + "1" + "}" * 100_000),
    "missing": removed,
    "a folder": replaced_by_folder,
    "a loop of links": lambda path: (removed(path), path.symlink_to(path.name)),
}


def check(folder, command, file, whole, capsys):
    """Check that a command on a damaged folder reports an error or gives the right result."""
    before = contents(folder)
    capsys.readouterr()
    words = COMMANDS[command]
    code = main([words[0], str(folder), *words[1:]])
    out, err = capsys.readouterr()
    assert code in (0, 2), err
    if code == 2:
        assert len(err.splitlines()) == 1, err
        assert "Error: " in err
        assert contents(folder) == before
    elif command == "resume" and file != "run.json":
        state, rows = whole
        for name, x in state_of(folder).items():
            np.testing.assert_array_equal(x, state[name], err_msg=name)
        if file != "metrics.jsonl":
            assert rows_of(folder) == rows
        is_aside = (folder / "checkpoints/4.damaged").exists()  # and not deleted
        assert is_aside == ("using the one before" in out)
        assert is_aside or file != "checkpoints/4/metadata.json"
    return code


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_reported_or_not_needed(good, whole, tmp_path, capsys, file, damage):
    for command in COMMANDS:
        folder = Path(shutil.copytree(good, tmp_path / command))
        DAMAGES[damage](folder / file)
        code = check(folder, command, file, whole, capsys)
        is_needed = (command, file) in (("resume", "run.json"), ("status", "summary.json"))
        if not is_needed and damage not in ("a folder", "a loop of links"):
            assert code == 0, (command, capsys.readouterr().err)
    if file.startswith("checkpoints"):
        folder = Path(shutil.copytree(good, tmp_path / "load"))
        DAMAGES[damage](folder / file)
        assert shoal.load(folder, trust=True).tick in (
            2,
            *(() if file.endswith("json") else (HALF,)),
        )


WRONG = (None, [], {}, "x", "\ud800", -1, 1e999, 10**400, 2.5, True, [[]], {"name": 1, "module": 2})


def wrong_values(data, path=()):
    """JSON data with one key dropped, or one value of a wrong kind, everywhere it could be."""
    for key in data if isinstance(data, dict) else range(min(len(data), 2)):
        inner = data[key]
        copy = json.loads(json.dumps(data))
        del copy[key]
        yield copy
        for wrong in WRONG:
            copy = json.loads(json.dumps(data))
            copy[key] = wrong
            yield copy
        if isinstance(inner, dict | list) and inner:
            for again in wrong_values(inner):
                copy = json.loads(json.dumps(data))
                copy[key] = again
                yield copy


def looked_at(folder):
    """All that a page of a run is sent, as strict JSON, while the run seems to be in progress."""
    with locked(folder):
        view, cursor = RunView(folder), Cursor()
        for _ in range(2):
            view.refresh()
            json.loads(as_json(updates(view, cursor)), parse_constant=pytest.fail)


ONLY_SHOWN = {
    "plan.json": None,
    "load.jsonl": [
        {"at": 100.0 + k, "seconds": k, "workers": {"all[0]": {"tick": k, "take x": 0.1 * k}}}
        for k in range(1, 4)
    ],
    "evaluation.jsonl": [
        {"tick": 1, "env_steps": 8, "return_mean": 2.0, "length_mean": 3.0, "episodes": 4}
    ],
    "status.json": [
        {"at": 1.0, "workers": {"all[0]": {"tick": 1, "waits": "", "spent": {"take x": 0.1}}}}
    ],
}


@pytest.fixture
def shown(good, tmp_path):
    """A run with all files that the pages of runs show."""
    folder = Path(shutil.copytree(good, tmp_path / "shown"))
    for name, rows in ONLY_SHOWN.items():
        if rows:
            (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    record = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(record | {"status": "running"}))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_pages_show_what_is_not_damaged(shown, tmp_path, capsys, damage):
    for file in (*ONLY_SHOWN, "run.json", "summary.json", "metrics.jsonl", "workers.log", "lock"):
        folder = Path(shutil.copytree(shown, tmp_path / f"run-{file}"))
        DAMAGES[damage](folder / file)
        before = contents(folder)
        assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
        assert "</html>" in (tmp_path / "page.html").read_text()
        if file != "lock" or damage not in ("a folder", "a loop of links"):
            looked_at(folder)
        assert main(["scale", str(folder), "all=2"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert contents(folder) == before


@pytest.mark.parametrize("file", [*ONLY_SHOWN, "run.json", "summary.json", "metrics.jsonl"])
def test_pages_show_rows_of_the_wrong_shape_without_them(shown, file):
    text = (shown / file).read_text()
    lines = text.splitlines() if file.endswith("l") else [text]
    rows = [json.loads(line) for line in lines]
    every = list(wrong_values(rows[-1]))
    for wrong in every[:: len(every) // 150 or 1]:
        (shown / file).write_text("".join(f"{json.dumps(row)}\n" for row in [*rows[:-1], wrong]))
        looked_at(shown)


@pytest.mark.parametrize("file", ["summary.json", "status.json"])
def test_status_reports_json_of_the_wrong_shape(good, tmp_path, capsys, file):
    folder = Path(shutil.copytree(good, tmp_path / "run"))
    status = {"at": 1.0, "driver": 5, "ticks": 3, "workers": {"a": {"tick": 1, "waits": "x"}}}
    data = status if file == "status.json" else json.loads((folder / file).read_text())
    for wrong in wrong_values(data):
        (folder / file).write_text(json.dumps(wrong))
        capsys.readouterr()
        assert main(["status", str(folder)]) in (0, 2), wrong
        assert len(capsys.readouterr().err.splitlines()) <= 1, wrong


def test_a_checkpoint_of_the_wrong_shape_is_rejected(good, tmp_path):
    folder = Path(shutil.copytree(good, tmp_path / "run"))
    file = folder / "checkpoints/4/metadata.json"
    record = json.loads(file.read_text())
    for wrong in wrong_values(record):
        file.write_text(json.dumps(wrong))
        found = read_newest(folder / "checkpoints", lambda line: None)
        if wrong == record:
            continue
        is_older = wrong == {name: x for name, x in record.items() if name != "sum"}
        assert found.snapshot.tick == (HALF if is_older else 2), wrong


def test_a_checkpoint_with_a_wrong_tick_is_rejected(good, tmp_path):
    folder = Path(shutil.copytree(good, tmp_path / "run"))
    (folder / "checkpoints/4").rename(folder / "checkpoints/400")
    assert read_newest(folder / "checkpoints", lambda line: None).snapshot.tick == 2
    assert ticks_in(folder / "checkpoints") == [2, 400]


def test_a_run_of_the_wrong_shape_is_rejected_in_one_line(good, tmp_path):
    folder = Path(shutil.copytree(good, tmp_path / "run"))
    record = json.loads((folder / "run.json").read_text())
    for wrong in wrong_values({name: record[name] for name in record if name != "algorithm"}):
        (folder / "run.json").write_text(json.dumps(wrong | {"algorithm": record["algorithm"]}))
        with suppress(shoal.ShoalError):
            shoal.load(folder, trust=True)


def test_valid_rows_after_a_bad_line_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"tick": tick, "x": 1}) for tick in range(6)]
    bad = ["", "{", "null", '{"tick": "2"}', '{"tick": true}', '{"x": 1}', "[" * 5000, "\x00"]
    for line in bad:
        path.write_text("\n".join([rows[0], line, *rows[1:]]) + "\n" + rows[5][:3])
        assert cut_rows(path, 4) == 1
        assert path.read_text().splitlines() == rows[:4]
    path.write_text("\n".join(rows[:3]))
    assert cut_rows(path, 9) == 0  # only the last row was not written whole
    assert path.read_text().splitlines() == rows[:2]


def test_keeping_no_checkpoints_is_rejected_before_anything_is_written(good, tmp_path, capsys):
    folder = Path(shutil.copytree(good, tmp_path / "run"))
    before = contents(folder)
    wrong = [["--keep", "0"], ["--restarts", "-1"], ["--checkpoint-every", "infs"]]
    for words in [*wrong, ["--ticks", "-3"], ["--ticks", "3"], ["--backend", "no"]]:
        assert main(["resume", str(folder), "--trust", "--ticks", "7", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert contents(folder) == before


def test_a_folder_that_moves_during_its_run_is_an_error(tmp_path, capsys):
    moved, rows = tmp_path / "moved", []

    @shoal.host(lambda x: x)
    def move_away(x):
        rows.append(x)
        if len(rows) == 3:
            (tmp_path / "run").rename(moved)
        return x

    def turn(state):
        state, metrics = plain(state)
        return state._replace(age=move_away(state.age)), metrics

    how = {"envs": 8, "cluster": TWO_CPUS, "folder": tmp_path, "name": "run"}
    with pytest.raises(shoal.ShoalError, match="was moved or removed while it ran"):
        shoal.train(Toy(turn), None, ticks=5, checkpoint_every=1, **how)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert json.loads((moved / "run.json").read_text())["ticks"] == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_cannot_be_written_to_is_read_and_not_resumed(good, tmp_path, capsys):
    for parent in tmp_path.parents:
        if parent != parent.parent and parent.stat().st_uid == 0 and parent != Path("/tmp"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    folder = Path(shutil.copytree(good, tmp_path / "run"))
    before = contents(folder)
    os.seteuid(65534)
    try:
        assert main(["status", str(folder)]) == 0
        assert shoal.load(folder, trust=True).tick == HALF
        capsys.readouterr()
        assert main(["resume", str(folder), "--trust", "--ticks", "9"]) == 2
    finally:
        os.seteuid(0)
    (line,) = capsys.readouterr().err.splitlines()
    assert "can't write in" in line
    assert contents(folder) == before


def test_a_run_of_another_version_is_reported(good, tmp_path):
    folder = Path(shutil.copytree(good, tmp_path / "run"))
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"jax": "0.0.1\x1b[2J"}))
    said = []
    shoal.resume(folder, ticks=5, trust=True, cluster=TWO_CPUS, announce=said.append)
    (line,) = [line for line in said if "JAX" in line]
    assert "made with JAX 0.0.1" in line
    assert "\x1b" not in line
