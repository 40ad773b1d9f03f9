"""Every channel on every transport: no message is lost, repeated, out of order or torn."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.lines import (
    PROCESSES,
    THREADS,
    VALUES,
    Meeting,
    Shared,
    check_seen,
    local_hall,
    made,
    make_channel_spec,
    one_line,
    read,
    until,
    wait_put,
    wait_take,
    write,
)
from conformance.wired import Wired
from shoal.planning.policy import Latest, Lockstep, Queue, lag_of, takes_some
from shoal.runtime.execution.scheduler import Stopped

LAW = settings(max_examples=60, deadline=None, derandomize=True)


CARRIERS = {
    "in process": local_hall,
    "shared memory": lambda specs: Shared(specs).hall(),
    "tcp": lambda specs: Wired(specs).hall(settles=True),
    "tcp, signed": lambda specs: Wired(specs, signed=True).hall(settles=True),
}
carriers = pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS)
FLOWS = st.one_of(
    st.builds(Lockstep, st.integers(0, 2)),
    st.builds(Queue, st.integers(1, 3)),
    st.builds(Queue, st.integers(1, 3), st.integers(1, 3)),
    st.builds(Latest, st.sampled_from([None, 0, 1, 2])),
)


@st.composite
def specs(draw):
    """A channel of any flow, with one to three endpoints on each side."""
    flow, writers = draw(FLOWS), draw(st.integers(1, 3))
    if takes_some(flow):
        flow = Queue(flow.capacity, min(flow.take, writers))
    readers = 1 if takes_some(flow) else draw(st.integers(1, 3))
    values = draw(st.sampled_from(VALUES if writers > 1 else ("rows", "shared")))
    return make_channel_spec(flow, writers, readers, values)


class Model:
    """A reference model of a channel: one put or take at a time, in any order."""

    def __init__(self, channel):
        self.channel, self.spec = channel, channel.state.spec
        self.gate = self.spec.gate
        self.puts, self.ticks = [0] * self.spec.writers, [0] * self.spec.readers
        self.used = [0] * self.spec.writers  # where some are taken
        for end in range(self.spec.writers):
            for _ in range(lag_of(self.gate.flow)):
                self.put(end)

    def put(self, end):
        number = self.puts[end]
        self.channel.put(end, made(self.spec, end, number), number + 7)
        self.puts[end] += 1

    def take(self, end):
        given_turns = []

        def receive(message, turns):
            given_turns[:] = turns
            return {name: np.array(x) for name, x in message.items()}

        taken = self.channel.take(end, self.ticks[end], receive)
        self.check_turns(end, given_turns)
        check_seen(self.spec, end, given_turns, taken.message)
        assert taken.versions == tuple(n + 7 for _, n in given_turns)
        self.ticks[end] += 1

    def check_turns(self, end, turns):
        sources = self.gate.sources[end]
        if takes_some(self.gate.flow):
            assert len(turns) == self.gate.flow.take
            for writer, number in turns:
                assert number == self.used[writer] < self.puts[writer], "lost or repeated"
                self.used[writer] += 1
        elif isinstance(self.gate.flow, Latest):
            newest = min(self.puts[w] for w in sources) - 1
            assert turns == [(w, newest) for w in sources], "not the newest"
        else:
            assert turns == [(w, self.ticks[end]) for w in sources], "lost, repeated or reordered"

    def has_room(self, end):
        """Whether a put keeps the unreleased messages within the capacity."""
        if isinstance(self.gate.flow, Latest):
            return None  # news is written over
        if takes_some(self.gate.flow):
            return self.puts[end] - self.used[end] < self.gate.capacity
        readers = [t for t, s in zip(self.ticks, self.gate.sources, strict=True) if end in s]
        return not readers or self.puts[end] - min(readers) < self.gate.capacity

    def has_next(self, end):
        """Whether there is something to take."""
        if takes_some(self.gate.flow):
            there = sum(p - u for p, u in zip(self.puts, self.used, strict=True))
            return there >= self.gate.flow.take
        newest = min(self.puts[w] for w in self.gate.sources[end]) - 1
        if isinstance(self.gate.flow, Latest):
            most = self.gate.flow.max_lag
            return newest >= (0 if most is None else max(0, self.ticks[end] - most))
        return newest >= self.ticks[end]


@carriers
@LAW
@given(spec=specs(), random=st.randoms(use_true_random=False))
def test_in_any_order_of_moves_each_message_arrives_once_whole_and_in_order(carry, spec, random):
    model = Model(carry({"c": spec}).channels["c"])
    stile = model.channel.state
    for _ in range(40):
        can = []
        for end in range(spec.writers):
            if model.has_room(end) is not None:
                assert stile.may_put(end) == model.has_room(end)
            can += [(model.put, end)] if stile.may_put(end) else []
        for end in range(spec.readers):
            assert stile.may_take(end, model.ticks[end]) == model.has_next(end)
            can += [(model.take, end)] if model.has_next(end) else []
        assert can, "all endpoints wait"
        move, end = random.choice(can)
        move(end)


SETTINGS = [
    (THREADS, "in process"),
    (THREADS, "shared"),
    (THREADS, "tcp"),
    (PROCESSES, "shared"),
    (PROCESSES, "tcp"),
]
settings_of_ends = pytest.mark.parametrize(
    ("kind", "carry"), SETTINGS, ids=[f"{c}, {k}" for k, c in SETTINGS]
)


LINES = [
    (Lockstep(0), 1, 1, "rows"),
    (Lockstep(0), 3, 1, "stacked"),
    (Lockstep(1), 2, 3, "rows"),
    (Lockstep(2), 1, 3, "shared"),
    (Queue(1), 3, 2, "rows"),
    (Queue(3), 2, 2, "shared"),
    (Queue(8), 2, 1, "rows"),
    (Queue(2, 1), 3, 1, "rows"),
    (Queue(2, 2), 3, 1, "stacked"),
]


@settings_of_ends
@pytest.mark.parametrize(("flow", "writers", "readers", "values"), LINES, ids=str)
def test_ends_that_run_at_once_lose_repeat_and_tear_nothing(
    kind, carry, flow, writers, readers, values
):
    spec = make_channel_spec(flow, writers, readers, values)
    meeting = Meeting(kind, carry, {"c": spec})
    ticks = 60 * (writers if takes_some(flow) else 1)
    puts = ticks * flow.take // writers if takes_some(flow) else ticks
    jobs = [meeting.start(write, end, 0, puts) for end in range(writers)]
    reading = [meeting.start(read, end, ticks) for end in range(readers)]
    assert [job.result() for job in jobs] == [puts] * writers
    for end, job in enumerate(reading):
        got = job.result()
        assert got.versions == [tuple(n for _, n in turns) for turns in got.turns]
        if takes_some(flow):
            every = sorted(turn for turns in got.turns for turn in turns)
            assert every == [(w, n) for w in range(writers) for n in range(puts)]
        else:
            assert got.turns == [[(w, t) for w in spec.gate.sources[end]] for t in range(ticks)]


@settings_of_ends
@pytest.mark.parametrize("flow", [Lockstep(1), Queue(3), Queue(2, 1)], ids=str)
def test_a_full_ring_makes_its_writer_wait_until_there_is_room(kind, carry, flow):
    spec = make_channel_spec(flow, 1, 1)
    meeting = Meeting(kind, carry, {"c": spec})
    writer = meeting.start(write, 0, 0, 10**9)
    meeting.stile.may_take(0, 0)  # the reader is there, and only looks
    puts = meeting.stile.counts.puts
    for taken in range(5):
        until(lambda n=taken: puts[0] == spec.gate.capacity + n)
        if meeting.line:
            until(lambda: meeting.line.is_asleep(("w", 0)))
        assert puts[0] == spec.gate.capacity + taken
        wait_take(meeting.hall, 0, taken)
        meeting.hall.channels["c"].take(0, taken, lambda m, _: m)
    until(lambda: puts[0] == spec.gate.capacity + 5)
    meeting.hall.halt()
    assert writer.result() == spec.gate.capacity + 5


@settings_of_ends
@pytest.mark.parametrize("flow", [Lockstep(0), Queue(1), Queue(1, 2), Latest(0)], ids=str)
def test_every_waiting_endpoint_ends_when_all_are_halted(kind, carry, flow):
    meeting = Meeting(kind, carry, one_line(flow, 2, 1, "stacked"))
    reader = meeting.start(read, 0, 10**9)
    writer = meeting.start(write, 0, 0, 5)
    meeting.start(write, 1, 0, 0)  # which puts nothing
    least = 1 if isinstance(flow, Latest) else meeting.stile.spec.gate.capacity
    until(lambda: meeting.stile.counts.puts[0] >= least)
    if meeting.line:
        until(lambda: meeting.line.is_asleep(("r", 0)))
    meeting.hall.halt()
    assert reader.result().turns == []
    writer.result()


def news_written_over(channel, spec, first, times):
    """A reader that newer messages from `first` on overtake a number of times."""
    looks, numbers = [], count(first)

    def receive(message, turns):
        half = len(message["x"]) // 2
        first = np.array(message["x"][:half])
        if len(looks) < times:
            for _ in range(4):
                number = next(numbers)
                channel.put(0, made(spec, 0, number), number)
        looks.append(turns)
        return {"x": np.concatenate([first, message["x"][half:]]), "y": np.array(message["y"])}

    return receive, looks


@carriers
@LAW
@given(before=st.integers(1, 6), times=st.integers(0, 3))
def test_news_written_over_while_it_is_read_is_never_seen_torn(carry, before, times):
    spec = make_channel_spec(Latest(None), 1, 1)
    hall = carry({"c": spec})
    channel = hall.channels["c"]
    for number in range(before):
        channel.put(0, made(spec, 0, number), number)
    wait_take(hall, 0, 0)  # between hosts, news is on its way for a while
    receive, looks = news_written_over(channel, spec, before, times)
    taken = channel.take(0, 0, receive)
    check_seen(spec, 0, looks[-1], taken.message)
    assert taken.versions == (looks[-1][0][1],)


def news(hall, size, last):
    """Put messages as fast as possible."""
    for number in range(last):
        x = np.full((size, 3), number, np.float32)
        hall.channels["c"].put(0, {"x": x, "y": np.full((2, size), number)}, number)


def watch(hall, last):
    """Every message received until the last: (least, most, version)."""
    found, tick = [], 0

    def receive(message, _):
        return {name: np.array(x) for name, x in message.items()}

    while not found or found[-1][2] < last - 1:
        wait_take(hall, 0, tick)
        message, (version,) = hall.channels["c"].take(0, tick, receive)
        xs = [*message["x"].flat, *message["y"].flat] if tick % 50 == 0 else []
        least = min(message["x"].min(), message["y"].min(), *xs)
        found.append((int(least), int(max(message["x"].max(), message["y"].max())), version))
        tick += 1
    return found


@settings_of_ends
def test_the_newest_is_seen_whole_and_never_goes_back(kind, carry):
    meeting = Meeting(kind, carry, one_line(Latest(None), 1, 1, rows=4096))
    reader = meeting.start(watch, 300)
    writer = meeting.start(news, 4096, 300)
    writer.result()
    found = reader.result()
    assert all(least == most == version for least, most, version in found), "torn"
    versions = [version for _, _, version in found]
    assert versions == sorted(versions), "older news after newer"


@settings_of_ends
@pytest.mark.parametrize("values", ["rows", "stacked"])
def test_news_of_several_writers_is_of_one_version_however_far_one_is_ahead(kind, carry, values):
    meeting = Meeting(kind, carry, one_line(Latest(None), 3, 1, values))
    reader = meeting.start(read, 0, 40)
    writers = [meeting.start(write, end, 0, 200) for end in range(3)]
    assert [w.result() for w in writers] == [200] * 3
    for turns in reader.result().turns:
        assert len({n for _, n in turns}) == 1


def beats(hall, end, ticks, take):
    """A learner: puts params every tick and takes the first rollouts; the lag of each."""
    lags = []
    for tick in range(ticks):
        hall.channels["news"].put(0, {"p": np.full(4, tick, np.float32), "q": np.int32(tick)}, tick)
        wait_take(hall, 0, tick)
        lags += [tick - v for v in hall.channels["c"].take(0, tick, lambda m, _: m).versions]
    hall.halt()
    assert len(lags) == ticks * take
    return lags


def actor(hall, end):
    """Runs asynchronously: takes the newest, and puts a rollout made from it."""
    spec, number = hall.channels["c"].state.spec, 0
    try:
        while True:
            wait_take(hall, end, number, "news")
            taken = hall.channels["news"].take(
                end, number, lambda m, _: {k: np.array(x) for k, x in m.items()}
            )
            assert set(taken.message["p"]) == {taken.versions[0]}
            wait_put(hall, end)
            hall.channels["c"].put(end, made(spec, end, number), taken.versions[0])
            number += 1
    except Stopped:
        return number


@settings_of_ends
@pytest.mark.parametrize(("actors", "take", "bound"), [(3, 1, 2), (3, 2, 1), (2, 2, 0)])
def test_no_used_rollout_exceeds_its_lag_bound(kind, carry, actors, take, bound):
    specs = bounded_specs(actors, take, bound)
    start = Meeting(kind, carry, specs).start
    free = [start(actor, end) for end in range(actors)]
    lags = start(beats, 0, 60, take).result()
    assert 0 <= min(lags) <= max(lags) <= bound
    assert sum(job.result() for job in free) >= 60 * take


def bounded_specs(actors, take, bound):
    """A queue to a learner that takes the first rollouts, and a channel for its params."""
    admits = take * (bound + 1) // actors
    queue = make_channel_spec(Queue(2, take), actors, 1)
    back = make_channel_spec(Latest(bound), 1, actors, "shared")
    gate = replace(back.gate, name="news", writer="r", reader="w", admits=admits, bound=bound)
    return {
        "c": replace(queue, gate=replace(queue.gate, admits=admits, bound=bound)),
        "news": replace(back, gate=gate),
    }
