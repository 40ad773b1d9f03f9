"""Whatever the loop and the cut: either the planner refuses, or the numbers are the loop's."""

from collections import Counter

import pytest

from laws.check_loops import FAILED, check

LOOPS, AT_ONCE = 100, 10


@pytest.mark.parametrize("first", range(0, LOOPS, AT_ONCE))
def test_a_cut_of_any_loop_is_refused_or_right(first):
    found = [check(seed) for seed in range(first, first + AT_ONCE)]
    assert not [verdict for verdict in found if verdict.outcome in FAILED]
    assert {verdict.outcome for verdict in found} & {"right", "planned"}


@pytest.mark.slow
def test_cuts_of_many_loops_are_refused_or_right_and_few_are_refused_without_a_reason():
    found = [check(seed) for seed in range(LOOPS, LOOPS + 600)]
    fared = Counter(verdict.outcome for verdict in found)
    assert not [verdict for verdict in found if verdict.outcome in FAILED]
    assert fared["right"] > 200
    assert fared["unjust"] < 60
