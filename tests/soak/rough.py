"""An unreliable link for a host, which delays frames and drops some.

Kernels can do that (netem), but not every machine's has it. So here a process carries what goes
between a host's link and a second one, which is on the bridge in its place:

    python tests/soak/rough.py LINK LINK SECONDS LOST SEED
"""

import heapq
import random
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

DELAY, LOST = 0.02, 0.02  # seconds, give or take a half; chance
ALL, HEADERS, SOL_PACKET = 0x0003, 15, 263  # as Linux has them: any protocol, PACKET_VNET_HDR
MOST = 1 << 17  # bytes of a frame at most: the kernel cuts large ones only at a real wire


@contextmanager
def rough_link(link, bridge, seed=0):
    """Delay and drop frames between a link and its bridge within this context."""
    inner, outer = f"{link}i"[-15:], f"{link}o"[-15:]
    _ip("link", "add", inner, "type", "veth", "peer", "name", outer)
    words = [sys.executable, __file__, link, inner, DELAY, LOST, seed]
    try:
        _ip("link", "set", link, "nomaster")
        for one in (inner, outer):
            _ip("link", "set", one, "up")
        _ip("link", "set", outer, "master", bridge)
        carrier = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True)
        try:
            yield carrier
        finally:
            carrier.terminate()
            carrier.wait()
    finally:
        _ip("link", "del", inner)
        _ip("link", "set", link, "master", bridge)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def carry(names, delay, lost, chance):
    """Carry frames between two links until SIGTERM; the numbers of frames received and dropped."""
    ends = [_open(name) for name in names]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    late, stop, count, dropped = [], [], 0, 0
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    while not stop:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, _, to, frame = heapq.heappop(late)
            _send(to, frame)
        wait = min(0.2, max(0.0, late[0][0] - now)) if late else 0.2
        for one in select.select(ends, [], [], wait)[0]:
            frame, (_, _, kind, *_) = one.recvfrom(MOST)
            if kind == socket.PACKET_OUTGOING:  # what this process has sent itself
                continue
            count += 1
            if chance.random() < lost:
                dropped += 1
                continue
            due = time.monotonic() + delay * chance.uniform(0.5, 1.5)
            heapq.heappush(late, (due, count, other[one], frame))
    return count, dropped


def _open(name):
    """A socket for whole frames, each with what its network card was left to do."""
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    one.setsockopt(SOL_PACKET, HEADERS, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
    one.bind((name, ALL))
    _promiscuous(one, name)
    return one


def _promiscuous(one, name):
    """Also receive frames for other hosts behind the link."""
    index = socket.if_nametoindex(name).to_bytes(4, sys.byteorder)
    one.setsockopt(SOL_PACKET, 1, index + (1).to_bytes(2, sys.byteorder) + bytes(10))


def _send(to, frame):
    try:
        to.send(frame)
    except OSError:  # the link is down, or full: it is lost, as frames are
        return


def main():
    one, two, *rest = sys.argv[1:]
    delay, lost, seed = map(float, rest)
    count, dropped = carry((one, two), delay, lost, random.Random(seed))
    print(f"{count} frames, {dropped} lost")


if __name__ == "__main__":
    main()
