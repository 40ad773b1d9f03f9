"""Where glue runs: a move's price is the whole's new cost, and no placement of all costs less."""

from collections import Counter
from itertools import combinations, product
from random import Random

import pytest

import shoal
from laws.random_loops import Author
from shoal.graph.ir import Stage
from shoal.graph.rules import check_graph
from shoal.planning.assign import assign_stages
from shoal.planning.glue import first_stage, place_glue
from shoal.planning.homes import Sites, crossings
from shoal.planning.plan import split_loops
from shoal.planning.prices import Ledger, make_prices

MOST = 3000  # placements that all can be tried of


def drawn(seed):
    """A loop's sites, where its stages are, and the cut; None where there is no choice."""
    author = Author(seed)
    loop = author.loop()
    cut = author.drawn(loop)
    if len(cut.fragments) == 1:
        return None
    try:
        graph = check_graph(shoal.trace(loop, envs=author.envs))
        opened, stages = assign_stages(graph, cut)
    except shoal.ShoalError:
        return None
    return Sites(opened, split_loops(opened, stages)), stages, cut


def cost(sites, homes, distribution):
    """The total cost of all values that cross and all sites."""
    prices = make_prices(sites, homes, distribution)
    crossing = crossings(sites, homes).items()
    total = sum(prices.of_value(v, [reader], writer, homes) for (reader, v), writer in crossing)
    return total + sum(prices.of_site(node, homes) for node in sites.nodes.values())


def free_sites(sites):
    """Sites that may run anywhere."""
    return [n.name for n in sites.nodes.values() if not isinstance(n, Stage) and not first_stage(n)]


def ways(names):
    """Every set of homes that a site may have."""
    sizes = range(1, len(names) + 1)
    return [frozenset(some) for size in sizes for some in combinations(sorted(names), size)]


def moves_of(free, cut, random):
    """A few moves of a few sites to any homes."""
    anywhere = ways([f.name for f in cut.fragments])
    for _ in range(random.randint(0, 6)):
        moved = random.sample(free, random.randint(1, min(4, len(free))))
        yield {site: random.choice(anywhere) for site in moved}


@pytest.mark.parametrize("seed", range(25))
def test_the_price_of_a_move_is_what_all_would_cost_then(seed):
    if not (found := drawn(seed)):
        return
    sites, stages, cut = found
    homes, free = place_glue(sites, stages, cut), free_sites(sites)
    ledger = Ledger(make_prices(sites, homes, cut), homes)
    assert ledger.total == cost(sites, homes, cut)
    for move in moves_of(free, cut, Random(seed)) if free else ():
        wanted = cost(sites, {**ledger.homes, **move}, cut)
        assert ledger.price(move) == wanted
        ledger.take(move)
        assert ledger.total == wanted == cost(sites, ledger.homes, cut)


def compare_with_all(examples):
    """How the search fares against trying all there is, where that can be done."""
    fared = Counter()

    for seed in range(examples):
        if not (found := drawn(seed)):
            continue
        sites, stages, cut = found
        free, where = free_sites(sites), ways([f.name for f in cut.fragments])
        if len(where) ** len(free) > MOST:
            continue
        homes = place_glue(sites, stages, cut)
        least = min(
            cost(sites, {**homes, **dict(zip(free, each, strict=True))}, cut)
            for each in product(where, repeat=len(free))
        )
        fared["best" if cost(sites, homes, cut) == least else "worse"] += 1
    return fared


def test_no_placement_of_all_there_are_costs_less():
    fared = compare_with_all(60)
    assert fared["best"] > 5
    assert not fared["worse"]


@pytest.mark.slow
def test_of_many_hardly_any_placement_is_not_the_best():
    fared = compare_with_all(600)
    assert fared["best"] > 50 * fared["worse"]
