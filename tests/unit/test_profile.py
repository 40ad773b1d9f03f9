"""`shoal profile` prints the shares of a run's workers, and says where there are none."""

import json

import pytest

from shoal.cli.main import main

PLAN = {
    "distribution": "coarse",
    "fragments": [{"name": "actor"}, {"name": "learner"}],
    "channels": [{"name": "actor>learner", "writer": "actor", "reader": "learner"}],
}


def counts(at, actors, learner):
    """A row of load.jsonl: what the workers have spent by then."""
    workers = {f"actor[{i}]": {"tick": at, "in env": s} for i, s in enumerate(actors)}
    workers["learner[0]"] = {"tick": at, "take actor>learner": learner}
    return {"at": at, "seconds": at, "workers": workers}


@pytest.fixture
def folder(tmp_path):
    for name, data in (("run", {}), ("summary", {"status": "done"}), ("plan", PLAN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def test_the_shares_of_each_fragment_and_the_bottleneck_are_printed(folder, capsys):
    rows = [counts(10, [1, 2], 3), counts(20, [6, 10], 9)]
    (folder / "load.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["profile", str(folder)]) == 0
    out = capsys.readouterr().out
    actor, learner = (
        next(x for x in out.splitlines() if name in x) for name in ("actor ", "learn")
    )
    assert actor.split() == ["actor", "2", "100%", "env", "65%"]  # 5 and 8 of 10 seconds
    assert learner.split()[:3] == ["learner", "1", "40%"]
    assert "messages of actor>learner 60%" in learner
    assert "learner waits 60 % of the time for what it sends" in out


def test_a_run_without_counts_says_why(folder, capsys):
    assert main(["profile", str(folder)]) == 2
    assert "no counts" in capsys.readouterr().err
