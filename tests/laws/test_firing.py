"""Who may go on: nothing is taken before it is put, nothing overflows, and being stuck is told."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.channels import pieces
from shoal.runtime.fire import Did, Ended, Fire, Gate, State, Stuck, Wants, on_event


@st.composite
def meetings(draw):
    """A gate, and an order in which its ends come to it (each as often as there is to move)."""
    writers, readers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    some = st.lists(st.integers(0, writers - 1), min_size=1, unique=True).map(sorted)
    sources = tuple(tuple(draw(some)) for _ in range(readers))
    lag = draw(st.integers(0, 2))
    gate = Gate("c", "w", "r", sources, lag, lag + draw(st.integers(1, 3)))
    ticks = draw(st.integers(1, 5))
    ends = [("w", i) for i in range(writers)] + [("r", i) for i in range(readers)]
    return gate, ticks, ends, draw(st.randoms(use_true_random=False))


def carry_out(gate, ticks, ends, random):
    """Run the machine as a backend would, with ends coming in any order; yields every move."""
    state = State({"c": gate}, frozenset(ends))
    left = dict.fromkeys(ends, ticks)
    free, fired, waiting = set(ends), set(), set()
    while free or fired:
        replica = random.choice(sorted(free | fired))
        takes = replica[0] == "r"
        if replica in fired:
            fired.discard(replica)
            left[replica] -= 1
            state, actions = on_event(state, Did(replica, "c", takes))
            yield replica, state
            free.add(replica)
        elif left[replica]:
            free.discard(replica)
            state, actions = on_event(state, Wants(replica, "c", takes))
            waiting.add(replica)
        else:
            free.discard(replica)
            state, actions = on_event(state, Ended(replica))
        for action in actions:
            assert not isinstance(action, Stuck)
            assert action.replica in waiting, "fired without a wish, or twice for one"
            waiting.discard(action.replica)
            fired.add(action.replica)
    assert not waiting
    assert not any(left.values())


@given(meetings())
def test_every_message_is_put_before_it_is_taken_and_none_overflows(meeting):
    gate, *_ = meeting
    for _, state in carry_out(*meeting):
        for reader, sources in enumerate(gate.sources):
            taken = state.takes.get(("c", reader), 0)
            for writer in sources:
                put = state.puts.get(("c", writer), 0) + gate.lag
                assert 0 <= put - taken <= gate.capacity


def test_a_reader_waits_for_its_writer():
    state = State({"c": Gate("c", "w", "r", ((0,),), 0, 1)}, frozenset({("w", 0), ("r", 0)}))
    state, actions = on_event(state, Wants(("r", 0), "c", takes=True))
    assert actions == ()
    state, actions = on_event(state, Wants(("w", 0), "c", takes=False))
    assert actions == (Fire(("w", 0)),)
    state, actions = on_event(state, Did(("w", 0), "c", takes=False))
    assert actions == (Fire(("r", 0)),)


def test_a_lagged_reader_does_not_wait():
    state = State({"c": Gate("c", "w", "r", ((0,),), 1, 3)}, frozenset({("w", 0), ("r", 0)}))
    _, actions = on_event(state, Wants(("r", 0), "c", takes=True))
    assert actions == (Fire(("r", 0)),)


def test_who_is_stuck_is_told():
    gates = {"c": Gate("c", "a", "b", ((0,),), 0, 1), "d": Gate("d", "b", "a", ((0,),), 0, 1)}
    state = State(gates, frozenset({("a", 0), ("b", 0)}))
    state, actions = on_event(state, Wants(("b", 0), "c", takes=True))
    assert actions == ()
    state, (stuck,) = on_event(state, Wants(("a", 0), "d", takes=True))
    assert isinstance(stuck, Stuck)
    assert set(stuck.waits) == {"b[0] waits for a on c", "a[0] waits for b on d"}


def test_a_writer_that_ends_leaves_its_reader_stuck_not_silent():
    state = State({"c": Gate("c", "w", "r", ((0,),), 0, 1)}, frozenset({("w", 0), ("r", 0)}))
    state, _ = on_event(state, Wants(("r", 0), "c", takes=True))
    _, (stuck,) = on_event(state, Ended(("w", 0)))
    assert isinstance(stuck, Stuck)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_pieces_cover_every_row_once_and_in_order(writers, readers, times):
    rows = writers * readers * times
    wide, narrow = rows // writers, rows // readers
    for reader, cut in enumerate(pieces(rows, writers, readers)):
        held = [p.writer * wide + row for p in cut for row in range(p.start, p.stop)]
        assert held == list(range(reader * narrow, (reader + 1) * narrow))
