"""This machine as a cluster of one host."""

from __future__ import annotations

import os
from typing import Any

import jax

from shoal.planning.cluster import Cluster, Device, Host


def this_machine() -> Cluster:
    """The cores and JAX devices of this machine."""
    found = list(jax.devices("cpu"))
    if jax.default_backend() == "gpu":
        found += jax.devices("gpu")
    devices = tuple(
        Device(d.platform, d.id if d.platform != "cpu" else i, _memory(d))
        for i, d in enumerate(found)
    )
    return Cluster((Host("host0", os.cpu_count() or 1, _numbered(devices)),))


def _numbered(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Devices with their index among those of their kind."""
    kinds = [d.kind for d in devices]
    return tuple(Device(d.kind, kinds[:i].count(d.kind), d.memory) for i, d in enumerate(devices))


def _memory(device: Any) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int((stats or {}).get("bytes_limit", 0))
