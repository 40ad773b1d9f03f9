"""Every algorithm under every distribution policy on every backend: what is tried, and how.

One entry an algorithm and one a distribution policy: tiny settings, so that a cell takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

import shoal
from laws.cases import ENVS, ONE
from laws.differences import difference
from laws.herd import herd
from shoal.algorithms import ALGORITHMS
from shoal.errors import ShoalError
from shoal.planning.policies import POLICIES
from shoal.planning.policy import Latest, lag_of
from shoal.runtime.debug.reference import run_reference

TICKS, TOLERANCE = 4, 1e-4
BACKENDS = ("inline", "threads", "processes")

SMALL = {"num_steps": 4, "hidden": (4,), "learning_rate": 0.01}
EPOCHS = {"update_epochs": 1, "num_minibatches": 2}
REPLAY = {
    "batch_size_per_env": 2,
    "samples_per_insert": 2.0,
    "learning_starts_per_env": 4,
    "buffer_size_per_env": 12,
}
TEAMS = {"policies": (("dog*", "shepherd"), ("*", "prey"))}
MIXED = {
    "num_steps": 4,
    "batch_size_per_env": 2,
    "samples_per_insert": 2.0,
    "learning_starts_per_env": 1,
    "buffer_size_per_env": 3,
}
MIXED |= {
    "one_team": True,
    "memory_width": 4,
    "mixer_width": 4,
    "mixer_hidden": 4,
    "target_update_interval": 2,
}
SEQUENCES = {
    "batch_size_per_env": 1,
    "samples_per_insert": 2.0,
    "burn_in": 4,
    "sequence_length": 8,
    "n_step": 3,
}
SEQUENCES |= {
    "learning_starts_per_env": 12,
    "buffer_size_per_env": 24,
    "memory_width": 4,
    "target_update_interval": 2,
}
FEW = {"target_update_interval": 2, "epsilon_ticks": 4, "priority_exponent": 0.6}


def cartpole() -> Any:
    """A choice of two."""
    return shoal.envs.make("CartPole-v1")


def pendulum() -> Any:
    """A real number to choose."""
    return shoal.envs.make("Pendulum-v1", max_steps_in_episode=6)


# The settings of each algorithm, and where it is tried.
TRIED: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "a2c": (SMALL, cartpole),
    "ddpg": (SMALL | REPLAY, pendulum),
    "dqn": (SMALL | REPLAY | FEW, cartpole),
    "impala": (SMALL, cartpole),
    "ippo": (SMALL | EPOCHS | TEAMS, herd),
    "mappo": (SMALL | EPOCHS | TEAMS, herd),
    "ppo": (SMALL | EPOCHS, cartpole),
    "qmix": (MIXED | TEAMS, herd),
    "r2d2": (SMALL | SEQUENCES, cartpole),
    "sac": (SMALL | REPLAY, pendulum),
    "td3": (SMALL | REPLAY, pendulum),
    "vdn": (MIXED | TEAMS, herd),
}
# Each distribution policy, and those of its forms that run otherwise.
FORMS: dict[str, dict[str, int]] = {
    "fused": {},
    "fused, devices=2": {"devices": 2},
    "single_learner_coarse": {},
    "single_learner_coarse, lag=1": {"lag": 1},
    "single_learner_fine": {},
    "single_learner_fine, ring=2": {"ring": 2},
    "environments": {},
    "impala": {},
    "multi_learner": {},
    "central": {},
    "central, max_lag=1": {"max_lag": 1},
    "decoupled": {},
    "decoupled, ring=2": {"ring": 2},
    "sebulba": {},
    "ape_x": {},
    "ape_x, max_lag=1": {"max_lag": 1},
}


@dataclass(frozen=True)
class Verdict:
    """What came of a cell: its sign on the page, and if it doesn't fit, why."""

    sign: str
    why: str = ""


SAME, DELAYED, RUNS, NOT_RUN = (Verdict(sign) for sign in ("=", "≙", "~", "·"))


def policy_of(form: str) -> Any:
    """The distribution policy in one of its forms."""
    return POLICIES[form.partition(",")[0]](**FORMS[form])


@cache
def graph_of(algorithm: str) -> Any:
    """The loop of an algorithm, traced once."""
    settings, world = TRIED[algorithm]
    return shoal.trace(ALGORITHMS[algorithm](**settings), world(), envs=ENVS)


@cache
def start_of(algorithm: str) -> Any:
    """What every run of it starts from."""
    return graph_of(algorithm).origin.start(0, ENVS)


@cache
def fused(algorithm: str) -> dict[str, Any]:
    """What one program computes."""
    plan = shoal.plan(graph_of(algorithm), shoal.fused(), ONE)
    return shoal.run(plan, "inline", ticks=TICKS, state=start_of(algorithm)).values


@cache
def fitting(algorithm: str, form: str) -> Any:
    """The plan of a cell, or the verdict that there is none."""
    try:
        return shoal.plan(graph_of(algorithm), policy_of(form), ONE)
    except ShoalError as error:
        return Verdict("", error.what)


@cache
def expected(algorithm: str, form: str) -> Verdict:
    """The verdict that a cell must come to, from its plan alone."""
    plan = fitting(algorithm, form)
    if isinstance(plan, Verdict):
        return plan
    if depends_on_timing(plan):
        return RUNS
    return DELAYED if any(lag_of(c.flow) for c in plan.channels) else SAME


def depends_on_timing(plan: Any) -> bool:
    """Whether there are no exact numbers: who comes first matters, or how new the newest is."""
    return bool(plan.asynchronous) or any(is_news(c.flow) for c in plan.channels)


def is_news(flow: Any) -> bool:
    """Whether a reader sees the newest, however old."""
    return isinstance(flow, Latest) and flow.max_lag != 0


def verdict(algorithm: str, form: str, backend: str) -> Verdict:
    """Run a cell and check it: the fused program's numbers, or the bounds that timing leaves."""
    wanted = expected(algorithm, form)
    if wanted.why:
        return wanted
    plan, lags = fitting(algorithm, form), []
    result = shoal.run(
        plan,
        backend,
        ticks=TICKS,
        state=start_of(algorithm),
        watch=lambda tick, metrics: lags.extend(metrics.get("lag", ())),
    )
    assert result.ticks == TICKS
    if wanted == RUNS:
        bounds = [c.flow.max_lag for c in plan.channels if is_news(c.flow)]
        assert max(lags, default=0) <= max(bounds, default=0), (max(lags), bounds)
        assert all(np.all(np.isfinite(x)) for x in numbers(result.values))
        return RUNS
    reference = fused(algorithm)
    if wanted == DELAYED:
        named = zip(plan.graph.inputs, jax.tree.leaves(start_of(algorithm)), strict=True)
        reference = run_reference(plan, dict(named), TICKS)
    largest = max(difference(result.values[name], x) for name, x in reference.items())
    assert largest <= TOLERANCE, f"{algorithm} under {form} on {backend} differs by {largest}"
    return wanted


def numbers(values: dict[str, Any]) -> list[Any]:
    """Carried real numbers, which must stay finite; infinities that mark nothing are left out."""
    return [x for x in values.values() if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
