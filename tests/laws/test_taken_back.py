"""The complete messages of a lost endpoint are used once; no reader waits for the rest."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planning.channel_specs import ChannelSpec, Gate
from shoal.planning.policy import Queue, Serve
from shoal.runtime.channels.channel import Bundle, ChannelState, take_back
from shoal.runtime.channels.flow_control import Counts, Ledger

ENDS, DEPTH = 3, 32


@st.composite
def moments(draw):
    """Parts of turns, as they lie when an end dies: in each channel some, in the first the most."""
    used = [draw(st.integers(0, 5)) for _ in range(ENDS)]
    whole = [u + draw(st.integers(0, 2)) for u in used]
    parts = draw(st.integers(1, 3))
    begun = [w + draw(st.integers(0, 1)) for w in whole]
    puts = [list(whole) for _ in range(parts)]
    for end in range(ENDS):
        for part in puts[:-1]:  # the last part of a turn is never there before the others
            part[end] += draw(st.integers(0, begun[end] - whole[end]))
    return used, whole, begun, puts


@settings(max_examples=200, deadline=None, derandomize=True)
@given(moments(), st.integers(0, ENDS - 1), st.integers(1, 4))
def test_what_is_whole_stays_and_what_is_not_is_not_waited_for(moment, dead, bound):
    used, whole, begun, puts = moment
    ledger = Ledger(list(begun), list(used), list(used), [0] * ENDS * DEPTH, DEPTH)
    gate = Gate("c", "w", "r", (tuple(range(ENDS)),), Queue(8, 1), 8, bound=bound)
    bundle = Bundle(gate)
    stiles = [
        ChannelState(ChannelSpec(gate, (), ENDS, ENDS), Counts(list(p), [0] * ENDS, ledger), bundle)
        for p in puts
    ]
    take_back(stiles, {"w"}, dead)
    assert ledger.begun[dead] == whole[dead]
    for stile in stiles:
        assert stile.counts.puts[dead] == whole[dead]
    assert [b for e, b in enumerate(ledger.begun) if e != dead] == [
        b for e, b in enumerate(begun) if e != dead
    ]
    # All that is whole is used, once each, and then nothing of the dead one is waited for.
    taken, tick = [], 0
    while turns := bundle.turns(tick):
        taken += turns
        tick += 1
    assert len(set(taken)) == len(taken)
    assert {n for e, n in taken if e == dead} <= set(range(used[dead], whole[dead]))
    assert not [
        turn
        for turn, _ in ledger.in_flight()
        if turn[0] == dead and turn not in _left(used, whole, taken, dead)
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, ENDS - 1))
def test_of_ends_in_step_a_turn_is_whole_when_all_have_given_their_part(data, dead):
    """Fragments `env` and `inference` go in step, and each gives a part of every turn."""
    counts = st.lists(st.integers(0, 4), min_size=ENDS, max_size=ENDS)
    puts = {f: data.draw(counts) for f in ("env", "inference")}
    whole = [min(parts) for parts in zip(*puts.values(), strict=True)]
    begun = [w + data.draw(st.integers(max(p) - w, 5 - w)) for w, p in
             zip(whole, zip(*puts.values(), strict=True), strict=True)]  # fmt: skip
    ledger = Ledger(list(begun), [0] * ENDS, [0] * ENDS, [0] * ENDS * DEPTH, DEPTH)
    every, one = tuple(range(ENDS)), tuple((end,) for end in range(ENDS))
    first = Gate("0", "env", "learner", (every,), Queue(8, 1), 8, bound=9)
    bundle = Bundle(first)
    made = {
        f: ChannelState(ChannelSpec(replace(first, writer=f), (), ENDS, ENDS),
                     Counts(list(puts[f]), [0] * ENDS, ledger), bundle)
        for f in puts
    }  # fmt: skip
    serve = Gate("1", "env", "inference", one, Serve(), 2)
    asked = ChannelState(ChannelSpec(serve, (), ENDS, ENDS), Counts([7] * ENDS, [6] * ENDS))
    take_back([*made.values(), asked], set(puts), dead)
    assert ledger.begun[dead] == whole[dead]
    for fragment, stile in made.items():
        kept = [whole[e] if e == dead else n for e, n in enumerate(puts[fragment])]
        assert stile.counts.puts == kept
    # Between them, both begin with nothing on its way; others are as they were.
    assert asked.counts.puts == [0 if e == dead else 7 for e in range(ENDS)]
    assert asked.counts.takes == [0 if e == dead else 6 for e in range(ENDS)]


def _left(used, whole, taken, dead):
    """Turns of the dead end that are whole, and were not taken yet."""
    return {(dead, n) for n in range(used[dead], whole[dead])} - set(taken)
