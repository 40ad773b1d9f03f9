"""No value is used with more lag than its bound, and no replica waits for ever."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.planning.channel_specs import Gate
from shoal.planning.policy import Queue
from shoal.runtime.channels.flow_control import Ledger, choose

LAW = settings(max_examples=300, deadline=None, derandomize=True)


@LAW
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_turns_are_used_within_their_bound_in_any_order_of_events(ends, take, bound, random):
    take = min(take, ends)
    admits = take * (bound + 1) // ends
    if admits == 0:
        return  # a plan that leaves a replica no turn is refused
    gate = Gate("q", "actor", "learner", ((),), Queue(8, take), 8, admits, bound)
    ledger = Ledger([0] * ends, [0] * ends, [0] * ends, [0] * (ends * 8), 8)
    arrived, begun = {}, {}
    tick, newest, clock = 0, 0, 0
    while tick < 12:
        clock += 1
        can_begin = [e for e in range(ends) if ledger.begun[e] - ledger.settled[e] < admits]
        on_the_way = {t: v for t, v in begun.items() if t not in arrived}
        first_of = {}
        for end, number in sorted(on_the_way):
            first_of.setdefault(end, (end, number))
        chosen = choose(gate, ledger, tick, arrived) if newest == tick else None
        moves = (
            [("begin", e) for e in can_begin if e not in first_of]
            + [("arrive", t) for t in first_of.values()]
            + ([("use", chosen)] if isinstance(chosen, list) else [])
            + ([("publish", None)] if newest < tick else [])
        )
        assert moves, "deadlock"
        kind, what = random.choice(moves)
        if kind == "begin":
            begun[what, ledger.begun[what]] = newest
            ledger.begin(what, newest)
        elif kind == "publish":
            newest = tick
            ledger.settle()
        elif kind == "arrive":
            arrived[what] = clock
        else:
            assert len(what) == take
            for end, number in what:
                assert tick - begun.pop((end, number)) <= bound
                del arrived[end, number]
                assert number == ledger.used[end], "out of order"
                ledger.used[end] += 1
            tick += 1


class Late:
    """A loop whose learner numbers its versions; what acts says which one it acted with."""

    def init(self, key, env, envs):
        return {"version": jnp.int32(0), "x": jnp.zeros(envs)}

    def tick(self, env, state):
        x, made_with = self.act(state["x"], version=state["version"])
        version, late = self.learn(state["version"], made_with)
        return {"version": version, "x": x}, {"late": late}

    @shoal.stage(per="env")
    def act(self, x, *, version):
        return x + 1.0, version

    @shoal.stage
    def learn(self, version, made_with):
        return version + 1, jnp.max(version - made_with)


@pytest.mark.parametrize("backend", ["inline", "threads"])
@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        (shoal.single_learner_coarse(2), 0),
        (shoal.single_learner_coarse(2, lag=2), 2),
        (shoal.impala(4, 2, 3), 3),
    ],
    ids=["lockstep", "lag 2", "impala"],
)
def test_the_learner_sees_its_lag_as_a_value_and_it_is_the_one_measured(policy, bound, backend):
    plan = shoal.plan(shoal.trace(Late(), envs=8), policy)
    seen = []
    shoal.run(plan, backend, ticks=12, watch=lambda _, metrics: seen.append(metrics))
    assert max(int(m["late"]) for m in seen) <= bound
    for metrics in seen:
        if "lag" in metrics:
            assert int(metrics["late"]) == max(metrics["lag"])
    if policy.name == "single_learner_coarse":
        assert [int(m["late"]) for m in seen] == [min(t, bound) for t in range(12)]
