"""A run that resumes from a snapshot equals the run that never stopped, to the bit."""

import pytest

import shoal
from laws.cases import FOUR, ONE, graph_of, no_gymnax, start_of
from laws.differences import difference
from shoal.runtime.channels.in_process import InProcessChannel
from shoal.runtime.execution.metrics import Collector
from shoal.runtime.run import RunCallbacks

TICKS, AT = 7, 3
PLANS = {
    "fused": (shoal.fused(), ONE, "threads"),
    "fused(2)": (shoal.fused(2), FOUR, "threads"),
    "coarse, in turn": (shoal.single_learner_coarse(2), ONE, "inline"),
    "coarse": (shoal.single_learner_coarse(2), ONE, "threads"),
    "coarse, lag 2": (shoal.single_learner_coarse(2, lag=2), ONE, "threads"),
    "served": (shoal.single_learner_fine(2, ring=2), ONE, "threads"),
    "decoupled, lag 1": (shoal.decoupled(2, 1, 1, lag=1), ONE, "inline"),
    "coarse, processes, lag 1": (shoal.single_learner_coarse(2, lag=1), ONE, "processes"),
}


def run(loop, name, ticks=TICKS, start=None, at=None):
    """The end of a run, its metrics, and the snapshots that were taken of it."""
    distribution, cluster, backend = PLANS[name]
    seen, taken = [], []

    def due(tick):
        return at if not taken else None

    def keep(snapshot):
        assert snapshot.tick == seen[-1][0] + 1  # what came before it has been seen
        taken.append(snapshot)

    watch = RunCallbacks(lambda tick, metrics: seen.append((tick, metrics)), due, keep)
    plan = shoal.plan(graph_of(loop), distribution, cluster)
    state = start_of(loop) if start is None else start
    return shoal.run(plan, backend, ticks=ticks, state=state, watch=watch).snapshot, seen, taken


def check_same(got, wanted, tolerance=0.0):
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert difference(got[name], wanted[name]) <= tolerance, name


@pytest.mark.parametrize(
    ("loop", "name"),
    [*(("chase", name) for name in PLANS)]
    + [pytest.param("ppo", name, marks=no_gymnax) for name in ("fused", "coarse, lag 2")],
)
def test_from_a_snapshot_the_rest_is_as_it_was(loop, name):
    # How many are served at once, and so how their sums are added up, depends on who comes when.
    tolerance = 1e-5 if name == "served" else 0.0
    end, seen, (taken,) = run(loop, name, at=AT)
    assert taken.tick == AT
    again, more, _ = run(loop, name, start=taken)
    check_same(again.values, end.values, tolerance)
    check_same(again.past, end.past, tolerance)
    assert [tick for tick, _ in more] == list(range(taken.tick, TICKS))
    for (_, got), (_, wanted) in zip(more, seen[taken.tick :], strict=True):
        check_same(got, wanted, tolerance)


def test_lags_are_reported_as_if_the_run_had_not_stopped():
    _, seen, (taken,) = run("chase", "coarse, lag 2", at=1)
    _, more, _ = run("chase", "coarse, lag 2", start=taken)
    lags = [metrics["lag"].tolist() for _, metrics in (*seen[:1], *more)]
    assert lags == [metrics["lag"].tolist() for _, metrics in seen]
    assert [max(of_tick) for of_tick in lags] == [0, 1, 2, 2, 2, 2, 2]


def test_a_lagged_reader_sees_what_was_on_its_way():
    end, _, (taken,) = run("chase", "coarse, lag 2", at=AT)
    assert {name.rpartition("@")[2] for name in taken.past} == {"1", "2"}
    forgot, *_ = run("chase", "coarse, lag 2", start=type(taken)(taken.tick, taken.values))
    with pytest.raises(AssertionError):
        check_same(forgot.values, end.values)


@pytest.mark.parametrize("name", ["fused", "coarse, lag 2", "served"])
def test_a_snapshot_resumes_under_any_plan(name):
    wanted, *_ = run("chase", "coarse")
    _, _, (taken,) = run("chase", name, at=AT)
    for other in ("fused", "coarse", "served"):
        end, seen, _ = run("chase", other, start=taken)
        if "lag" not in name:
            check_same(end.values, wanted.values, 1e-5)
        assert end.tick == TICKS
        assert [tick for tick, _ in seen] == list(range(taken.tick, TICKS))


class Enough(Exception):
    pass


@pytest.mark.parametrize("backend", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_asynchronous_endpoints_give_their_newest_state(backend):
    taken, plan = [], shoal.plan(graph_of("chase"), shoal.impala(2), ONE)

    def keep(snapshot):
        taken.append(snapshot)
        raise Enough

    watch = RunCallbacks(lambda tick, metrics: None, lambda tick: AT, keep)
    with pytest.raises(Enough):
        shoal.run(plan, backend, ticks=10**9, watch=watch)
    assert taken[0].tick == AT
    assert shoal.run(plan, backend, ticks=AT + 3, state=taken[0]).ticks == AT + 3


def test_what_a_tick_begins_with_sending_is_sent_before_copies_are_made(monkeypatch):
    happened = []
    put, keep = InProcessChannel.put, Collector.keep

    def put_noted(channel, end, *args):
        happened.append((channel.state.spec.gate.writer, "put"))
        put(channel, end, *args)

    def keep_noted(collector, worker):
        happened.append((worker.replica[0], "keep"))
        keep(collector, worker)

    monkeypatch.setattr(InProcessChannel, "put", put_noted)
    monkeypatch.setattr(Collector, "keep", keep_noted)
    run("chase", "coarse, in turn", ticks=1)
    assert [what for name, what in happened if name == "learner"][:2] == ["put", "keep"]
