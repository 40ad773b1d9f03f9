"""The time that workers spend waiting and in Python stages is counted, and kept in load.jsonl."""

import json
from itertools import pairwise

import pytest

import shoal
from shoal.algorithms import PPO
from shoal.runs.files.load import LOAD_FILE, LoadLog
from shoal.runs.inputs.sources import with_sources
from shoal.runtime.channels.shared_memory import Memory
from shoal.runtime.cluster.control_block import ControlBlock
from shoal.runtime.cluster.control_layout import ControlLayout
from shoal.runtime.execution.worker_status import WorkerStatus, activities

pytest.importorskip("gymnasium")


def rows_of(folder):
    return [json.loads(line) for line in (folder / LOAD_FILE).read_text().splitlines()]


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_workers_wait_on_their_own_channels_and_no_longer_than_the_run_takes(backend, tmp_path):
    algorithm = PPO(num_steps=16, num_minibatches=2)
    distribution = shoal.single_learner_coarse(actors=2)
    trained = shoal.train(
        algorithm, "gymnasium:CartPole-v1", distribution,
        ticks=4, envs=4, backend=backend, folder=str(tmp_path),
    )  # fmt: skip
    rows, plan = rows_of(trained.folder), trained.plan
    assert set(rows[-1]["workers"]) == {"actor[0]", "actor[1]", "learner[0]"}
    stages = {stage.stage for stage in plan.graph.stages if stage.host}
    for name, worker in rows[-1]["workers"].items():
        fragment, spent = name.partition("[")[0], dict(worker)
        del spent["tick"]
        channels = {f"take {c.name}" for c in plan.channels if c.reader == fragment}
        channels |= {f"put {c.name}" for c in plan.channels if c.writer == fragment}
        python = {f"in {stage}" for stage in stages} if fragment == "actor" else set()
        assert set(spent) <= channels | python
    for before, after in pairwise(rows):
        passed = after["at"] - before["at"]
        for name, worker in after["workers"].items():
            spent = {a: s - before["workers"][name].get(a, 0) for a, s in worker.items()}
            del spent["tick"]
            assert all(seconds >= 0 for seconds in spent.values())
            waited = sum(s for a, s in spent.items() if not a.startswith("in "))
            assert waited <= passed + 1.1  # what was waited before `before` is counted when it ends


def test_a_control_block_counts_what_each_scheduler_spends():
    memory = Memory.make(8 * 4096)
    places = range(0, 8 * 4096, 4096)
    layout = ControlLayout(
        (("actor", 0), ("learner", 0)), activities(["env"], ["a>b"]), {}, 4, {},
        *places[:3], kept=({},) * 6, marks=places[3], shows={},
    )  # fmt: skip
    control = ControlBlock(layout, memory)
    control.enter_stage(0, "env", 7)
    assert control.status(0, 1)[:5] == (0, "", 1, "env", 7)
    control.leave_stage(0)
    control.spend(0, "take a>b", 0.5)
    control.spend(0, "take a>b", 0.25)
    control.spend(1, "put a>b", 2.0)
    inside = control.status(0, 1).spent
    assert set(inside) == {"in env", "take a>b"}
    assert inside["take a>b"] == 0.75
    assert control.status(1, 1).spent == {"put a>b": 2.0}
    assert not control.status(0, 1).stage


def test_rows_become_rarer_as_a_run_gets_longer_and_the_last_is_kept(tmp_path):
    log = LoadLog(tmp_path / LOAD_FILE, print)
    for second in range(1, 20_001):
        log.add(float(second), float(second), {"a[0]": WorkerStatus(second)})
    log.add(20_000.5, 20_000.5, {"a[0]": WorkerStatus(20_001)})
    log.close()
    rows = rows_of(tmp_path)
    assert len(rows) < 3000
    assert rows[-1]["workers"]["a[0]"]["tick"] == 20_001
    apart = [after["at"] - before["at"] for before, after in pairwise(rows[:-1])]
    assert apart[0] == 1.0
    assert max(apart) <= 42.0


def test_a_run_without_workers_writes_no_load(tmp_path):
    log = LoadLog(tmp_path / LOAD_FILE, print)
    log.add(1.0, 1.0, {})
    log.close()
    assert not (tmp_path / LOAD_FILE).exists()


def test_a_plan_is_kept_with_the_source_of_its_stages(tmp_path):
    pytest.importorskip("gymnax")
    trained = shoal.train(PPO(), "CartPole-v1", ticks=1, envs=4, folder=str(tmp_path))
    plan = json.loads((trained.folder / "plan.json").read_text())
    assert plan == json.loads(json.dumps(with_sources(trained.plan.to_json())))
    learn = next(s for s in trained.plan.graph.stages if s.stage == "learn")
    assert "def learn(" in plan["sources"][learn.source]["text"]
    assert plan["sources"][learn.source]["file"].endswith("algorithms/ppo.py")
