"""Replay in the loop: the fused numbers wherever it is, and learning that keeps pace with steps."""

from functools import cache

import jax
import numpy as np
import pytest

import shoal
from laws.cases import FOUR, ONE, graph_of, start_of
from laws.differences import difference
from shoal.runtime.debug.reference import run_reference
from shoal.runtime.debug.verify import verify_plan

pytest.importorskip("gymnax")

TICKS, TOLERANCE = 8, 1e-5
POLICIES = {
    "coarse(2)": shoal.single_learner_coarse(2),
    "fine(2), ring": shoal.single_learner_fine(2, ring=2),
    "multi_learner(2)": shoal.multi_learner(2),
    "central(2)": shoal.central(2),
    "decoupled(2,2,2)": shoal.decoupled(2, 2, 2),
    "ape_x(2)": shoal.ape_x(2),
}
OTHERS = {"fused": shoal.fused(), "asynchronous": shoal.ape_x(2, max_lag=2)}
QUICK = ("coarse(2)", "multi_learner(2)", "ape_x(2)", *OTHERS)
CELLS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*POLICIES, *OTHERS)
]


@cache
def ran(name, loop="dqn"):
    """What a run under the distribution policy of that name leaves."""
    plan = shoal.plan(graph_of(loop), (POLICIES | OTHERS)[name], FOUR)
    return shoal.run(plan, "threads", ticks=TICKS, state=start_of(loop))


def largest(got, wanted):
    return max(difference(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", [cell for cell in CELLS if cell.values[0] in POLICIES])
def test_wherever_replay_is_kept_the_numbers_are_the_fused_program_s(name):
    assert largest(ran(name).values, ran("fused").values) < TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["central(2)", "ape_x(2)"])
def test_sequences_with_what_was_remembered_give_the_fused_program_s_numbers(name):
    assert largest(ran(name, "r2d2").values, ran("fused", "r2d2").values) < TOLERANCE
    assert int(ran(name, "r2d2").state.learner.updates) == 2 * (TICKS - 3)


def test_replay_in_a_process_of_its_own_gives_the_fused_numbers():
    plan = shoal.plan(graph_of("dqn"), shoal.ape_x(2), ONE)
    assert verify_plan(plan, "processes", ticks=TICKS, state=start_of("dqn")).holds


def test_with_a_lag_replay_draws_before_it_receives_new_priorities():
    plan = shoal.plan(graph_of("dqn"), shoal.ape_x(2, lag=1), ONE)
    names, state = graph_of("dqn").inputs, start_of("dqn")
    wanted = run_reference(plan, dict(zip(names, jax.tree.leaves(state), strict=True)), TICKS)
    got = shoal.run(plan, "threads", ticks=TICKS, state=state)
    assert largest(got.values, wanted) < TOLERANCE
    assert largest(got.values, ran("fused").values) > 100 * TOLERANCE


@pytest.mark.parametrize("name", CELLS)
def test_so_many_samples_are_learnt_from_an_insert_once_there_are_enough(name):
    algorithm, state = graph_of("dqn").origin.algorithm, ran(name).state
    steps = TICKS * algorithm.num_steps
    assert np.all(np.asarray(state.buffer.ring.added) == steps)
    # Ticks that begin to learn with `min_size` steps there, or more.
    learning = sum(
        (t + 1) * algorithm.num_steps >= algorithm.learning_starts_per_env for t in range(TICKS)
    )
    assert 0 < learning < TICKS
    samples = int(state.learner.updates) * algorithm.batch_size_per_env
    assert samples == learning * algorithm.num_steps * algorithm.samples_per_insert
    # The optimiser has counted no more than that.
    counts = [x for x in jax.tree.leaves(state.learner.opt_state) if np.ndim(x) == 0]
    assert all(int(count) == int(state.learner.updates) for count in counts)


def test_taking_the_first_to_arrive_is_refused_for_replay():
    with pytest.raises(shoal.ShoalError, match="has a row for every environment") as error:
        shoal.plan(graph_of("dqn"), shoal.impala(2), ONE)
    assert "ape_x" in str(error.value)


def test_a_loop_without_replay_is_refused_by_ape_x():
    with pytest.raises(
        shoal.ShoalError, match=r"looks for a stage `replay\*`, and the loop has none"
    ):
        shoal.plan(graph_of("chase"), shoal.ape_x(2), ONE)
