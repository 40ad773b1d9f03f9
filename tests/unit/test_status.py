"""A run's folder tells how it is, while it goes on and afterwards."""

import pytest

from shoal.cli.main import main
from shoal.errors import SettingError
from shoal.runs.records import write_json
from shoal.runs.status import Status, read_status


def test_what_workers_wait_for_is_shown_while_they_do(tmp_path, capsys):
    write_json(tmp_path / "summary.json", {"status": "running", "ticks": 12})
    status = Status(tmp_path, {"ticks": 13, "replaced": 2, "lost_turns": 1})
    status.stand(lambda: {"actor[0]": (13, ""), "learner[0]": (12, "learner[0] waits for actor")})
    assert main(["status", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "running, tick 13, 2 replaced, 1 turns lost; heard 0 s ago" in told
    assert "learner[0] waits for actor" in told
    status.close()
    assert main(["status", str(tmp_path)]) == 0
    assert "waits" not in capsys.readouterr().out


def test_a_folder_without_a_run_is_answered(tmp_path):
    with pytest.raises(SettingError, match="there is no run"):
        read_status(tmp_path)
