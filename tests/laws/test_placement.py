"""Where glue runs: a move's price is the whole's new cost, and no placement of all costs less."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from laws.random_loops import ENVS, cuts, loops
from shoal.graph.ir import Stage
from shoal.graph.rules import check_graph
from shoal.planning.assign import assign_stages
from shoal.planning.glue import first_stage, place_glue
from shoal.planning.homes import Sites
from shoal.planning.plan import split_loops
from shoal.planning.prices import Ledger, cost, make_prices

MOST = 3000  # placements that all can be tried of


def sites_of(loop, cut):
    """What there is to place, and where stages are; None where the cut makes no sense."""
    try:
        opened, stages = assign_stages(check_graph(shoal.trace(loop, envs=ENVS)), cut)
    except shoal.ShoalError:
        return None
    return Sites(opened, split_loops(opened, stages)), stages


def free_sites(sites):
    """Sites that may run anywhere."""
    return [n.name for n in sites.nodes.values() if not isinstance(n, Stage) and not first_stage(n)]


def ways(names):
    """Every set of homes that a site may have."""
    sizes = range(1, len(names) + 1)
    return [frozenset(some) for size in sizes for some in combinations(sorted(names), size)]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_the_price_of_a_move_is_what_all_would_cost_then(data):
    loop = data.draw(loops())
    cut = data.draw(cuts(loop))
    if not (found := sites_of(loop, cut)):
        return
    sites, stages = found
    homes, free = place_glue(sites, stages, cut), free_sites(sites)
    ledger = Ledger(make_prices(sites, homes, cut), homes)
    assert ledger.total == cost(sites, homes, cut)
    if not free:
        return
    anywhere = st.sampled_from(ways([f.name for f in cut.fragments]))
    moves = st.dictionaries(st.sampled_from(free), anywhere, min_size=1, max_size=4)
    for move in data.draw(st.lists(moves, max_size=6)):
        wanted = cost(sites, {**ledger.homes, **move}, cut)
        assert ledger.price(move) == wanted
        ledger.take(move)
        assert ledger.total == wanted == cost(sites, ledger.homes, cut)


def compare_with_all(examples):
    """How the search fares against trying all there is, where that can be done."""
    fared = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.data())
    def law(data):
        loop = data.draw(loops())
        cut = data.draw(cuts(loop))
        if cut.onlookers or not (found := sites_of(loop, cut)):
            return
        sites, stages = found
        free, where = free_sites(sites), ways([f.name for f in cut.fragments])
        if len(where) ** len(free) > MOST or len(where) == 1:
            return
        homes = place_glue(sites, stages, cut)
        least = min(
            cost(sites, {**homes, **dict(zip(free, each, strict=True))}, cut)
            for each in product(where, repeat=len(free))
        )
        fared["best" if cost(sites, homes, cut) == least else "worse"] += 1

    law()
    return fared


def test_no_placement_of_all_there_are_costs_less():
    fared = compare_with_all(60)
    assert fared["best"] > 10
    assert not fared["worse"]


@pytest.mark.slow
def test_of_many_hardly_any_placement_is_not_the_best():
    fared = compare_with_all(600)
    assert fared["best"] > 50 * fared["worse"]
