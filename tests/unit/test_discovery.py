"""The commands that list what there is to choose from, and what this machine has."""

import inspect

import pytest
from packaging.requirements import Requirement

from shoal.algorithms import PRESETS
from shoal.cli.main import main
from shoal.planning.policies import POLICIES
from shoal.runs import doctor
from shoal.runs.doctor import BAD, FINE, clashing, examine
from shoal.runs.inputs.guide import GUIDES

pytest.importorskip("gymnax")


@pytest.fixture
def shown(capsys):
    def run(*words, code=0):
        assert main([*words]) == code
        out, err = capsys.readouterr()
        return out or err

    return run


def test_environments_are_counted_by_family_and_found_by_a_word(shown):
    families = shown("envs")
    for word in ("gymnax", "compiled by XLA", "gymnasium", "stepped in Python", "envpool"):
        assert word in families
    assert 'pip install "shoal[envpool]"' in families or "envpool     stepped in Python" in families
    found = shown("envs", "cartpole").splitlines()
    (line,) = [x for x in found if x.startswith("gymnax:CartPole-v1")]
    assert "preset of" in line
    assert "ppo" in line
    assert all("cartpole" in line.lower() for line in found)
    assert "`gymnax:CartPole-v1`" in shown("envs", "gymnax:CartPoal-v1", code=2)


def test_every_policy_has_a_picture_a_reason_and_its_parameters(shown):
    assert list(GUIDES) == list(POLICIES)
    out = shown("policies")
    for name, make in POLICIES.items():
        assert f"{name.replace('_', '-')}\n" in out
        for parameter in inspect.signature(make).parameters:
            option = "--env-replicas" if parameter == "envs" else f"--{parameter.replace('_', '-')}"
            assert f"{option} [" in out
    assert max(map(len, out.splitlines())) <= 100


def test_presets_are_listed_by_algorithm_and_by_environment(shown):
    count = sum(map(len, PRESETS.values()))
    assert len(shown("presets").splitlines()) == count + 3
    only = shown("presets", "cartpole")
    assert "CartPole-v1" in only
    assert "HalfCheetah" not in only
    assert "unknown preset" in shown("presets", "nothing", code=2)


def test_settings_are_those_of_a_run_and_say_what_the_preset_changes(shown):
    preset = PRESETS["ppo"]["CartPole-v1"]
    out = shown("settings", "ppo", "CartPole-v1")
    assert f"--learning-rate {preset.algorithm.learning_rate!r}" in out
    assert f"--envs {preset.envs} --ticks {preset.ticks}" in out
    assert "without the preset]" in out
    plain = shown("settings", "ppo")
    assert "PPO, defaults" in plain
    assert "without the preset" not in plain
    assert "`ppo`" in shown("settings", "pp", code=2)


def test_the_doctor_looks_at_everything_and_finds_this_machine_well():
    found = {finding.subject: finding for finding in examine()}
    wanted = {"Python", "machine", "shared memory", "disk", "Ray", "devices", "compile cache"}
    assert wanted <= set(found)
    assert found["shared memory"].state == FINE
    assert "cpu:0" in found["devices"].text


def test_the_doctor_names_versions_that_clash(monkeypatch, shown):
    versions = {"shoal": "1.0", "tool": "2.0", "part": "0.5"}
    needs = {"shoal": ["tool>=1"], "tool": ["part>=1,<2", 'other; extra == "x"'], "part": []}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor.metadata, "requires", needs.get)
    assert dict(clashing("shoal")) == {"tool": "asks for part<2,>=1, and 0.5 is installed"}
    inner = Requirement("tool[x]")
    assert doctor._is_missing(inner)
    assert not doctor._is_missing(Requirement("tool"))
    bad = doctor.Finding("tool", BAD, "asks for part>=1")
    monkeypatch.setattr("shoal.cli.discovery.examine", lambda: iter([bad]))
    assert "BAD   tool           asks for part>=1" in shown("doctor", code=1)
