"""An unreliable link between two hosts: a proxy which cuts connections at given points."""

import random
import socket
import struct
import threading
from contextlib import suppress

from shoal.runtime.net.sockets import listen

RESET = struct.pack("ii", 1, 0)  # lingering for no time: the other side sees a reset


class Proxy:
    """Forwards to `address`, and cuts all connections after given numbers of bytes."""

    def __init__(self, address, cuts=()):
        self._target, self._cuts = address, list(cuts)
        self._passed, self._lock = 0, threading.Lock()
        self._pairs = []
        self.is_open, self.cut_count = True, 0
        self._listener = listen()
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                one, _ = self._listener.accept()
                if not self.is_open:
                    one.close()
                    continue
                other = socket.create_connection(self._target)
            except OSError:
                return
            self._pairs.append((one, other))
            for a, b in ((one, other), (other, one)):
                threading.Thread(target=self._forward, args=(a, b), daemon=True).start()

    def _forward(self, a, b):
        with suppress(OSError):
            while data := a.recv(65536):
                keep = self._counted(len(data))
                b.sendall(data[:keep])
                if keep < len(data):
                    self.cut()
                    return
            b.shutdown(socket.SHUT_WR)

    def _counted(self, count):
        """The number of bytes that pass before the next cut."""
        with self._lock:
            if self._cuts and self._passed + count > self._cuts[0]:
                keep = max(0, self._cuts.pop(0) - self._passed)
                self._passed = 0
                return keep
            self._passed += count
            return count

    def cut(self):
        """Reset every connection."""
        self.cut_count += 1
        pairs, self._pairs = self._pairs, []
        for sock in (s for pair in pairs for s in pair):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def close(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def some_cuts(seed, count, most):
    """The number of bytes before each cut."""
    dice = random.Random(seed)
    return [dice.randrange(1, most) for _ in range(count)]
