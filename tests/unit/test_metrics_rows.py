"""The rows of metrics have the right values, and a run that ends in NaN has failed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.errors import NotFiniteError
from shoal.runs.files.records import scalars
from unit.toy_loop import TWO_CPUS, Toy, plain


def test_a_row_has_the_means_of_the_episodes_that_ended_in_it():
    metrics = {"episodes": np.array([2.0, 1.0]), "episode_return": np.array([10.0, 5.0])}
    metrics |= {"episode_length": np.array([6.0, 3.0]), "loss": np.array(0.5)}
    expected = {"episodes": 3, "episode_return": 5, "episode_length": 3, "loss": 0.5}
    assert scalars(metrics) == expected
    none = scalars({name: 0 * x for name, x in metrics.items()})
    assert (none["episodes"], none["episode_return"], none["episode_length"]) == (0, None, None)


def spoilt(state):
    """A tick with finite metrics and a state that is NaN."""
    state, _ = plain(state)
    return state._replace(w=state.w * jnp.nan), {"loss": jnp.float32(1)}


def test_a_run_whose_state_is_nan_fails_though_no_metric_shows_it(tmp_path):
    how = {"ticks": 3, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path, "name": "run"}
    with pytest.raises(NotFiniteError, match="`w` is NaN after tick 2"):
        shoal.train(Toy(spoilt), None, **how)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"


def test_seconds_are_those_of_the_whole_run_also_after_a_resume(tmp_path):
    how = {"ticks": 3, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path}
    first = shoal.train(Toy(plain), None, **how)
    again = shoal.resume(first.folder, ticks=6, algorithm=Toy(plain), cluster=TWO_CPUS)
    rows = [json.loads(row) for row in (first.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert again.summary["seconds"] >= rows[-1]["seconds"] - 1e-3
