"""`shoal profile` prints the shares of a run's workers, and says where there are none."""

import json

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.profiling.span_file import FILE, SpanFile, write_spans
from shoal.profiling.spans import SPAN, Kind
from shoal.profiling.totals import Totals
from unit.example_plans import example_plan

S = 1_000_000_000  # nanoseconds
FITTER = 1 << 16  # its first site


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


def site(number, fragment, kind, name, category):
    stages = [name] if kind in ("stage", "segment") else []
    return {"number": number, "fragment": fragment, "kind": kind, "name": name,
            "stages": stages, "category": category}  # fmt: skip


def one_span(kind, site, begin, end, endpoint=0, number=0):
    found = np.zeros(1, SPAN)
    found[0] = begin, end, site, endpoint, kind, number, 1
    return found


@pytest.fixture
def with_spans(folder):
    """A run whose mover takes 8 of 10 seconds to step, and whose fitter waits for its message."""
    mover = [one_span(Kind.STAGE, 0, 0, 8 * S), one_span(Kind.PUT, 1, 8 * S, 9 * S, number=4),
             one_span(Kind.SEGMENT, 2, 9 * S, 10 * S)]  # fmt: skip
    fitter = [one_span(Kind.WAIT, FITTER, 0, 9 * S),
              one_span(Kind.TAKE, FITTER, 9 * S, 10 * S, number=4)]  # fmt: skip
    workers = {"mover[0]": np.concatenate(mover), "fitter[0]": np.concatenate(fitter)}
    totals = Totals()
    for number, spans in enumerate(workers.values()):
        totals.add(number, spans, 0, 0, range(0))
    sites = [site(0, "mover", "stage", "move", "simulation"),
             site(1, "mover", "put", "a", "other computation"),
             site(2, "mover", "segment", "act", "inference"),
             site(FITTER, "fitter", "take", "a", "other computation")]  # fmt: skip
    about = {
        "wall": 0.0, "cost": {"inside": 0.0, "outside": 0.0}, "measured": [0, 0],
        "workers": [{"name": n, "pid": 1, "memory": 9_000_000, "ticks": [1, 1]} for n in workers],
        "kept": [len(x) for x in workers.values()], "sites": sites,
        "channels": example_plan()["channels"],
    }  # fmt: skip
    write_spans(folder / FILE, SpanFile(about, totals.array(), list(workers.values())))
    return folder


def test_the_categories_of_each_fragment_are_printed_from_spans(with_spans, capsys):
    assert main(["profile", str(with_spans)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    for row in (["simulation", "80%", "-"], ["inference", "10%", "-"], ["copying", "10%", "10%"],
                ["waiting", "-", "90%"], ["memory", "9", "MB", "9", "MB"]):  # fmt: skip
        assert row in rows
    assert "Stage move of mover, in Python, takes 80 % of the time" in out
    assert "fitter waits 90 % of the time for what it sends" in out


def test_a_trace_has_each_span_and_an_arrow_for_each_message(with_spans, tmp_path, capsys):
    files = tmp_path / "trace.json", tmp_path / "profile.json"
    assert (
        main(["profile", str(with_spans), "--trace", str(files[0]), "--json", str(files[1])]) == 0
    )
    events = json.loads(files[0].read_text())["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(slices) == {"move", "put a", "act", "wait for a", "take a"}
    assert (slices["put a"]["ts"], slices["put a"]["dur"]) == (8e6, 1e6)
    start, end = (next(e for e in events if e["ph"] == phase) for phase in "sf")
    assert start["id"] == end["id"]
    assert (start["pid"], end["pid"]) == (slices["put a"]["pid"], slices["take a"]["pid"])
    assert (start["ts"], end["ts"]) == (8.5e6, 9.5e6)
    found = json.loads(files[1].read_text())
    assert [worker["seconds"] for worker in found["workers"]] == [10.0, 10.0]
    assert found["channels"][0]["put"]["count"] == 1
    assert found["fragments"]["fitter"]["shares"]["waiting"] == 0.9


def test_spans_that_cannot_be_read_are_one_clear_line(with_spans, capsys):
    data = (with_spans / FILE).read_bytes()
    for wrong, why in ((data[:-9], "cut off or damaged"), (b"Shoal spans 7\n", "another version"),
                       (b"", "holds no spans")):  # fmt: skip
        (with_spans / FILE).write_bytes(wrong)
        assert main(["profile", str(with_spans)]) == 2
        assert why in capsys.readouterr().err
    (with_spans / FILE).write_bytes(data)
    (with_spans / "plan.json").write_text("{}")
    assert main(["profile", str(with_spans)]) == 2
    assert "plan.json is no plan" in capsys.readouterr().err


def test_a_run_without_spans_has_no_trace(folder, capsys):
    assert main(["profile", str(folder), "--trace", str(folder / "t.json")]) == 2
    assert "has no spans" in capsys.readouterr().err
