"""How graphs and plans print: golden files, and data that names everything."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

import shoal
from shoal.graph.ir import nested_stages
from shoal.pages import graph_page, plan_page

pytest.importorskip("gymnax")

CPUS = tuple(shoal.Device("cpu", i) for i in range(2))
CLUSTERS = {
    "two CPUs": shoal.Cluster((shoal.Host("host0", 2, CPUS),)),
    "two CPUs and a GPU": shoal.Cluster((shoal.Host("host0", 2, (*CPUS, shoal.Device("gpu", 0))),)),
}
POLICIES = {
    policy.name: policy
    for policy in (
        shoal.fused(2),
        shoal.single_learner_coarse(2, lag=1),
        shoal.single_learner_fine(2),
        shoal.environments(2),
        shoal.multi_learner(2),
        shoal.central(2),
        shoal.decoupled(2, 2, 1),
        shoal.sebulba(1, 1),
    )
}


@cache
def ppo():
    from shoal.algorithms import PPO
    from shoal.envs import make

    return shoal.trace(PPO(num_steps=16), make("CartPole-v1"), envs=8)


@cache
def planned(policy, cluster):
    return shoal.plan(ppo(), POLICIES[policy], CLUSTERS[cluster])


def steady(text):
    """A print without line numbers and counts of glue, which vary."""
    text = re.sub(r"(\.py):\d+", r"\1", text)
    return re.sub(r"\(glue x \d+\).*", "(glue)", text)


def test_the_graph_of_ppo_prints(golden):
    golden(steady(str(ppo())), "graph_ppo.txt")


def test_the_plan_of_dqn_with_a_replay_fragment_prints(golden):
    from shoal.algorithms import DQN
    from shoal.envs import make

    graph = shoal.trace(DQN(priority_exponent=0.6), make("CartPole-v1"), envs=8)
    prints = [
        f"with {name}\n\n{shoal.plan(graph, shoal.ape_x(2, lag=1), cluster)}"
        for name, cluster in CLUSTERS.items()
    ]
    golden("\n\n\n".join(prints), "plan_ape_x.txt")


def test_the_plan_of_impala_prints(golden):
    from shoal.algorithms import IMPALA
    from shoal.envs import make

    graph = shoal.trace(IMPALA(num_steps=16), make("CartPole-v1"), envs=8)
    policies = shoal.impala(4, take=2), shoal.impala(2, inference=1, ring=2)
    cluster = CLUSTERS["two CPUs and a GPU"]
    prints = [str(shoal.plan(graph, policy, cluster)) for policy in policies]
    golden("\n\n\n".join(prints), "plan_impala.txt")


@pytest.mark.parametrize("policy", POLICIES)
def test_each_plan_of_ppo_prints(policy, golden):
    prints = [f"with {cluster}\n\n{planned(policy, cluster)}" for cluster in CLUSTERS]
    golden("\n\n\n".join(prints), f"plan_{policy}.txt")


def test_a_graph_as_data_survives_json_and_names_every_stage():
    data = ppo().to_json()
    assert json.loads(json.dumps(data)) == data
    stages = {stage["name"]: stage for stage in every_stage(data)}
    assert {s.name for _, s in nested_stages(ppo())} == set(stages)
    assert {s["stage"] for s in stages.values()} == {"act", "env", "learn", "grad", "apply"}
    assert {line_of(s["source"]).partition("(")[0] for s in stages.values()} == {"@stage"}
    assert set(data["inputs"]) | {v for s in stages.values() for v in s["reads"]} <= set(
        data["values"]
    )


def line_of(source):
    """The line of code at a source."""
    file, _, number = source.partition(":")
    text = (Path(shoal.__file__).parent / file).read_text(encoding="utf-8")
    return text.splitlines()[int(number) - 1].strip()


def every_stage(body):
    for node in body["nodes"]:
        if node["kind"] == "stage":
            yield node
        if "body" in node:
            yield from every_stage(node["body"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_as_data_survives_json_and_names_every_fragment_channel_and_stage(policy):
    plan = planned(policy, "two CPUs and a GPU")
    data = plan.to_json()
    assert json.loads(json.dumps(data)) == data
    fragments = {f["name"]: f for f in data["fragments"]}
    assert {n: f["replicas"] for n, f in fragments.items()} == {
        f.name: f.most for f in plan.distribution.fragments
    }
    assert all(len(f["places"]) == f["replicas"] for f in fragments.values())
    held = [stage for f in fragments.values() for stage in f["stages"]]
    assert sorted(held) == sorted({s.stage for s in plan.graph.stages})
    channels = {c["name"]: c for c in data["channels"]}
    assert set(channels) == {c.name for c in plan.channels}
    for channel in channels.values():
        assert {channel["writer"], channel["reader"]} <= set(fragments)
        assert set(channel["values"]) <= set(data["graph"]["values"])
        assert channel["bytes"] > 0
    assert set(data["owners"].values()) <= set(fragments)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_of_a_plan_shows_its_data(policy):
    data = planned(policy, "two CPUs and a GPU").to_json()
    page = plan_page(data)
    visible = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    shown = [f["name"] for f in data["fragments"]] + [c["kind"] for c in data["channels"]]
    shown += [stage for f in data["fragments"] for stage in f["stages"]]
    assert [word for word in shown if word not in visible] == []
    drawing = json.loads(re.search(r'id="data-drawing">(.*?)</script>', page)[1])
    assert [box["label"] for box in drawing["boxes"]] == [f["name"] for f in data["fragments"]]
    assert len(drawing["arrows"]) <= len(data["channels"])


def test_the_page_of_a_graph_shows_every_stage_with_its_line():
    data = ppo().to_json()
    visible = re.sub(r"<script.*?</script>", "", graph_page(data), flags=re.DOTALL)
    for stage in every_stage(data):
        assert stage["stage"] in visible
        assert stage["source"] in visible
