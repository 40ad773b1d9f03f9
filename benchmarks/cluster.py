"""Benchmarks messages between two hosts: Shoal's channels, Ray's object store and ZeroMQ.

The hosts are two network namespaces of this machine, joined by a bridge; where they can't be made,
loopback is used, and said. Streams of 64 KiB and 4 MiB, and round trips of 64 bytes; each side may
have the same number of messages in flight, and each reader looks at every message. Rounds alternate
between the sides, in one Ray cluster that is there throughout; the table shows medians.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from conformance import spaces  # noqa: E402

MIDDLE, LARGE, TRIP = 64 << 10, 4 << 20, 0
COUNTS = {MIDDLE: 40_000, LARGE: 1_500, TRIP: 20_000}
SLOTS = {MIDDLE: 32, LARGE: 4, TRIP: 2}
RAYS = 20  # Ray is sent this many times fewer messages
SIDES = ("Shoal", "ZeroMQ", "Ray", "asyncio", "plain socket")
PORTS = itertools.count(21_000, 2)
LOOPBACK = ("127.0.0.1", "127.0.0.1")
Row = dict[int, tuple[float, float]]  # by size: messages/s, CPU µs for one on both sides


@contextmanager
def hosts(names: list[str]) -> Iterator[bool]:
    """Start two hosts, with Ray if it is measured; yields whether they are separate."""
    if not spaces.is_allowed():
        Console().print("no network namespaces here: this is loopback, without Ray")
        names[:] = [name for name in names if name != "Ray"]
        yield False
        return
    with spaces.raylets(2, cpus=2) if "Ray" in names else spaces.hosts(2):
        yield True


def start(host: int | None, way: str, *words: object) -> subprocess.Popen[str]:
    """Start one side's process, on one of the hosts or here."""
    command = [sys.executable, str(HERE / "peers" / "sides.py"), way, *map(str, words)]
    how = {"stdout": subprocess.PIPE, "text": True}
    return (
        subprocess.Popen(command, **how) if host is None else spaces.inside(host, *command, **how)
    )


def measured(side: str, size: int, count: int, *, apart: bool) -> tuple[float, float]:
    """Messages/s, and CPU µs per message on both sides."""
    addresses = (spaces.address(0), spaces.address(1)) if apart else LOOPBACK
    count = max(50, count // RAYS) if side == "Ray" else count
    port = 6379 if side == "Ray" else next(PORTS)
    words = side, size, count, SLOTS[size], *addresses, port
    parts = [(0, "reads")] if side == "Ray" else [(0, "writes"), (1, "reads")]
    running = [start(host if apart else None, way, *words) for host, way in parts]
    try:
        reports = [one.communicate(timeout=300)[0].split() for one in reversed(running)]
    finally:
        for one in running:
            one.kill()
    return count / float(reports[0][0]), 1e6 * sum(float(cpu) for _, cpu in reports) / count


def measure(names: list[str], rounds: int, share: int) -> dict[str, list[Row]]:
    """The results of each side in each round."""
    found: dict[str, list[Row]] = {}
    with hosts(names) as apart:
        for number, name in itertools.product(range(rounds), names):
            Console(stderr=True).print(f"round {number + 1} of {rounds}: {name}", style="dim")
            counts = {size: max(100, count // share) for size, count in COUNTS.items()}
            row = {size: measured(name, size, n, apart=apart) for size, n in counts.items()}
            found.setdefault(name, []).append(row)
    return found


def show(found: dict[str, list[Row]]) -> Table:
    """A row for each side: medians, and Shoal's speed over the side's."""
    table = Table(title="Between two hosts, medians of the rounds")
    titles = ("64 KiB/s", "Shoal is", "CPU µs", "4 MiB/s", "GiB/s", "Shoal is", "CPU µs")
    for title in ("", *titles, "round trips/s", "Shoal is", "CPU µs"):
        table.add_column(title, justify="right" if title else "left")
    for name, rows in found.items():
        cells = [name]
        for size in COUNTS:
            rate, cpu = (median(row[size][i] for row in rows) for i in range(2))
            ratios = [
                mine[size][0] / row[size][0]
                for mine, row in zip(found.get("Shoal", []), rows, strict=False)
            ]
            cells.append(f"{rate:,.0f}")
            cells += [f"{rate * size / 2**30:.2f}"] if size == LARGE else []
            cells += [f"{median(ratios):.2f}" if ratios and name != "Shoal" else ""]
            cells.append(f"{cpu:,.0f}" if cpu else "")
        table.add_row(*cells)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=SIDES, help="only these sides")
    said = parser.parse_args()
    names = list(said.only or SIDES)
    for name, module in (("ZeroMQ", "zmq"), ("Ray", "ray")):
        if name in names and find_spec(module) is None:
            Console().print(f"{name} is left out: it isn't installed")
            names.remove(name)
    found = measure(names, *((1, 10) if said.quick else (said.rounds, 1)))
    Console(width=140).print(show(found))


if __name__ == "__main__":
    main()
