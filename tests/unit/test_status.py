"""The status in a run's folder is correct during the run and afterwards."""

import pytest

from shoal.cli.main import main
from shoal.errors import SettingError
from shoal.runs.files.folder import locked, write_json
from shoal.runs.files.status import Status, read_status
from shoal.runtime.execution.worker_status import WorkerStatus


def test_the_status_shows_why_workers_wait(tmp_path, capsys):
    write_json(tmp_path / "summary.json", {"status": "running", "ticks": 12})
    status = Status(tmp_path, {"ticks": 13, "replaced": 2}, print)
    statuses = {
        "actor[0]": WorkerStatus(13, "", 4711, "env", 13, 75.0),
        "learner[0]": WorkerStatus(12, "learner[0] waits for actor", 4712),
    }
    status.stand(lambda: statuses)
    assert main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "running, tick 13, 2 replaced; updated 0 s ago" in printed
    assert "learner[0] waits for actor" in printed
    assert "4711" in printed
    assert "env for 75 s" in printed
    status.close()
    assert main(["status", str(tmp_path)]) == 0
    assert "waits" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["[1]", '{"actor": null}', '{"actor": -1}', '{"actor": true}', '{"actor": 2', "\xff"]
)
def test_an_invalid_scale_json_is_reported_once_and_ignored(tmp_path, text, monkeypatch):
    monkeypatch.setattr("shoal.runs.files.status.EVERY", 0.0)
    said = []
    status = Status(tmp_path, {}, said.append)
    write_json(tmp_path / "scale.json", {"actor": 3})
    assert status.scale() == {"actor": 3}
    (tmp_path / "scale.json").write_bytes(text.encode("latin-1"))
    assert [status.scale() for _ in range(3)] == [{"actor": 3}] * 3
    assert len(said) == 1
    assert "scale.json is ignored" in said[0]


def test_a_folder_for_a_scale_json_is_reported_once_and_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.runs.files.status.EVERY", 0.0)
    said = []
    status = Status(tmp_path, {}, said.append)
    (tmp_path / "scale.json").mkdir()
    assert [status.scale() for _ in range(3)] == [{}] * 3
    assert len(said) == 1
    assert "scale.json is ignored" in said[0]


def test_a_run_whose_process_was_killed_is_not_shown_as_running(tmp_path, capsys):
    write_json(tmp_path / "summary.json", {"status": "running", "ticks": 12})
    with locked(tmp_path):
        assert main(["status", str(tmp_path)]) == 0
        assert ": running, tick 12" in capsys.readouterr().out
        Status(tmp_path, {"ticks": 12}, print).stand(dict)
    assert main(["status", str(tmp_path)]) == 0  # at once, though its status was just written
    assert ": killed, tick 12" in capsys.readouterr().out
    (tmp_path / "status.json").unlink()
    assert main(["status", str(tmp_path)]) == 0
    assert ": killed, tick 12" in capsys.readouterr().out
    status = Status(tmp_path, {"ticks": 13}, print)
    status.stand(lambda: {"[/bold]\x1b]52;c;\x07": WorkerStatus(1, "\x1b[2J", 1)})
    assert main(["status", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_status_rejects_a_folder_without_a_run(tmp_path):
    with pytest.raises(SettingError, match="there is no run"):
        read_status(tmp_path)
