"""This machine as a cluster of one host, and checks of its resources."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import jax

from shoal.errors import PlaceError, RunError
from shoal.graph.words import size_text
from shoal.planning.cluster import Cluster, Device, Host

UNKNOWN = 2**62  # bytes


def this_machine() -> Cluster:
    """The cores and JAX devices of this machine."""
    found = list(jax.devices("cpu"))
    if jax.default_backend() == "gpu":
        found += jax.devices("gpu")
    devices = tuple(
        Device(d.platform, d.id if d.platform != "cpu" else i, _memory(d))
        for i, d in enumerate(found)
    )
    left = free_memory()
    memory = left if left < UNKNOWN else 0
    return Cluster((Host("host0", os.cpu_count() or 1, _numbered(devices), memory),))


def _numbered(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Devices, indexed among those of their kind."""
    kinds = [d.kind for d in devices]
    return tuple(Device(d.kind, kinds[:i].count(d.kind), d.memory) for i, d in enumerate(devices))


def _memory(device: Any) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int((stats or {}).get("bytes_limit", 0))


def oom_kills() -> int:
    """How often the kernel's OOM killer has killed a process."""
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(file).read_text().splitlines()
        except OSError:
            continue
        found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if found:
            return int(found[0])
    return 0


def check_memory(size: int) -> int:
    """Return `size` if that much memory is free, or raise."""
    left = free_memory()
    if size > left:
        raise PlaceError(
            f"the plan's channels need {size_text(size)} of shared memory, "
            f"and {size_text(left)} are free",
            "Use fewer environments, shorter loops or fewer workers.",
        )
    return size


def free_memory() -> int:
    """Bytes of memory that are free, also within this process's control group."""
    left = UNKNOWN
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                left = int(line.split()[1]) * 1024
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        left = min(left, int(most) - used) if most != "max" else left
    except (OSError, ValueError):
        pass
    return left


def check_port(address: str) -> str:
    """Check that `address`, such as "127.0.0.1:1234", is free; JAX would crash otherwise."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise RunError(
                f"{address}, the address of a data-parallel group, is taken: {error.strerror}",
                "Another process has just taken the port: run again.",
            ) from error
    return address
