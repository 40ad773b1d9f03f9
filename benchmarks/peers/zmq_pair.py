"""ZeroMQ between two processes over ipc: stream with a size and a count, else round trips.

Prints the seconds from the first message to the last. Sends without copying where ZeroMQ can.
"""

import os
import sys
import tempfile
import time

import numpy as np
import zmq

WARM = 16  # warm-up moves


def stream(address: str, size: int, count: int) -> float:
    """Seconds for `count` messages after the warm-up."""
    if os.fork() == 0:
        socket = zmq.Context().socket(zmq.PUSH)
        socket.set_hwm(8)
        socket.connect(address)
        x = np.ones(size, np.uint8)
        for _ in range(count + WARM):
            socket.send(x, copy=False)
        socket.close()
        socket.context.term()
        os._exit(0)
    socket = zmq.Context().socket(zmq.PULL)
    socket.set_hwm(8)
    socket.bind(address)
    for _ in range(WARM):
        socket.recv(copy=False)
    start = time.perf_counter()
    for _ in range(count):
        assert socket.recv(copy=False).buffer[-1] == 1
    return time.perf_counter() - start


def rally(address: str, count: int) -> float:
    """Seconds for `count` round trips after the warm-up."""
    if os.fork() == 0:
        socket = zmq.Context().socket(zmq.PAIR)
        socket.connect(address)
        for _ in range(count + WARM):
            socket.send(socket.recv())
        socket.close()
        socket.context.term()
        os._exit(0)
    socket = zmq.Context().socket(zmq.PAIR)
    socket.bind(address)
    x, start = bytes(64), 0.0
    for number in range(count + WARM):
        start = time.perf_counter() if number == WARM else start
        socket.send(x)
        socket.recv()
    return time.perf_counter() - start


if __name__ == "__main__":
    *sized, count = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/line"
        print(stream(address, *sized, count) if sized else rally(address, count), flush=True)
    os.wait()
