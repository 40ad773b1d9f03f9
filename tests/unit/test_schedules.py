"""The learning rate follows the run's real length, however that is set, and the run records it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.algorithms import A2C, PPO
from shoal.cli.main import main
from shoal.errors import SettingError
from shoal.rl.optimise import clipped_rmsprop

pytest.importorskip("gymnax")
RATE = 3e-3  # of A2C's preset for CartPole


def run(tmp_path, *words):
    """The summary and the learning rate of every tick after a command."""
    assert main([*words]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return summary["learning_rate"], [row["learning_rate"] for row in rows]


def falling(ticks, over, first=0, rate=RATE):
    return pytest.approx([rate * (1 - tick / over) for tick in range(first, ticks)], rel=1e-3)


def train(tmp_path, *words):
    where = ["--folder", str(tmp_path / "runs"), "--ticks", "4"]
    return run(tmp_path, "train", "a2c", "CartPole-v1", *where, *words)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ([], RATE),
        (["--set", "gamma=0.9"], RATE),
        (["--set", "learning_rate=1e-2"], 1e-2),
        (["--envs", "4", "--env-set", "max_steps_in_episode=50"], RATE),
    ],
    ids=["as it is", "another setting", "another rate", "another environment"],
)
def test_a_presets_schedule_ends_with_the_run(tmp_path, words, rate):
    recorded, seen = train(tmp_path, *words)
    assert recorded == {"initial": rate, "final": 0.0, "total_ticks": 4}
    assert seen == falling(4, 4, rate=rate)


def test_a_constant_rate_does_not_depend_on_the_length_of_the_run(tmp_path):
    recorded, seen = train(tmp_path, "--set", "anneal_lr=False")
    assert recorded == {"initial": RATE, "final": RATE}
    assert seen == pytest.approx([RATE] * 4)


def test_an_extended_run_reports_it_and_keeps_learning(tmp_path, capsys):
    train(tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    recorded, seen = run(tmp_path, "resume", str(folder), "--ticks", "8")
    assert "now does by tick 8: it continues at 50% of its initial value" in capsys.readouterr().out
    extended = [{"tick": 4, "from_ticks": 4, "to_ticks": 8}]
    assert recorded == {"initial": RATE, "final": 0.0, "total_ticks": 8, "extended": extended}
    assert seen[4:] == falling(8, 8, 4)
    recorded, seen = run(tmp_path, "resume", str(folder), "--ticks", "10")
    more = {"tick": 8, "from_ticks": 8, "to_ticks": 10}
    assert recorded["extended"] == [*extended, more]
    assert seen[8:] == falling(10, 10, 8)


def test_a_schedule_of_another_length_than_the_run_is_rejected():
    algorithm = A2C(anneal_lr=True, total_ticks=5)
    with pytest.raises(SettingError, match="total_ticks=5 of A2C, and the run has 7 ticks"):
        shoal.train(algorithm, "CartPole-v1", ticks=7)


def test_a_schedule_of_unknown_length_is_rejected():
    with pytest.raises(SettingError, match="anneals its learning rate over a run of unknown"):
        shoal.trace(PPO(anneal_lr=True), shoal.envs.make("CartPole-v1"), envs=4)


def test_rmsprop_starts_with_steps_no_larger_than_its_rate():
    rule = clipped_rmsprop(0.5, max_grad_norm=100.0)
    grad = jnp.array([1e-2, -2.0])
    updates, _ = rule.update(grad, rule.init(jnp.zeros(2)))
    wanted = -0.5 * grad / jnp.sqrt(grad**2 + 1e-5)
    np.testing.assert_allclose(updates, wanted, rtol=1e-4)
