"""Asynchronous fragments whose replicas are added and removed while the others continue."""

import json
import time

import pytest

import shoal
from conformance.test_hosts import hosts
from conformance.test_processes import nothing_left
from conformance.test_replaced import Enough
from laws.cases import ONE, cluster, cpu, graph_of, start_of
from shoal.cli.main import main
from shoal.errors import CutError, SettingError
from shoal.planning.fragment_program import write_program
from shoal.planning.policies import impala
from shoal.planning.policy import Fragment
from shoal.runs.files.folder import FORM, locked, write_json
from shoal.runtime.cluster.assignment import ProcessAssignment
from shoal.runtime.cluster.recovery import RecoveryPolicy
from shoal.runtime.cluster.restarting import starting_workers
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.run import RunCallbacks

pytest.importorskip("gymnasium")
__all__ = ["nothing_left"]


class ScaledRun:
    """A run that is scaled: `counts` one after the other, each once the one before is reached."""

    def __init__(self, *counts):
        self.counts, self.ticks, self.reached, self.said = list(counts), [], [], []

    def see(self, tick, metrics):
        self.ticks.append(tick)
        if not self.counts and "worker actor[1] has started" in self.said:
            raise Enough

    def stand(self, standing):
        there = {name: one.tick for name, one in standing().items() if "actor" in name}
        if self.ticks and all(there.values()) and [len(there)] == self.counts[:1]:
            self.reached.append((self.ticks[-1], sorted(there)))
            del self.counts[0]

    def scale(self):
        return {"actor": self.counts[0]} if self.counts and self.ticks else {}

    def run(self, plan, backend="processes"):
        watching = RunCallbacks(self.see, stand=self.stand, scale=self.scale)
        state = start_of("chase")
        with pytest.raises(Enough):
            RecoveryPolicy(say=self.said.append).run(
                plan, backend, ticks=10**9, state=state, watch=watching
            )
        assert self.ticks == list(range(len(self.ticks))), "the run rolled back"
        return self.reached


@pytest.mark.slow
@pytest.mark.parametrize("machines", [ONE, hosts(2)], ids=["one host", "two"])
def test_replicas_are_added_and_removed_while_the_others_continue(machines):
    plan = shoal.plan(graph_of("chase"), impala((1, 4), 1, 7), machines)
    scaled = ScaledRun(2, 1, 2)
    reached = scaled.run(plan)
    assert [there for _, there in reached] == [
        ["actor[0]", "actor[1]"], ["actor[0]"], ["actor[0]", "actor[1]"],
    ]  # fmt: skip
    ticks = [tick for tick, _ in reached]
    assert ticks == sorted(set(ticks)), "no ticks ran between two changes"
    assert "actor: scaling to 1 replicas" in scaled.said


def drawn(actors, machines=ONE):
    return shoal.plan(graph_of("chase"), impala(actors, 1, 7), machines)


@pytest.mark.parametrize(("cpus", "first"), [(1, 2), (3, 2), (4, 3), (5, 4), (64, 4)])
def test_a_run_starts_with_as_many_replicas_as_fit_within_the_bounds(cpus, first):
    machines = shoal.Cluster((shoal.Host("host0", cpus, (cpu(0),)),))
    plan = drawn((2, 4), machines)
    assert plan.starting("actor") == first
    assert f"2 to 4, first {first}" in str(plan)
    assert first_of(plan) == {*range(first), 4}


def first_of(plan):
    programs = {f.name: write_program(plan, f.name) for f in plan.distribution.fragments}
    return starting_workers(plan, ProcessAssignment(plan, programs, Snapshot(0, {})).worker_ids)


def test_replicas_that_others_wait_for_can_not_be_elastic():
    with pytest.raises(CutError, match=r"`actor` is to have 2 to 4 replicas, but others wait"):
        shoal.plan(graph_of("chase"), shoal.single_learner_coarse((2, 4)), cluster(4))


def test_a_reader_can_not_take_more_than_the_fewest_replicas():
    with pytest.raises(CutError, match=r"is to take 3 of at least 2 replicas"):
        shoal.plan(graph_of("chase"), impala((2, 4), 3, 7), ONE)


def test_bounds_are_in_order():
    with pytest.raises(SettingError, match="4 to 2 replicas"):
        Fragment("actor", ("*",), (4, 2))


def test_a_run_is_scaled_by_a_file_in_its_folder(tmp_path, capsys):
    write_json(tmp_path / "summary.json", {"status": "running", "ticks": 3})
    run = {"form": FORM, "algorithm": None, "env": None, "distribution": {}, "envs": 4}
    run |= {"ticks": 9, "seed": 0, "checkpoint_every": "end", "keep": 1, "backend": "processes"}
    write_json(tmp_path / "run.json", {**run, "elastic": {"actor": [2, 4]}})
    assert main(["scale", str(tmp_path), "actors=3"]) == 2
    assert "isn't running" in capsys.readouterr().err
    write_json(tmp_path / "status.json", {"at": 0, "workers": {}})
    assert main(["scale", str(tmp_path), "actors=3"]) == 2, "its process is gone"
    with locked(tmp_path):
        assert main(["scale", str(tmp_path), "actors=3"]) == 0
    write_json(tmp_path / "status.json", {"at": time.time(), "workers": {}})
    assert json.loads((tmp_path / "scale.json").read_text()) == {"actor": 3}
    for wrong, error in [("actor=5", "Choose 2 to 4"), ("learner=2", "actor (2 to 4)")]:
        assert main(["scale", str(tmp_path), wrong]) == 2
        assert error in capsys.readouterr().err
