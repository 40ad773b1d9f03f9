"""Flow control: no message is taken before it is put, none overflows, deadlock is reported."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import RunError
from shoal.planning.channel_specs import ChannelSpec, Gate, pieces
from shoal.planning.policy import Latest, Lockstep
from shoal.runtime.channels.channel import ChannelState, Taken
from shoal.runtime.channels.flow_control import Counts, may_put, may_take
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.replica_runner import Wants
from shoal.runtime.execution.scheduler import Scheduler

LAW = settings(max_examples=200, deadline=None, derandomize=True)


@st.composite
def meetings(draw):
    """A gate, and an order in which its ends come to it (each as often as there is to move)."""
    writers, readers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    some = st.lists(st.integers(0, writers - 1), min_size=1, unique=True).map(sorted)
    sources = tuple(tuple(draw(some)) for _ in range(readers))
    lag = draw(st.integers(0, 2))
    gate = Gate("c", "w", "r", sources, Lockstep(lag), lag + draw(st.integers(1, 3)))
    ticks = draw(st.integers(1, 5))
    return gate, writers, ticks, draw(st.randoms(use_true_random=False))


@LAW
@given(meetings())
def test_every_message_is_put_before_it_is_taken_and_none_overflows(meeting):
    gate, writers, ticks, random = meeting
    readers = len(gate.sources)
    counts = Counts([gate.lag] * writers, [0] * readers)  # what lags is primed
    left = {("w", i): ticks for i in range(writers)} | {("r", i): ticks for i in range(readers)}
    while any(left.values()):
        can = [
            (kind, end)
            for (kind, end), more in left.items()
            if more
            and (
                may_put(gate, counts, end)
                if kind == "w"
                else may_take(gate, counts, end, counts.takes[end], ticks - more)
            )
        ]
        assert can, "deadlock"
        kind, end = random.choice(can)
        (counts.puts if kind == "w" else counts.takes)[end] += 1
        left[kind, end] -= 1
        for reader, sources in enumerate(gate.sources):
            for writer in sources:
                assert 0 <= counts.puts[writer] - counts.takes[reader] <= gate.capacity


@LAW
@given(st.integers(0, 3), st.integers(0, 10), st.integers(1, 10))
def test_the_newest_is_taken_but_never_later_than_allowed(bound, tick, versions):
    gate = Gate("c", "w", "r", ((0,),), Latest(bound), 1)
    counts = Counts([versions], [0])
    assert may_take(gate, counts, 0, 0, tick) == (versions - 1 >= max(0, tick - bound))
    assert may_put(gate, counts, 0), "a writer of the newest value never waits"


class Line:
    """A channel without content."""

    def __init__(self, name, writer, reader, writers, readers):
        sources = tuple(tuple(range(writers)) for _ in range(readers))
        gate = Gate(name, writer, reader, sources, Lockstep(), 1)
        counts = Counts([0] * writers, [0] * readers)
        self.state = ChannelState(ChannelSpec(gate, (), writers, 1), counts)

    def put(self, end, message, version):
        self.state.did_put(end)

    def take(self, end, tick, receive):
        self.state.let_go(end, self.state.turns(end, tick))
        return Taken({}, ())


class Walker:
    """An end that only moves, in a given order."""

    is_asynchronous = False

    def __init__(self, replica, moves, channels):
        self.replica, self.moves, self.channels, self.tick = replica, list(moves), channels, 0

    def ticks(self, limit):
        while self.moves:
            name, takes = self.moves[0]
            yield Wants(name, takes, 0)
            channel = self.channels[name]
            channel.take(self.replica[1], 0, None) if takes else channel.put(self.replica[1], {}, 0)
            self.moves.pop(0)


@st.composite
def nets(draw):
    """Fragments with channels between them, each with its own order of moves: may well block."""
    ends = {name: draw(st.integers(1, 2)) for name in "abc"}
    lines, moves = {}, {name: [] for name in ends}
    for name in (f"g{i}" for i in range(draw(st.integers(1, 4)))):
        writer, reader = draw(st.permutations(sorted(ends)))[:2]
        lines[name] = Line(name, writer, reader, ends[writer], ends[reader])
        moves[writer].insert(draw(st.integers(0, len(moves[writer]))), (name, False))
        moves[reader].insert(draw(st.integers(0, len(moves[reader]))), (name, True))
    ticks = draw(st.integers(1, 3))
    walkers = [
        Walker((name, i), moves[name] * ticks, lines)
        for name, count in ends.items()
        for i in range(count)
    ]
    return draw(st.permutations(walkers)), lines


@LAW
@given(nets())
def test_a_deadlock_is_reported_exactly_when_all_unfinished_replicas_wait(net):
    walkers, lines = net
    team = Scheduler(walkers, lines, None)
    message = ""
    try:
        team.run(Limit(1))
    except RunError as error:
        message = str(error)
    left = [w for w in walkers if w.moves]
    assert bool(message) == bool(left)
    for walker in left:
        name, takes = walker.moves[0]
        stile, end = lines[name].state, walker.replica[1]
        assert not (stile.may_take(end, 0) if takes else stile.may_put(end))
        assert f"{walker.replica[0]}[{end}] waits for" in message


def test_a_deadlock_names_the_blocked_replicas():
    lines = {"c": Line("c", "a", "b", 1, 1), "d": Line("d", "b", "a", 1, 1)}
    walkers = [
        Walker(("a", 0), [("d", True), ("c", False)], lines),
        Walker(("b", 0), [("c", True), ("d", False)], lines),
    ]
    with pytest.raises(RunError, match="stuck") as error:
        Scheduler(walkers, lines, None).run(Limit(1))
    assert "b[0] waits for a on c" in str(error.value)
    assert "a[0] waits for b on d" in str(error.value)


@LAW
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_pieces_cover_every_row_once_and_in_order(writers, readers, times):
    rows = writers * readers * times
    wide, narrow = rows // writers, rows // readers
    for reader, cut in enumerate(pieces(rows, writers, readers)):
        held = [p.writer * wide + row for p in cut for row in range(p.start, p.stop)]
        assert held == list(range(reader * narrow, (reader + 1) * narrow))
