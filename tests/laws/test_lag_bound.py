"""However slow anyone is, nothing is used later than its bound, and nobody waits for ever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planning.policy import Queue
from shoal.runtime.fire import Gate, Ledger, choose

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
            + ([("use", chosen)] if chosen else [])
            + ([("publish", None)] if newest < tick else [])
        )
        assert moves, "everybody waits"
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
