"""Very many spoilt streams of frames and greetings: none is believed, none raises, none costs.

`make test-fuzz` runs a million; FUZZ_CASES and FUZZ_SEED say otherwise.
"""

import io
import os
import random
import sys
from contextlib import suppress
from resource import RUSAGE_SELF, getrusage

import pytest

from shoal.runtime.net import handshake as greeting
from shoal.runtime.net import reconnect as rejoining
from shoal.runtime.net.framing import (
    BYE,
    DATA,
    GRANT,
    HEAD,
    TAKEN,
    Frame,
    Part,
    Reading,
    Refused,
    Terms,
    Whole,
    on_bytes,
)
from shoal.runtime.net.handshake import CLAIM, HELLO, NONCE, Credentials, ProtocolError

CASES, SEED = int(os.environ.get("FUZZ_CASES", "1000000")), int(os.environ.get("FUZZ_SEED", "0"))
BODIES = {
    (DATA, 0, 0): (16, 16),
    (DATA, 1, 0): (0, 64),
    (TAKEN, 0, 0): (0, 0),
    (GRANT, 2, 3): (0, 0),
}
TERMS, LONGEST = Terms.of(BODIES), 64
KNOWN = Credentials(b"t" * 32, greeting.digest("channels"))


def talk(dice):
    """Frames as a worker would send them."""
    numbers, found = dict.fromkeys(BODIES, 0), []
    for key in dice.choices(list(BODIES), k=dice.randint(1, 5)):
        body = dice.randbytes(dice.randint(*BODIES[key]))
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
    sent = talk(dice)
    data = bytearray().join(frame.packed() + body for frame, body in sent)
    wrong = spoil(data, dice)
    state, got, body, refused = Reading.start(TERMS), [], b"", 0
    rest = bytes(data)
    while rest:
        count = dice.randint(1, 120)
        state, events = on_bytes(state, rest[:count])
        rest = rest[count:]
        for event in events:
            assert not refused, "something after a refusal"
            if isinstance(event, Part):
                body += event.data
                assert len(body) <= LONGEST
            elif isinstance(event, Whole):
                got.append((event.frame, body))
                assert len(body) == event.frame.length
                body = b""
            elif isinstance(event, Refused):
                refused += 1
        assert len(state.head) < HEAD.size
        assert state.left <= LONGEST
    before = [i for i, _ in enumerate(sent) if end_of(sent, i) <= wrong]
    assert got[: len(before)] == sent[: len(before)]
    numbers = dict.fromkeys([*BODIES, (BYE, 0, 0)], 0)
    for frame, _ in got:
        assert frame.number == numbers[frame[:3]], "out of order"
        numbers[frame[:3]] += 1
    return refused


def end_of(sent, index):
    return sum(HEAD.size + len(body) for _, body in sent[: index + 1])


def check_greeting(dice):
    nonce, mine = dice.randbytes(NONCE), dice.randbytes(NONCE)
    claim = bytearray(greeting.claim(KNOWN, (1, 0, 0), greeting.hello(nonce), mine))
    who = greeting.welcome(KNOWN, 0, nonce, bytes(claim)).who
    assert who == 1
    spoil(claim, dice)
    claim = claim[: CLAIM.size]
    form = dice.choice((CLAIM, HELLO))
    for said in (bytes(claim), dice.randbytes(form.size), dice.randbytes(dice.randint(0, 200))):
        try:
            found = greeting.welcome(KNOWN, 0, nonce, said).who
        except ProtocolError:
            continue
        # What isn't looked at may differ; what was proved may not.
        assert found == 1
        assert said[-96:] == greeting.claim(KNOWN, (1, 0, 0), greeting.hello(nonce), mine)[-96:]


def check_table(dice):
    table = {(TAKEN, dice.randrange(9), dice.randrange(9)): dice.getrandbits(60) for _ in range(5)}
    data = bytearray(rejoining.packed(table))
    assert opened(bytes(data), 9) == table
    spoil(data, dice)
    with suppress(ProtocolError, EOFError):
        assert len(opened(bytes(data), 9)) <= 9


def opened(data, most):
    stream = io.BytesIO(data)

    def read(count):
        assert count <= most * rejoining.ENTRY.size
        some = stream.read(count)
        if len(some) < count:
            raise EOFError
        return some

    return rejoining.opened(read, most)


@pytest.mark.fuzz
def test_spoilt_streams_do_no_harm():
    dice, refused = random.Random(SEED), 0
    before = 0
    for case in range(CASES):
        if case % 8 == 0:
            check_greeting(dice)
            check_table(dice)
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
