"""Several agents by several policies: whatever the cut, the fused program's numbers."""

from functools import cache

import pytest

import shoal
from laws.cases import FOUR, ONE
from laws.differences import difference
from laws.herd import herd
from shoal.algorithms import MAPPO, QMIX

TICKS, ENVS, TOLERANCE = 4, 4, 1e-5
SMALL = {
    "num_steps": 8,
    "update_epochs": 2,
    "num_minibatches": 2,
    "hidden": (8,),
    "learning_rate": 0.01,
}
TABLE = (("dog*", "shepherd"), ("*", "prey"))
# The ring is full after three ticks; nothing is learnt before the second.
REPLAY = {
    "num_steps": 4,
    "batch_size_per_env": 2,
    "samples_per_insert": 2.0,
    "learning_starts_per_env": 2,
    "buffer_size_per_env": 3,
}
WIDTHS = {"one_team": True, "memory_width": 8, "mixer_width": 4, "mixer_hidden": 8}
LOOPS = {
    "qmix": QMIX(
        **REPLAY,
        **WIDTHS,
        learning_rate=0.01,
        target_update_interval=2,
        td_lambda=0.5,
    ),
    "mappo": MAPPO(**SMALL, policies=TABLE),
    "mappo, gru": MAPPO(**SMALL, policies=TABLE, memory="gru", memory_width=8, sequence_length=4),
}
POLICIES = {
    "fused(2)": shoal.fused(2),
    "single_learner_coarse(2)": shoal.single_learner_coarse(2),
    "single_learner_fine(2)": shoal.single_learner_fine(2),
    "environments(2)": shoal.environments(2),
    "multi_learner(2)": shoal.multi_learner(2),
    "central(2)": shoal.central(2),
    "decoupled(2,1,1)": shoal.decoupled(2, 1, 1),
    "ape_x(2)": shoal.ape_x(2),
}
slow = pytest.mark.slow
CELLS = [
    *[("mappo", policy) for policy in POLICIES if policy != "ape_x(2)"],
    ("mappo, gru", "single_learner_coarse(2)"),
    *[("qmix", policy) for policy in POLICIES],
]


@cache
def graph_of(loop):
    return shoal.trace(LOOPS[loop], herd(), envs=ENVS)


@cache
def start_of(loop):
    return graph_of(loop).origin.start(0, ENVS)


def after(loop, policy, backend, cluster=FOUR):
    plan = shoal.plan(graph_of(loop), policy, cluster)
    return shoal.run(plan, backend, ticks=TICKS, state=start_of(loop)).values


@cache
def fused(loop):
    return after(loop, shoal.fused(), "inline", ONE)


def largest(got, wanted):
    assert got.keys() == wanted.keys()
    return max(difference(got[name], wanted[name]) for name in wanted)


QUICK = ("single_learner_coarse(2)",)


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        pytest.param(*cell, marks=() if cell[1] in QUICK and cell[0] == "mappo" else slow)
        for cell in CELLS
    ],
)
def test_every_cut_gives_the_fused_numbers(loop, name):
    inline = after(loop, POLICIES[name], "inline")
    assert largest(inline, fused(loop)) < TOLERANCE
    assert largest(after(loop, POLICIES[name], "threads"), inline) == 0
