"""The examples run, and keep their numbers under distribution policies."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.runs.inputs.recipes import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = load_file(EXAMPLES / "ppo.py")


@pytest.mark.parametrize(
    "policy",
    [shoal.single_learner_coarse(2), shoal.multi_learner(2), shoal.fused(2)],
    ids=lambda policy: policy.name,
)
def test_the_plain_ppo_has_one_meaning_however_it_is_cut(policy):
    pytest.importorskip("gymnax")
    from shoal.envs import make

    tiny = PLAIN.PPO(num_steps=8, num_minibatches=2, update_epochs=2, hidden=4)
    env = make("CartPole-v1")
    found = shoal.verify(tiny, env, policy, envs=4, ticks=2)
    assert found.holds, str(found)


def test_the_plain_ppo_s_advantages_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(3, 6, 2)).astype(np.float32)
    terminated, truncated = rng.random((2, 6, 2)) < 0.3
    ppo, wanted, after = PLAIN.PPO(), np.zeros((6, 2)), np.zeros(2)
    for t in reversed(range(6)):
        delta = reward[t] + ppo.gamma * np.where(terminated[t], 0, next_value[t]) - value[t]
        after = delta + ppo.gamma * ppo.gae_lambda * after * ~(terminated[t] | truncated[t])
        wanted[t] = after
    none = jnp.zeros(0)
    rollout = PLAIN.Rollout(none, none, none, reward, terminated, truncated, none)
    found = ppo.gae(jax.tree.map(jnp.asarray, rollout), value, next_value)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["cut_a_loop", pytest.param("train_and_compare", marks=pytest.mark.slow)]
)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    pytest.importorskip("gymnax")
    monkeypatch.chdir(tmp_path)
    notebook = EXAMPLES / f"{name}.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(not cell.get("outputs") for cell in cells)
    names = {"__name__": notebook.stem}
    for number, cell in enumerate(code):
        file = tmp_path / f"{notebook.stem}-{number}.py"
        file.write_text(cell)
        exec(compile(cell, str(file), "exec"), names)
