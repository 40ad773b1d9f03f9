"""A saved plan runs without the loop and gives the same results; other files are rejected."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from laws.cases import ONE, graph_of
from shoal.cli.main import main
from shoal.errors import CutError, ShoalError
from shoal.runs.files.records import scalars
from shoal.runs.files.saved_plans import digest, load_plan, save_plan
from shoal.runtime.run import fresh_start

POLICIES = {
    "fused": shoal.fused(),
    "coarse(2), lag 1": shoal.single_learner_coarse(2, lag=1),
    "fine(2)": shoal.single_learner_fine(2),
    "fine, served": shoal.single_learner_fine(2, ring=2),
    "multi_learner(2)": shoal.multi_learner(2),
    "decoupled(2,2,2)": shoal.decoupled(2, 2, 2),
    "impala(2)": shoal.impala(2, take=1),
}
RUN = """
import sys, numpy as np, shoal
plan = shoal.load_plan(sys.argv[1])
values = shoal.run(plan, sys.argv[2], ticks=3).values
assert "laws" not in {name.partition(".")[0] for name in sys.modules}
np.savez(sys.argv[3], **{n: jax.random.key_data(x) if "key" in str(x.dtype) else x
                         for n, x in values.items()})
""".replace("np, shoal", "np, shoal, jax")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plan of each kind, and the file that it was saved to."""
    folder, made = tmp_path_factory.mktemp("plans"), {}

    def plan_and_file(name):
        if name not in made:
            plan = shoal.plan(graph_of("chase"), POLICIES[name], ONE)
            made[name] = plan, save_plan(plan, folder / f"{len(made)}.shoal")
        return made[name]

    return plan_and_file


def raw(x):
    return np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x)


@pytest.mark.parametrize("name", POLICIES)
def test_a_loaded_plan_prints_as_it_did_and_gives_the_same_bits(saved, name):
    plan, path = saved(name)
    loaded = load_plan(path)
    assert str(loaded) == str(plan)
    start = fresh_start(plan.graph, 3)
    for key, x in fresh_start(loaded.graph, 3).values.items():
        assert np.array_equal(raw(x), raw(start.values[key])), key
    if name in ("impala(2)", "fine, served"):  # their order of arrival varies
        assert shoal.run(loaded, "inline", ticks=3).ticks == 3
        return
    ran = [shoal.run(one, "inline", ticks=3).values for one in (plan, loaded)]
    for key in ran[0]:
        assert np.array_equal(raw(ran[0][key]), raw(ran[1][key])), key


@pytest.mark.parametrize("name", ["coarse(2), lag 1", "multi_learner(2)"])
def test_another_process_runs_it_without_the_loop(saved, name, tmp_path):
    plan, path = saved(name)
    out = tmp_path / "end.npz"
    command = [sys.executable, "-c", RUN, str(path), "processes", str(out)]
    subprocess.run(command, check=True, cwd=tmp_path)
    wanted = shoal.run(plan, "processes", ticks=3).values
    with np.load(out) as got:
        for key, x in wanted.items():
            assert np.array_equal(got[key], raw(x)), key


def test_a_loaded_plan_can_be_saved_again(saved, tmp_path):
    _, path = saved("coarse(2), lag 1")
    again = save_plan(load_plan(path), tmp_path / "again.shoal")
    assert str(load_plan(again)) == str(load_plan(path))


def changed(path, out, change):
    """A copy of a plan's file in which `change` has altered the text of the plan."""
    parts = parts_of(path)
    return forged(parts | {"plan.json": change(parts["plan.json"].decode()).encode()}, out)


def parts_of(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist() if name != "digest"}


def forged(parts, out):
    """A file of these parts with their digest, as an attacker would write it."""
    with zipfile.ZipFile(out, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)
        file.writestr("digest", digest(*parts.values()))
    return out


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"is": "Lockstep"', '"is": "Popen"'),
        lambda text: text.replace('"is": "Lockstep"', '"is": "__import__"'),
        lambda text: text.replace('["form", 2]', '["form", 3]'),
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps({"map": []}),
        lambda text: "[" * 100_000,
    ],
    ids=["class", "function", "form", "cut short", "empty", "deep"],
)
def test_a_modified_file_is_rejected(saved, tmp_path, change):
    _, path = saved("coarse(2), lag 1")
    other = changed(path, tmp_path / "other.shoal", change)
    with pytest.raises(ShoalError, match="holds no plan"):
        load_plan(other)


def test_other_files_are_rejected(tmp_path):
    with pytest.raises(ShoalError, match="can't be read"):
        load_plan(tmp_path / "none.shoal")
    (tmp_path / "text.shoal").write_text("no plan")
    with pytest.raises(ShoalError, match="holds no plan"):
        load_plan(tmp_path / "text.shoal")


def test_a_program_that_would_call_outside_xla_is_rejected(saved, tmp_path):
    _, path = saved("coarse(2), lag 1")
    evil = jax.export.export(
        jax.jit(lambda x: jax.ffi.ffi_call("xla_ffi_python_cpu_callback", x)(x)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("ALL")],
    )(jnp.zeros(1))
    parts = parts_of(path) | {"programs/0": bytes(evil.serialize())}
    with pytest.raises(ShoalError, match="xla_ffi_python_cpu_callback"):
        load_plan(forged(parts, tmp_path / "other.shoal"))


def test_a_file_that_was_changed_after_it_was_saved_is_rejected(saved, tmp_path):
    _, path = saved("coarse(2), lag 1")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "other.shoal", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"float32", b"float16") if "json" in name else data)
    with pytest.raises(ShoalError, match="it was changed after it was saved"):
        load_plan(tmp_path / "other.shoal")


def test_the_command_runs_a_saved_plan(saved, capsys):
    plan, path = saved("coarse(2), lag 1")
    shown = []
    shoal.run(
        plan, "inline", ticks=2, state=fresh_start(plan.graph, 5),
        watch=lambda tick, metrics: shown.append(scalars(metrics)),
    )  # fmt: skip
    words = ["run", str(path), "--ticks", "2", "--seed", "5", "--backend", "inline"]
    assert main(words) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [{"tick": tick, **metrics} for tick, metrics in enumerate(shown)]


def test_the_command_saves_a_plan(tmp_path, capsys):
    loop = Path(__file__).parents[1] / "laws" / "outside_loop.py"
    out = tmp_path / "plan.shoal"
    assert main(["plan", f"{loop}:Chase", "none", "--envs", "4", "--save", str(out)]) == 0
    assert str(load_plan(out)) in capsys.readouterr().out


class InPython:
    """A loop with a host stage."""

    def init(self, key, env, envs):
        return jnp.zeros(envs)

    def tick(self, env, state):
        return add(state), {}


@shoal.host(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), per="env")
def add(x):
    return x + 1


def test_a_plan_with_host_stages_is_rejected(tmp_path):
    plan = shoal.plan(shoal.trace(InPython(), envs=2), shoal.fused(), ONE)
    with pytest.raises(CutError, match="host stages can't be saved: `add`"):
        save_plan(plan, tmp_path / "plan.shoal")
