"""A cluster from a TOML file: hosts, their cores and accelerators, and the link between them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from shoal.errors import SettingError
from shoal.planning.cluster import Cluster, Device, Host
from shoal.shapes import Between, Count, misfit
from shoal.simulation.profile import Message

Bytes = Annotated[float, Between(1, 1e18)]
EXAMPLE = '[[hosts]] with name = "a" and cpus = 16, and perhaps gpus = 1'
LATENCY_S, RATE = 1e-4, 1.25e9  # of a link that the file doesn't describe: 10 Gb/s


class HostTable(TypedDict):
    """A host of the file, or `count` of them that are alike; memory in bytes."""

    name: str
    cpus: Count
    count: NotRequired[Count]
    gpus: NotRequired[Annotated[int, Between(0, 1024)]]
    memory: NotRequired[Bytes]
    gpu_memory: NotRequired[Bytes]


class LinkTable(TypedDict):
    """The link between two hosts: seconds for a small message, and bytes a second."""

    latency: Annotated[float, Between(0, 1e3)]
    bandwidth: Bytes


class ClusterTable(TypedDict):
    """A cluster file."""

    hosts: list[HostTable]
    link: NotRequired[LinkTable]


@dataclass(frozen=True)
class ClusterFile:
    """A cluster, and what a message between its hosts costs."""

    cluster: Cluster
    link: Message


def load_cluster(path: Path) -> ClusterFile:
    """Read a cluster file; a SettingError says what is wrong with it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise SettingError(f"{path} can't be read: {why}", "Give a TOML file.") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path} is no TOML: {error}", f"Write {EXAMPLE}.") from error
    if not data.get("hosts"):
        raise SettingError(f"{path} names no hosts, and so no devices", f"Write {EXAMPLE}.")
    known = {"": ClusterTable, "link": LinkTable, "hosts": HostTable}
    for where, kind in known.items():
        tables = data if not where else data.get(where, {})
        for table in tables if isinstance(tables, list) else [tables]:
            odd = sorted(set(table) - set(kind.__annotations__)) if isinstance(table, dict) else []
            if odd:
                names = ", ".join(kind.__annotations__)
                raise SettingError(f"{path} says `{odd[0]}`, which is unknown", f"Known: {names}.")
    if wrong := misfit(data, ClusterTable):
        raise SettingError(f"{path}: {wrong}", f"Write {EXAMPLE}.")
    hosts = [host for table in data["hosts"] for host in _hosts(table)]
    if len({host.name for host in hosts}) < len(hosts):
        raise SettingError(f"{path} names a host twice", "Use `count` for hosts that are alike.")
    link = data.get("link", {"latency": LATENCY_S, "bandwidth": RATE})
    return ClusterFile(Cluster(tuple(hosts)), Message(link["latency"], link["bandwidth"]))


def _hosts(table: HostTable) -> list[Host]:
    count = table.get("count", 1)
    devices = [Device("cpu", i) for i in range(table["cpus"])]
    memory = int(table.get("gpu_memory", 0))
    devices += [Device("gpu", i, memory) for i in range(table.get("gpus", 0))]
    names = [table["name"]] if count == 1 else [f"{table['name']}{i}" for i in range(count)]
    return [Host(n, table["cpus"], tuple(devices), int(table.get("memory", 0))) for n in names]
