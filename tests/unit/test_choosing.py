"""Choosing a plan: profiles, cluster files, goals, and what `shoal train` does by itself."""

import json
from dataclasses import replace

import pytest

import shoal
from shoal.cli.main import main
from shoal.runs.choosing import ChoiceOptions, automatic, choice_for, profile_from
from shoal.search.calibrate import measured
from shoal.search.candidates import Goal
from shoal.search.choose import chosen
from shoal.search.cluster_file import load_cluster
from shoal.search.kept import keep, kept_profile, machine_name
from shoal.simulation.estimate import estimate
from shoal.simulation.profile import Curve, Message, Point, Profile
from shoal.simulation.script import Scripts, loop_print
from unit.toy_loop import Toy, agreeing, check_error, plain, traced

MESSAGES = {"threads": Message(1e-5), "processes": Message(5e-5)}


def cluster(cores, memory=0):
    cpus = tuple(shoal.Device("cpu", i) for i in range(cores))
    return shoal.Cluster((shoal.Host("here", cores, cpus, memory),))


def profile(graph, one, two):
    """A profile in which a tick takes `one` second as one program, and `two` on two devices."""
    whole = {"cpu 3(move) fit_agreeing": one, "cpu x2 of 2 3(move) fit_agreeing": two}
    costs = {name: Curve((Point(graph.envs, seconds),)) for name, seconds in whole.items()}
    return Profile(loop_print(graph), machine_name(), costs, MESSAGES, 1e-5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHOAL_AUTO", "on")


def drawn():
    return shoal.plan(traced(agreeing), shoal.fused(), cluster(2))


LOOP = """
import jax.numpy as jnp

class Sum:
    def init(self, key, env, envs):
        return jnp.zeros(envs)

    def tick(self, env, state):
        return state + 1, {"total": state.sum()}
"""

# Profiles


def test_a_saved_profile_is_read_again(tmp_path):
    saved = profile(traced(agreeing), 1e-3, 5e-4)
    saved.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == saved


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"form": 9}', "\x00"])
def test_a_damaged_profile_is_refused(text, tmp_path):
    (tmp_path / "p.json").write_text(text)
    check_error(shoal.errors.SettingError, lambda: Profile.load(tmp_path / "p.json"), "no profile")


def test_a_profile_says_of_which_machine_and_loop_it_is():
    here = profile(traced(agreeing), 1.0, 1.0)
    assert here.misfit(here.loop, here.machine) == ""
    assert "another machine" in here.misfit(here.loop, "96 cores")
    assert "another loop" in here.misfit("other", here.machine)


def test_a_loop_s_profile_is_for_any_number_of_environments_and_other_loops_have_another():
    one, more = traced(agreeing), shoal.trace(Toy(agreeing), envs=16)
    assert loop_print(one) == loop_print(more)
    assert loop_print(one) != loop_print(traced(plain))


def test_a_profile_of_another_loop_is_not_used_and_this_is_said(tmp_path):
    said = []
    replace(profile(traced(agreeing), 1.0, 1.0), loop="x").save(tmp_path / "p.json")
    assert profile_from(tmp_path / "p.json", traced(agreeing), said.append) is None
    assert "another loop" in said[0]


def test_what_runs_is_what_is_measured():
    """All parts of a plan, fused or apart, get a point at the very size that they run with."""
    graph = traced(agreeing)
    for policy in (shoal.fused(), shoal.single_learner_coarse(2)):
        plan = shoal.plan(graph, policy, cluster(2))
        known = Profile("", "", {}, MESSAGES).joined(measured(plan, 0.0))
        assert Scripts(plan, known).is_measured
        assert estimate(Scripts(plan, known)).steps_per_second > 0


# Choices


def test_two_devices_are_chosen_where_they_are_faster():
    graph = traced(agreeing)
    for one, two, best in [(1e-3, 6e-4, 2), (1e-3, 1.2e-3, 1), (1e-3, 0.99e-3, 1)]:
        choice = chosen(graph, cluster(2), profile(graph, one, two), Goal())
        assert choice.plan.distribution == shoal.fused(best)
    assert "Next is fused(devices=2)" in str(choice)


def test_a_goal_that_nothing_meets_says_by_how_much():
    graph = traced(agreeing)
    known = profile(graph, 8e-3, 4e-3)  # nearly 2,000 rows a second
    check_error(
        shoal.errors.SettingError,
        lambda: chosen(graph, cluster(2), known, Goal(at_least=4000)),
        "no plan makes 4,000 steps/s",
        "fused(devices=2)",
        "1,999",
        "2 times too few",
    )  # fmt: skip


def test_a_plan_too_large_for_the_memory_is_refused_before_anything_starts():
    graph = traced(agreeing)
    check_error(
        shoal.errors.CutError,
        lambda: chosen(graph, cluster(2, memory=16), profile(graph, 1.0, 1.0), Goal()),
        "here would hold", "has 16 B",
    )  # fmt: skip


def test_a_profile_that_says_nothing_of_a_cluster_is_refused():
    graph = traced(agreeing)
    gpu = shoal.Cluster((shoal.Host("a", 2, (shoal.Device("gpu", 0),)),))
    check_error(
        shoal.errors.SettingError,
        lambda: chosen(graph, gpu, profile(graph, 1.0, 1.0), Goal()), "can't estimate",
    )  # fmt: skip


def test_environments_move_only_if_they_may():
    graph = traced(agreeing)
    flat = {"cpu 3(move) fit_agreeing": Curve((Point(8, 1e-3), Point(32, 1.1e-3)))}
    known = Profile(loop_print(graph), machine_name(), flat, MESSAGES, 1e-5)
    assert chosen(graph, cluster(1), known, Goal()).plan.graph.envs == 8
    choice = chosen(graph, cluster(1), known, Goal(envs=(8, 32)))
    assert choice.plan.graph.envs == 32
    assert any("changes learning" in line for line in choice.reasons)


@pytest.mark.parametrize("goal", [{"max_lag": -1}, {"envs": (0, 4)}, {"envs": (8, 4)}])
def test_a_goal_out_of_range_is_refused(goal):
    check_error(shoal.errors.SettingError, lambda: Goal(**goal), next(iter(goal)))


# Cluster files


GOOD = """
[link]
latency = 1e-4
bandwidth = 1e9

[[hosts]]
name = "big"
cpus = 4
gpus = 2
gpu_memory = 8e10

[[hosts]]
name = "small"
cpus = 2
count = 3
"""


def test_a_cluster_file_has_hosts_devices_and_a_link(tmp_path):
    (tmp_path / "c.toml").write_text(GOOD)
    found = load_cluster(tmp_path / "c.toml")
    assert [h.name for h in found.cluster.hosts] == ["big", "small0", "small1", "small2"]
    assert len(found.cluster.places("gpu")) == 2
    assert len(found.cluster.places("cpu")) == 10
    assert found.cluster.hosts[0].devices[-1].memory == 80_000_000_000
    assert found.link == Message(1e-4, 1e9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[hosts]", ["no TOML"]),
        ("", ["names no hosts"]),
        ("hosts = []", ["names no hosts"]),
        ("[[hosts]]\nname = 'a'", ["cpus"]),
        ("[[hosts]]\nname = 'a'\ncpus = 0", ["cpus", "1 or more"]),
        ("[[hosts]]\nname = 'a'\ncpus = 'x'", ["cpus"]),
        ("[[hosts]]\nname = 'a'\ncpus = 1\nspeed = 2", ["speed", "unknown"]),
        ("[[hosts]]\nname = 'a'\ncpus = 1\n[[hosts]]\nname = 'a'\ncpus = 1", ["twice"]),
        ("[link]\nlatency = -1.0\nbandwidth = 1.0\n[[hosts]]\nname = 'a'\ncpus = 1", ["latency"]),
        ("hosts = 3", ["hosts"]),
        ("hosts = [3]", ["hosts"]),
        ("link = 3\n[[hosts]]\nname = 'a'\ncpus = 1", ["link"]),
    ],
)
def test_a_cluster_file_that_is_wrong_says_what(text, words, tmp_path):
    (tmp_path / "c.toml").write_text(text)
    check_error(shoal.errors.SettingError, lambda: load_cluster(tmp_path / "c.toml"), *words)


def test_a_cluster_file_that_is_not_there_is_refused(tmp_path):
    check_error(
        shoal.errors.SettingError, lambda: load_cluster(tmp_path / "none.toml"), "none.toml"
    )


def test_a_link_of_a_cluster_file_reaches_the_choice(tmp_path, cache):
    graph = traced(agreeing)
    (tmp_path / "c.toml").write_text("[[hosts]]\nname = 'a'\ncpus = 1\n")
    profile(graph, 1e-3, 5e-4).save(tmp_path / "p.json")
    options = ChoiceOptions(tmp_path / "c.toml", tmp_path / "p.json")
    choice = choice_for(graph, cluster(2), options, print)
    assert choice.plan.cluster.hosts[0].name == "a"
    assert choice.plan.distribution == shoal.fused(1)
    assert any(line.startswith("twice the cores") for line in choice.counterfactuals)


# What `shoal train` does by itself


def test_a_short_run_is_not_worth_measuring(cache):
    found = automatic(drawn(), 5, None, pytest.fail)
    assert found.distribution == shoal.fused()
    assert "the run is short" in found.why
    assert kept_profile(traced(agreeing)) is None


def test_a_kept_profile_is_used_and_the_choice_kept(cache):
    graph = traced(agreeing)
    keep(profile(graph, 1e-3, 6e-4))
    found = automatic(drawn(), 5, None, pytest.fail)
    assert found.distribution == shoal.fused(2)
    assert found.why.count("\n") == 1
    keep(profile(graph, 1e-3, 2e-3))  # a choice that was made stays
    assert automatic(drawn(), 5, None, pytest.fail) == found


def test_a_kept_profile_of_another_machine_is_not_used(cache):
    said = []
    keep(replace(profile(traced(agreeing), 1e-3, 6e-4), machine="96 cores"))
    assert kept_profile(traced(agreeing), said.append) is None
    assert "another machine (96 cores)" in said[0]
    assert "measuring again" in said[0]


def test_choices_that_are_damaged_are_made_again(cache, tmp_path):
    keep(profile(traced(agreeing), 1e-3, 6e-4))
    first = automatic(drawn(), 5, None, pytest.fail)
    (kept,) = tmp_path.rglob("*.choices.json")
    kept.write_text('{"8 envs": 3')
    assert automatic(drawn(), 5, None, pytest.fail) == first
    assert json.loads(kept.read_text())


@pytest.mark.parametrize("name", ["inline", "ray"])
def test_other_backends_keep_the_usual_plan(name, cache):
    found = automatic(drawn(), 5, name, pytest.fail)
    assert (found.distribution, found.backend, found.why) == (shoal.fused(), name, "")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--allow-envs", "few"], "--allow-envs few is no range"),
        (["--allow-envs", "8-4"], "no range"),
        (["--cluster", "none.toml"], "none.toml can't be read"),
        (["--profile", "none.json"], "none.json is no profile"),
    ],
)
def test_wrong_options_of_a_choice_are_refused(words, what, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    assert main(["plan", "loop.py:Sum", "none", "--auto", *words]) == 2
    assert what in capsys.readouterr().err


def test_auto_and_a_distribution_policy_exclude_each_other(capsys):
    assert main(["plan", "ppo", "CartPole-v1", "--auto", "--distribute", "fused"]) == 2
    assert "--auto chooses" in capsys.readouterr().err
