"""What limits a run is found from who waits for whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pages.load import Load, WorkerLoad, find_bottleneck, load_between, load_data, timeline

PLAN = {
    "fragments": [{"name": "actor"}, {"name": "learner"}],
    "channels": [
        {"name": "a>l", "writer": "actor", "reader": "learner"},
        {"name": "l>a", "writer": "learner", "reader": "actor"},
    ],
}


def load_of(actors, learner, python=0.0, full=0.0):
    """Actors that are busy these shares of their time, and a learner; `full`: waits for room."""
    workers = [
        WorkerLoad(
            f"actor[{i}]", {"env": python} if python else {},
            {("take", "l>a"): 1 - busy - full, ("put", "a>l"): full},
        )
        for i, busy in enumerate(actors)
    ]  # fmt: skip
    workers.append(WorkerLoad("learner[0]", {}, {("take", "a>l"): 1 - learner}))
    return Load(10.0, tuple(workers))


@pytest.mark.parametrize(
    ("load", "kind", "target", "words"),
    [
        (load_of([0.97, 0.95], 0.3, python=0.9), "stage", "actor/env", "Stage env of actor"),
        (load_of([0.97, 0.95], 0.3), "fragment", "actor", "learner waits 70 %"),
        (load_of([0.3, 0.2], 0.98), "fragment", "learner", "actor waits 75 %"),
        (load_of([0.97, 0.3, 0.35, 0.4], 0.2), "worker", "actor[0]", "they 35 %"),
        (load_of([0.5, 0.5], 0.6, full=0.4), "queue", "a>l", "waits 40 % of the time for room"),
        (load_of([0.5, 0.5], 0.5), "turns", "actor", "take turns"),
        (Load(1.0, (WorkerLoad("other[0]", {}, {}),)), "none", "", "no count"),
    ],
)
def test_each_kind_of_bottleneck_is_named(load, kind, target, words):
    found = find_bottleneck(load, PLAN)
    assert (found.kind, found.target) == (kind, target)
    assert words in found.text


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 0.5))
def test_there_is_always_one_and_it_is_of_the_plan(actors, learner, full):
    load = load_of([min(busy, 1 - full) for busy in actors], learner, full=full)
    found = load_data(load, PLAN)["bottleneck"]
    fragments = {"actor", "learner"}
    assert found["target"].partition("[")[0].partition("/")[0] in {*fragments, "a>l", "l>a"}
    assert found["text"].endswith(".")


def test_a_fragment_that_none_waits_for_limits_nothing():
    reads = {"name": "l>e", "writer": "learner", "reader": "evaluator"}
    plan = {
        "fragments": [*PLAN["fragments"], {"name": "evaluator"}],
        "channels": [*PLAN["channels"], reads],
    }
    busy = load_of([0.3, 0.3], 0.9)
    load = Load(1.0, (*busy.workers, WorkerLoad("evaluator[0]", {}, {})))
    assert find_bottleneck(load, plan).target == "learner"


def row(at, **workers):
    return {"at": at, "seconds": at, "workers": workers}


def test_a_load_is_what_was_counted_between_two_rows():
    before = row(10.0, **{"actor[0]": {"tick": 5, "take l>a": 1.0, "in env": 4.0}})
    after = row(14.0, **{"actor[0]": {"tick": 9, "take l>a": 2.0, "in env": 6.0}})
    (worker,) = load_between(before, after).workers
    assert worker.busy == 0.75
    assert worker.python == {"env": 0.5}
    assert worker.waits == {("take", "l>a"): 0.25}
    assert load_between(after, before) is None


def test_a_worker_that_was_restarted_between_two_rows_is_left_out():
    before = row(1.0, **{"a[0]": {"tick": 9, "take c": 5.0}, "a[1]": {"tick": 9, "take c": 5.0}})
    after = row(2.0, **{"a[0]": {"tick": 1, "take c": 0.1}, "a[1]": {"tick": 10, "take c": 5.5}})
    assert [worker.name for worker in load_between(before, after).workers] == ["a[1]"]


def test_rows_of_a_damaged_file_give_no_load():
    for bad in ({}, {"at": "x", "workers": []}, {"at": 3.0, "workers": {"a[0]": 4}}):
        assert load_between({"at": 1.0, "workers": {}}, bad) is None


def test_a_timeline_has_few_points_and_ends_with_the_last_row():
    rows = [row(float(t), **{"a[0]": {"tick": t, "take c": t / 2}}) for t in range(1, 1000)]
    line = timeline(rows)
    assert len(line["seconds"]) <= 161
    assert line["seconds"][-1] == 999.0
    assert set(line["busy"]["a[0]"]) == {0.5}
