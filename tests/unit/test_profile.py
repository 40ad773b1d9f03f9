"""`shoal profile` prints the shares of a run's workers, and says where there are none."""

import json

import pytest

from shoal.cli.main import main
from unit.example_plans import example_plan


def counts(at, movers, fitter):
    """A row of load.jsonl: what the workers have spent by then."""
    workers = {f"mover[{i}]": {"tick": at, "in env": s} for i, s in enumerate(movers)}
    workers["fitter[0]"] = {"tick": at, "take a": fitter}
    return {"at": at, "seconds": at, "workers": workers}


@pytest.fixture
def folder(tmp_path):
    for name, data in (("run", {}), ("summary", {"status": "done"}), ("plan", example_plan())):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def test_the_shares_of_each_fragment_and_the_bottleneck_are_printed(folder, capsys):
    rows = [counts(10, [1, 2], 3), counts(20, [6, 10], 9)]
    (folder / "load.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["profile", str(folder)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["mover", "2", "100%", "env", "65%"] in rows  # 5 and 8 of 10 seconds
    assert ["fitter", "1", "40%", "messages", "of", "a", "60%"] in rows
    assert "fitter waits 60 % of the time for what it sends" in out


def test_a_run_without_counts_says_why(folder, capsys):
    assert main(["profile", str(folder)]) == 2
    assert "no counts" in capsys.readouterr().err
