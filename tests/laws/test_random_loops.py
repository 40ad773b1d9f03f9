"""Whatever the loop and the cut: either the planner refuses, or the numbers are the loop's."""

from collections import Counter

import jax
import pytest

import shoal
from laws.check_loops import FAILED, Case, Search, acts_on_what_is_learnt, has_reason, verdicts
from laws.plain_loops import plain_loop
from laws.random_loops import FORMS, Author, Form
from laws.vocabulary import OPS

KINDS = pytest.mark.parametrize("kind", ["random", "plain"])


def fared(kind, seeds):
    """How loops fared, by outcome; none may be wrong or crash."""
    found = [*verdicts(seeds, 1, Search(kind))]
    assert not [verdict for verdict in found if verdict.outcome in FAILED]
    return Counter(verdict.outcome for verdict in found)


@KINDS
def test_a_cut_of_any_loop_is_refused_or_right(kind):
    assert fared(kind, range(30))["right"] > 8


@pytest.mark.slow
@KINDS
def test_cuts_of_many_loops_are_refused_or_right_and_few_are_refused_without_a_reason(kind):
    outcomes = fared(kind, range(30, 630))
    assert outcomes["right"] > 200
    assert outcomes["unjust"] < 90


def test_a_seed_writes_one_loop_and_its_cut():
    for seed in range(20):
        one, same = Author(seed), Author(seed)
        loop = one.loop()
        assert loop == same.loop()
        assert one.cut(loop) == same.cut(loop)
    assert len({Author(seed).loop() for seed in range(20)}) == 20


@pytest.mark.parametrize("envs", [1, 3])
def test_a_loop_is_plain_jax_for_any_number_of_environments(envs):
    refused = 0
    for seed in range(8):
        loop = Author(seed).loop()
        state = jax.eval_shape(lambda key, loop=loop: loop.init(key, None, envs), jax.random.key(0))
        try:
            after, _ = jax.eval_shape(lambda state, loop=loop: loop.tick(None, state), state)
        except shoal.ShoalError:  # an agreement inside a stage for one environment
            refused += 1
            continue
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state
        )
    assert refused <= 4


def test_every_operation_has_a_form():
    assert {form.op for form in FORMS} == {name for name in OPS if name[0] != "g"}


def case(op, kinds, place, policy):
    form = next(f for f in FORMS if f.op == op and f.reads == kinds)
    wrap = "features" if form.features else ""
    return Case(0, plain_loop(form, place, wrap), 8, policy, 1, "inline")


@pytest.mark.parametrize(
    ("op", "kinds", "place", "policy", "reason"),
    [
        ("b less the mean", ("rows",), "tick", shoal.fused(2), True),
        ("b less the mean", ("rows",), "batch", shoal.fused(2), True),
        ("b less the mean", ("rows",), "batch", shoal.single_learner_coarse(2), False),
        ("b less the mean", ("rows",), "tick", shoal.fused(3), True),
        ("b layers", ("rows",), "tick", shoal.fused(2), False),
        ("a learnt", ("rows", "whole"), "batch", shoal.fused(2), False),
        ("a learnt", ("vector", "vector"), "env", shoal.single_learner_coarse(2), True),
        ("a mean of a max", ("rows", "whole"), "batch", shoal.multi_learner(4), True),
        ("a mean of a max", ("vector", "vector"), "env", shoal.environments(2), True),
        ("v divided by the count", ("vector",), "env", shoal.environments(2), False),
        ("v divided by the count", ("vector",), "env", shoal.single_learner_coarse(2), True),
    ],
)
def test_a_cut_is_refused_for_a_reason_where_replicas_see_what_depends_on_their_rows(
    op, kinds, place, policy, reason
):
    assert has_reason(case(op, kinds, place, policy)) == reason


def test_an_actor_reads_what_was_learnt_also_through_what_is_derived_from_it():
    assert acts_on_what_is_learnt(plain_loop(Form("v tanh", ("rows",), ("rows",)), "tick", ""))
