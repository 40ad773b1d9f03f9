"""A put costs as much with a thousand sources as with one: counted in reads of counts, not time."""

import random
from dataclasses import replace

import pytest

from conformance.lines import make_channel_spec
from shoal.planning.policy import Latest, Lockstep, Queue, takes_some
from shoal.runtime.channels.channel import Bundle, ChannelState
from shoal.runtime.channels.flow_control import Counts, Ledger
from shoal.runtime.channels.shared_memory import Allocator, Memory
from shoal.runtime.channels.shm import ChannelLayouts

MANY, TICKS = 1000, 3
EACH = 5  # reads of counts that one move of one end may cost its other side


class Counted(list):
    """Counters that count their reads."""

    reads = 0

    def __getitem__(self, index):
        Counted.reads += 1
        return super().__getitem__(index)


def state_of(spec, ledger=None):
    ends = max(spec.writers, spec.readers)
    counts = Counts(Counted([0] * spec.writers), Counted([0] * ends), ledger)
    bundle = Bundle(spec.gate) if takes_some(spec.gate.flow) else None
    return ChannelState(spec, counts, bundle)


def in_any_order(ends):
    return random.Random(0).sample(range(ends), ends)


@pytest.mark.parametrize("flow", [Lockstep(0), Lockstep(1), Queue(2)], ids=str)
def test_a_reader_that_gathers_from_many_reads_each_count_once_a_tick(flow):
    state = state_of(make_channel_spec(flow, MANY, 1, "stacked"))
    Counted.reads = 0
    for tick in range(TICKS):
        for end in in_any_order(MANY):
            assert not state.may_take(0, tick)  # the reader is woken by the previous put and checks
            state.did_put(end)
        assert state.may_take(0, tick)
        state.let_go(0, state.turns(0, tick))
    assert Counted.reads <= EACH * MANY * TICKS


@pytest.mark.parametrize("flow", [Lockstep(0), Queue(1)], ids=str)
def test_a_writer_that_many_take_from_reads_each_count_once_a_message(flow):
    state = state_of(make_channel_spec(flow, 1, MANY, "shared"))
    capacity = state.spec.gate.capacity
    for _ in range(capacity):
        state.did_put(0)
    Counted.reads = 0
    for number in range(TICKS):
        for end in in_any_order(MANY):
            assert not state.may_put(0)
            state.let_go(end, [(0, number)])
        assert state.may_put(0)
        state.did_put(0)
    assert Counted.reads <= EACH * MANY * TICKS


def test_news_of_many_is_ahead_of_none_at_the_price_of_one_read_each():
    state = state_of(make_channel_spec(Latest(None), MANY, 1, "stacked"))
    for _ in range(3):
        state.did_put(0)
    Counted.reads = 0
    for end in in_any_order(MANY):
        if end:
            assert not state.may_put(0)
            state.did_put(end)
    assert state.may_put(0)
    assert Counted.reads <= EACH * MANY


def some_of_many(take, bound=None):
    spec = make_channel_spec(Queue(2, take), MANY, 1)
    gate = replace(spec.gate, admits=2, bound=bound)
    ledger = Ledger(*(Counted([0] * MANY) for _ in range(3)), [0] * (MANY * 8), 8)
    return state_of(replace(spec, gate=gate), ledger), ledger


@pytest.mark.parametrize("take", [1, 10, MANY])
def test_a_reader_that_takes_the_first_to_come_looks_at_who_has_put(take):
    state, ledger = some_of_many(take)
    state.may_take(0, 0)  # the first look is at all
    Counted.reads, tick = 0, 0
    for number in range(TICKS):
        for end in in_any_order(MANY):
            ledger.begin(end, 0)
            state.did_put(end)
            if state.may_take(0, tick):
                turns = state.turns(0, tick)
                assert turns.count((end, number)) == 1
                state.let_go(0, turns)
                tick += 1
    assert tick == TICKS * MANY // take
    assert Counted.reads <= 3 * EACH * MANY * TICKS


def test_one_that_is_late_costs_no_look_at_all_others_when_they_put():
    state, ledger = some_of_many(take=MANY // 2, bound=0)
    late, *others = in_any_order(MANY)
    for end in range(MANY):
        ledger.begin(end, 5 if end != late else 0)
    state.may_take(0, 0)
    Counted.reads = 0
    for end in others:
        state.did_put(end)
        assert not state.may_take(0, 0), "the late one must be used at this tick"
    state.did_put(late)
    assert state.may_take(0, 0)
    assert (late, 0) in state.turns(0, 0)
    assert Counted.reads <= 10 * EACH * MANY


def test_in_shared_memory_only_the_ends_that_have_put_are_found():
    room = Allocator()
    spec = make_channel_spec(Queue(4, 1), MANY, 1)
    layouts = ChannelLayouts.plan({"c": spec}, room)
    memory = Memory.make(room.size)
    reader, writer = (layouts.open(memory)["c"].state for _ in range(2))
    assert not reader.may_take(0, 0)
    changed = reader.bundle.changed
    for end in (7, 3, 999):
        writer.did_put(end)
    assert sorted(changed()) == [3, 7, 999]
    assert changed() == []
