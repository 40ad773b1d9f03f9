"""Very many spoilt streams of frames and hellos: none is believed, none raises, none costs.

`make test-fuzz` runs a million; FUZZ_CASES and FUZZ_SEED say otherwise.
"""

import os
import random
import sys
from resource import RUSAGE_SELF, getrusage

import pytest

from conformance.reading import read, sent
from shoal.runtime.net import wire
from shoal.runtime.net.wire import (
    CLAIM,
    DATA,
    GRANT,
    HEAD,
    HELLO,
    NONCE,
    TAKEN,
    Claim,
    Credentials,
    Frame,
    Incoming,
    ProtocolError,
    Signing,
)

CASES, SEED = int(os.environ.get("FUZZ_CASES", "1000000")), int(os.environ.get("FUZZ_SEED", "0"))
BODIES = {
    (DATA, 0, 0): 16,
    (DATA, 1, 0): 64,
    (TAKEN, 0, 0): 0,
    (GRANT, 2, 3): 0,
}
KNOWN = Credentials(b"t" * 32, wire.digest("channels"))


def talk(dice):
    """Frames as a worker would send them."""
    numbers, found = dict.fromkeys(BODIES, 0), []
    for key in dice.choices(list(BODIES), k=dice.randint(1, 5)):
        body = dice.randbytes(BODIES[key])
        found.append((Frame(*key, numbers[key], dice.getrandbits(60), len(body)), body))
        numbers[key] += 1
    return found


def spoil(data, dice):
    """The bytes with something wrong, and where the first wrong one may be."""
    at = dice.randrange(len(data))
    match dice.randrange(6):
        case 0:
            data[at] ^= dice.randint(1, 255)
        case 1:
            del data[at : at + dice.randint(1, 40)]
        case 2:
            data[at:at] = dice.randbytes(dice.randint(1, 80))
        case 3:
            data[at:] = dice.randbytes(dice.randint(1, 200))
        case 4:
            data[at:at] = data[: dice.randint(1, len(data))]
        case _:
            for _ in range(dice.randint(1, 8)):
                one = dice.randrange(len(data))
                data[one] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
                at = min(at, one)
    return at


def check_stream(dice):
    found = talk(dice)
    data = bytearray(sent(found))
    wrong = spoil(data, dice)
    sizes = iter(lambda: dice.randint(1, 120), 0)
    got, refused = read(bytes(data), Incoming(BODIES), sizes)
    before = [i for i, _ in enumerate(found) if end_of(found, i) <= wrong]
    assert got[: len(before)] == found[: len(before)]
    numbers = dict.fromkeys(BODIES, 0)
    for frame, body in got:
        key = frame[:3]
        assert frame.number == numbers[key] or (key[0] == TAKEN and frame.number > numbers[key])
        assert len(body) == frame.length == BODIES[key]
        numbers[key] = frame.number + 1
    return bool(refused)


def check_signed(dice):
    found, signing = talk(dice), (Signing(KNOWN, b"", connects=one) for one in (True, False))
    caller, listener = signing
    parts = [(frame.pack(), body) for frame, body in found]
    data = bytearray().join(head + body + caller.tag(head, [body]) for head, body in parts)
    spoil(data, dice)
    sizes = iter(lambda: dice.randint(1, 120), 0)
    got, _ = read(bytes(data), Incoming(BODIES), sizes, listener)
    assert got == found[: len(got)], "what was altered is believed"


def end_of(found, index):
    return sum(HEAD.size + len(body) for _, body in found[: index + 1])


def check_handshake(dice):
    nonce, mine = dice.randbytes(NONCE), dice.randbytes(NONCE)
    right = wire.pack_claim(KNOWN, Claim(1, 0, 0), wire.hello(nonce), mine)
    claim = bytearray(right)
    assert wire.check_claim(KNOWN, 0, nonce, right)[0] == Claim(1, 0, 0)
    spoil(claim, dice)
    form = dice.choice((CLAIM, HELLO))
    for data in (
        bytes(claim[: CLAIM.size]), dice.randbytes(form.size), dice.randbytes(dice.randint(0, 200)),
    ):  # fmt: skip
        try:
            found, _ = wire.check_claim(KNOWN, 0, nonce, data)
        except ProtocolError:
            continue
        assert found == Claim(1, 0, 0)
        assert data[-64:] == right[-64:], "a proof that was altered is believed"


@pytest.mark.fuzz
def test_spoilt_streams_do_no_harm():
    dice, refused = random.Random(SEED), 0
    before = 0
    for case in range(CASES):
        if case % 8 == 0:
            check_handshake(dice)
            check_signed(dice)
        else:
            refused += check_stream(dice)
        if case == 1000:
            before = getrusage(RUSAGE_SELF).ru_maxrss
    grown = getrusage(RUSAGE_SELF).ru_maxrss - before
    assert grown < 8 << 10, "memory grows"
    assert refused > CASES / 2
    sys.stderr.write(
        f"{CASES:,} cases, {refused:,} streams refused, memory grew by {grown:,} KiB\n"
    )
