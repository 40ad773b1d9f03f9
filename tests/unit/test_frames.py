"""Frames: whatever comes is read as it was sent or refused, however it was divided on the way."""

from struct import pack_into

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.runtime.net.framing import (
    BYE,
    COUNT,
    DATA,
    HEAD,
    TAKEN,
    Frame,
    Part,
    Reading,
    Refused,
    Terms,
    Whole,
    on_bytes,
    on_skip,
)

LAW = settings(max_examples=300, deadline=None, derandomize=True)
BODIES = {(DATA, 0, 0): (5, 5), (DATA, 0, 1): (0, 40), (TAKEN, 1, 2): (0, 0), (COUNT, 3, 0): (0, 0)}
TERMS = Terms.of(BODIES)


@st.composite
def talks(draw):
    """Frames in an order that may be, with their bodies."""
    numbers, found = dict.fromkeys(BODIES, 0), []
    for key in draw(st.lists(st.sampled_from(list(BODIES)), max_size=8)):
        body = draw(st.binary(min_size=BODIES[key][0], max_size=BODIES[key][1]))
        stamp = draw(st.integers(-(2**63), 2**63 - 1))
        found.append((Frame(*key, numbers[key], stamp, len(body)), body))
        numbers[key] += 1
    return found


def sent(talk):
    return b"".join(frame.packed() + body for frame, body in talk)


def read(chunks):
    """What came of these bytes: frames with their bodies, why it was refused, and the state."""
    state, frames, body, refusals = Reading.start(TERMS), [], b"", []
    for chunk in chunks:
        state, events = on_bytes(state, chunk)
        for event in events:
            match event:
                case Part(data):
                    body += data
                case Whole(frame):
                    frames.append((frame, body))
                    body = b""
                case Refused(why):
                    refusals.append(why)
        assert len(state.head) < HEAD.size
        assert 0 <= state.left <= 40
    return frames, refusals, state


def divided(data, random):
    """The bytes in pieces."""
    while data:
        count = random.randint(1, 50)
        yield data[:count]
        data = data[count:]


@LAW
@given(talk=talks(), random=st.randoms(use_true_random=False))
def test_what_is_sent_is_read_however_it_is_divided(talk, random):
    frames, refusals, state = read(divided(sent(talk), random))
    assert frames == talk
    assert refusals == []
    assert state.wants == HEAD.size


@LAW
@given(talk=talks(), at=st.integers(0), byte=st.integers(1, 255), random=st.randoms())
def test_a_frame_that_was_changed_is_refused_or_differs_only_in_itself(talk, at, byte, random):
    data = bytearray(sent(talk))
    if not data:
        return
    data[at % len(data)] ^= byte
    frames, refusals, _ = read(divided(bytes(data), random))
    whole, place = 0, 0
    for _, body in talk:
        place += HEAD.size + len(body)
        if place > at % len(data):
            break
        whole += 1
    assert frames[:whole] == talk[:whole]
    assert len(refusals) <= 1
    if refusals:
        assert len(frames) <= len(talk)


@LAW
@given(talk=talks(), at=st.integers(0))
def test_whatever_had_come_when_a_connection_broke_the_rest_makes_it_whole(talk, at):
    data = sent(talk)
    state, events = on_bytes(Reading.start(TERMS), data[: at % (len(data) + 1)])
    came = [event.frame for event in events if isinstance(event, Whole)]
    rest = [(frame, body) for frame, body in talk if frame.number >= state.due.get(frame[:3], 0)]
    state, events = on_bytes(state.anew(), sent(rest))
    came += [event.frame for event in events if isinstance(event, Whole)]
    assert came == [frame for frame, _ in talk]
    assert not state.refused


@pytest.mark.parametrize(
    ("key", "number", "may"),
    [((TAKEN, 1, 2), 7, True), ((DATA, 0, 1), 7, True), ((DATA, 0, 0), 7, False)],
    ids=["counts", "news", "messages"],
)
def test_only_news_may_be_left_out(key, number, may):
    state = on_skip(Reading.start(Terms.of(BODIES, [(DATA, 0, 1)])), key, number)
    assert bool(state.refused) != may
    if may:
        assert state.due == {key: number}
        assert on_skip(state, key, number - 1).refused, "back to what had come"


@LAW
@given(noise=st.binary(max_size=500))
def test_noise_is_refused_after_one_head_and_nothing_is_kept_of_it(noise):
    frames, refusals, state = read([noise])
    assert frames == []
    assert len(refusals) == (len(noise) >= HEAD.size)
    assert state.wants == (0 if refusals else HEAD.size - len(noise))


def spoilt(frame, at, form, value):
    head = bytearray(frame.packed())
    pack_into(form, head, at, value)
    return bytes(head)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: shoal.example.org\r\n"[: HEAD.size], "no frame"),
        (spoilt(Frame(DATA, 0, 0, 0, 0, 5), 4, "<B", 9), "a frame of version 9"),
        (Frame(99, 0, 0, 0).packed(), "kind 99 0 of end 0 on channel 0, which nobody sends here"),
        (Frame(DATA, 7, 0, 0, 0, 5).packed(), "on channel 7, which nobody sends here"),
        (Frame(DATA, 0, 9, 0, 0, 5).packed(), "data 0 of end 9"),
        (Frame(DATA, 0, 0, 1, 0, 5).packed(), "data 1 of end 0 on channel 0, and 0 is due"),
        (Frame(DATA, 0, 0, 0, 0, 6).packed(), "a body of 6 bytes, which has 5 to 5"),
        (Frame(DATA, 0, 1, 0, 0, 2**63).packed(), "bytes, which has 0 to 40"),
        (spoilt(Frame(DATA, 0, 0, 0, 0, 5), 10, "<H", 1), "no frame"),
    ],
)
def test_what_is_not_expected_is_refused_by_name(head, why):
    assert len(head) == HEAD.size
    frames, refusals, state = read([head, b"and then much more" * 10])
    assert frames == []
    assert len(refusals) == 1
    assert why in refusals[0]
    assert state.wants == 0


def test_a_frame_that_comes_twice_is_refused():
    frame = Frame(TAKEN, 1, 2, 0)
    frames, refusals, _ = read([frame.packed() * 2])
    assert frames == [(frame, b"")]
    assert refusals == ["taken 0 of end 2 on channel 1, and 1 is due"]


def test_the_other_side_may_always_end():
    frames, refusals, _ = read([Frame(BYE, 0, 0, 0).packed()])
    assert (frames, refusals) == ([(Frame(BYE, 0, 0, 0), b"")], [])
