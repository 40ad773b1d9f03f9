"""Carried values of the small types that NumPy alone doesn't know, over real processes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from conformance.small_moves import move_in_python
from laws.cases import ONE

slow = pytest.mark.slow
RARE = [pytest.param(kind, marks=slow) for kind in ("float8_e5m2", "int4")]
KINDS = ["bfloat16", "float8_e4m3fn", *RARE]
POLICY = shoal.single_learner_coarse(2)


@shoal.stage(per="env")
def move(x, *, w):
    return (x.astype(jnp.float32) + w.astype(jnp.float32)).astype(x.dtype)


stepped = shoal.host(lambda x, w: x, per="env", name="move")(move_in_python)


@shoal.stage
def fit(w, x):
    return (w.astype(jnp.float32) + 0.5 * x.astype(jnp.float32).mean(0)).astype(w.dtype)


@dataclass(frozen=True)
class Small:
    """A loop whose carried values, messages and metrics have one small type."""

    kind: str
    in_python: bool = False

    def init(self, key: Any, env: Any, envs: int) -> Any:
        return {"w": jnp.ones(3, self.kind), "x": jnp.ones((envs, 3), self.kind)}

    def tick(self, env: Any, state: Any) -> Any:
        before = state["x"]
        x = stepped(before, before) if self.in_python else move(before, w=state["w"])
        w = fit(state["w"], x)
        return {"w": w, "x": x}, {"w": w[0], "x": x[:, 0]}


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_carry_send_and_show_small_types(kind, in_python):
    plan = shoal.plan(shoal.trace(Small(kind, in_python), envs=4), POLICY, ONE)
    shown = {}
    runs = [
        shoal.run(plan, backend, ticks=3, watch=lambda t, m, b=backend: shown.setdefault((b, t), m))
        for backend in ("inline", "processes")
    ]
    for a, b in zip(*(jax.tree.leaves(run.state) for run in runs), strict=True):
        assert a.dtype == b.dtype == jnp.dtype(kind)
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    for tick in range(3):
        for name in ("w", "x"):
            one, other = (shown[b, tick][name] for b in ("inline", "processes"))
            assert one.dtype == other.dtype == jnp.dtype(kind)
            assert one.tolist() == other.tolist()


def test_a_run_of_small_types_resumes(tmp_path):
    where = {"backend": "processes", "cluster": ONE}
    half = shoal.train(Small("bfloat16"), None, POLICY, envs=4, ticks=2, folder=tmp_path, **where)
    ended = shoal.resume(half.folder, ticks=4, **where)
    plan = shoal.plan(shoal.trace(Small("bfloat16"), envs=4), POLICY, ONE)
    whole = shoal.run(plan, "inline", ticks=4)
    for a, b in zip(jax.tree.leaves(ended.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
