"""Frames are read as sent or rejected, in pieces of any size."""

import itertools
from struct import pack_into

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.reading import FrameRecorder, Pieces, read, sent
from shoal.runtime.net.connection import Inbox
from shoal.runtime.net.wire import (
    BYE,
    COUNT,
    DATA,
    HEAD,
    NONCE,
    TAG,
    TAKEN,
    Credentials,
    Frame,
    Incoming,
    ProtocolError,
    Signing,
    digest,
)

LAW = settings(max_examples=300, deadline=None, derandomize=True)
BODIES = {(DATA, 0, 0): 5, (DATA, 0, 1): 40, (TAKEN, 1, 2): 0, (COUNT, 3, 0): 0}
LARGEST = 1 << 16
KNOWN = Credentials(b"t" * 32, digest("channels"), signed=True)


def at_once():
    return itertools.repeat(LARGEST)


def divided(random):
    """Random sizes of pieces."""
    return iter(lambda: random.randint(1, 50), 0)


@st.composite
def talks(draw):
    """Frames in a valid order, with their bodies."""
    numbers, found = dict.fromkeys(BODIES, 0), []
    for key in draw(st.lists(st.sampled_from(list(BODIES)), max_size=8)):
        body = draw(st.binary(min_size=BODIES[key], max_size=BODIES[key]))
        stamp = draw(st.integers(-(2**63), 2**63 - 1))
        found.append((Frame(*key, numbers[key], stamp, len(body)), body))
        numbers[key] += 1
    return found


@LAW
@given(talk=talks(), random=st.randoms(use_true_random=False))
def test_frames_are_read_as_sent_in_pieces_of_any_size(talk, random):
    assert read(sent(talk), Incoming(BODIES), divided(random)) == (talk, "")


@LAW
@given(talk=talks(), at=st.integers(0), byte=st.integers(1, 255), random=st.randoms())
def test_a_frame_that_was_changed_is_rejected_or_differs_only_in_itself(talk, at, byte, random):
    data = bytearray(sent(talk))
    if not data:
        return
    data[at % len(data)] ^= byte
    frames, refused = read(bytes(data), Incoming(BODIES), divided(random))
    whole, place = 0, 0
    for _, body in talk:
        place += HEAD.size + len(body)
        if place > at % len(data):
            break
        whole += 1
    assert frames[:whole] == talk[:whole]
    assert refused or len(frames) <= len(talk)


@pytest.mark.parametrize(
    ("key", "may"),
    [((TAKEN, 1, 2), True), ((DATA, 0, 1), True), ((DATA, 0, 0), False)],
    ids=["counts", "news", "messages"],
)
def test_only_latest_channels_may_skip_numbers(key, may):
    incoming, body = Incoming(BODIES, [(DATA, 0, 1)]), bytes(BODIES[key])
    skips = [(Frame(*key, 7, 0, len(body)), body)]
    frames, refused = read(sent(skips), incoming, at_once())
    assert (frames == skips, "and 0 is due" in refused) == (may, not may)
    if may:
        _, refused = read(sent([(Frame(*key, 6, 0, len(body)), body)]), incoming, at_once())
        assert "and 8 is due" in refused, "back to what had come"


@LAW
@given(noise=st.binary(max_size=500))
def test_noise_is_rejected_after_one_header(noise):
    frames, refused = read(noise, Incoming(BODIES), at_once())
    assert frames == []
    assert bool(refused) == (len(noise) >= HEAD.size)


def spoilt(frame, at, form, value):
    head = bytearray(frame.pack())
    pack_into(form, head, at, value)
    return bytes(head)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: shoal.example.org\r\nAccept: */*\r\n"[: HEAD.size], "no frame"),
        (spoilt(Frame(DATA, 0, 0, 0, 0, 5), 4, "<B", 9), "a frame of version 9"),
        (Frame(99, 0, 0, 0).pack(), "kind 99 0 of end 0 on channel 0, which no worker sends here"),
        (Frame(DATA, 7, 0, 0, 0, 5).pack(), "on channel 7, which no worker sends here"),
        (Frame(DATA, 0, 9, 0, 0, 5).pack(), "data 0 of end 9"),
        (Frame(DATA, 0, 0, 1, 0, 5).pack(), "data 1 of end 0 on channel 0, and 0 is due"),
        (Frame(DATA, 0, 0, 0, 0, 6).pack(), "a body of 6 bytes, which has 5"),
        (Frame(DATA, 0, 1, 0, 0, 2**63).pack(), "bytes, which has 40"),
        (spoilt(Frame(DATA, 0, 0, 0, 0, 5), 10, "<H", 1), "no frame"),
    ],
)
def test_unexpected_frames_are_rejected_by_name(head, why):
    assert len(head) == HEAD.size
    frames, refused = read(head + b"and then much more" * 10, Incoming(BODIES), at_once())
    assert frames == []
    assert why in refused


def test_a_frame_that_comes_twice_is_rejected():
    frame = Frame(TAKEN, 1, 2, 0)
    frames, refused = read(sent([(frame, b"")] * 2), Incoming(BODIES), at_once())
    assert frames == [(frame, b"")]
    assert refused == "taken 0 of end 2 on channel 1, and 1 is due"


def test_the_peer_may_close_at_any_time():
    inbox = Inbox(Incoming(BODIES), FrameRecorder())
    inbox.read(Pieces(Frame(BYE, 0, 0, 0).pack(), at_once()))
    assert inbox.ended


def signed(talk, signing):
    return b"".join(
        (head := frame.pack()) + body + signing.tag(head, [body]) for frame, body in talk
    )


def both_sides(nonces):
    return (Signing(KNOWN, nonces, connects=connects) for connects in (True, False))


@LAW
@given(talk=talks(), at=st.integers(0), byte=st.integers(1, 255), random=st.randoms())
def test_with_a_mac_any_change_is_rejected(talk, at, byte, random):
    caller, listener = both_sides(bytes(2 * NONCE))
    data = bytearray(signed(talk, caller))
    assert read(bytes(data), Incoming(BODIES), divided(random), listener) == (talk, "")
    if not data:
        return
    data[at % len(data)] ^= byte
    _, listener = both_sides(bytes(2 * NONCE))
    frames, _ = read(bytes(data), Incoming(BODIES), divided(random), listener)
    place = at % len(data)
    before = list(itertools.accumulate(HEAD.size + len(body) + TAG for _, body in talk))
    assert frames == talk[: sum(end <= place for end in before)]


def test_with_a_mac_frames_of_different_channels_keep_their_order():
    caller, listener = both_sides(bytes(2 * NONCE))
    talk = [(Frame(TAKEN, 1, 2, 0), b""), (Frame(COUNT, 3, 0, 0), b"")]
    data, half = signed(talk, caller), HEAD.size + TAG
    frames, refused = read(data[half:] + data[:half], Incoming(BODIES), at_once(), listener)
    assert (frames, "MAC is wrong" in refused) == ([], True)


@pytest.mark.parametrize("other", ["its own direction", "another connection"])
def test_a_frame_is_rejected_on_another_connection(other):
    talk = [(Frame(TAKEN, 1, 2, 0), b"")]
    _, listener = both_sides(bytes(2 * NONCE))
    strange, _ = both_sides(b"n" * 2 * NONCE)
    data = signed(talk, listener if other == "its own direction" else strange)
    frames, refused = read(data, Incoming(BODIES), at_once(), listener)
    assert (frames, "MAC is wrong" in refused) == ([], True)


def test_a_body_that_is_altered_is_not_delivered():
    caller, listener = both_sides(bytes(2 * NONCE))
    head = Frame(DATA, 0, 0, 0, 0, 5).pack()
    with pytest.raises(ProtocolError, match="altered on the way"):
        listener.check(head, [b"54321"], caller.tag(head, [b"12345"]))
