"""Who may go on: nothing is taken before it is put, nothing overflows, and being stuck is told."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.runtime.channels import pieces
from shoal.runtime.fire import Did, Ended, Fire, Gate, State, Stuck, Wants, on_event

LAW = settings(max_examples=200, deadline=None, derandomize=True)


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


@LAW
@given(meetings())
def test_every_message_is_put_before_it_is_taken_and_none_overflows(meeting):
    gate, *_ = meeting
    for _, state in carry_out(*meeting):
        for reader, sources in enumerate(gate.sources):
            taken = state.takes.get(("c", reader), 0)
            for writer in sources:
                put = state.puts.get(("c", writer), 0) + gate.lag
                assert 0 <= put - taken <= gate.capacity


@st.composite
def nets(draw):
    """Fragments with gates between them, each with its own order of moves, which may well block."""
    ends = {name: draw(st.integers(1, 2)) for name in "abc"}
    gates, moves = {}, {name: [] for name in ends}
    for name in range(draw(st.integers(1, 4))):
        writer, reader = draw(st.permutations(sorted(ends)))[:2]
        some = st.lists(st.integers(0, ends[writer] - 1), min_size=1, unique=True).map(sorted)
        sources = tuple(tuple(draw(some)) for _ in range(ends[reader]))
        lag = draw(st.integers(0, 1))
        gates[f"g{name}"] = Gate(f"g{name}", writer, reader, sources, lag, lag + 1)
        moves[writer].insert(draw(st.integers(0, len(moves[writer]))), (f"g{name}", False))
        moves[reader].insert(draw(st.integers(0, len(moves[reader]))), (f"g{name}", True))
    ticks = draw(st.integers(1, 3))
    return gates, {(n, i): moves[n] * ticks for n, count in ends.items() for i in range(count)}


@LAW
@given(nets(), st.randoms(use_true_random=False))
def test_stuck_is_said_exactly_when_all_who_have_not_ended_wait(net, random):
    gates, left = net
    state = State(gates, frozenset(left))
    free, fired, waiting, stuck = set(left), set(), set(), False
    while free or fired:
        replica = random.choice(sorted(free | fired))
        if replica in fired:
            fired.discard(replica)
            free.add(replica)
            event, left = Did(replica, *left[replica][0]), left | {replica: left[replica][1:]}
        else:
            free.discard(replica)
            event = Wants(replica, *left[replica][0]) if left[replica] else Ended(replica)
        waiting |= {replica} if isinstance(event, Wants) else set()
        state, actions = on_event(state, event)
        gone = {a.replica for a in actions if isinstance(a, Fire)}
        assert gone <= waiting, "fired without a wish, or twice for one"
        assert len(gone) == sum(isinstance(a, Fire) for a in actions)
        waiting, fired = waiting - gone, fired | gone
        for action in actions:
            if isinstance(action, Stuck):
                assert not free | fired
                assert len(action.waits) == len(waiting)
                stuck = True
    assert stuck == bool(waiting)


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


@LAW
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_pieces_cover_every_row_once_and_in_order(writers, readers, times):
    rows = writers * readers * times
    wide, narrow = rows // writers, rows // readers
    for reader, cut in enumerate(pieces(rows, writers, readers)):
        held = [p.writer * wide + row for p in cut for row in range(p.start, p.stop)]
        assert held == list(range(reader * narrow, (reader + 1) * narrow))
