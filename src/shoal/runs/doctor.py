"""Checks of this machine: devices, memory, Ray, packages and the versions that they ask for."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from shoal.runs.files.disk import free, megabytes

FINE, NOTE, BAD = "ok", "note", "BAD"
LEAST_MEMORY, LEAST_DISK, LEAST_FILES = 2 << 30, 1 << 30, 1024
OWN = "shoal"


@dataclass(frozen=True)
class Finding:
    """What a check has found: `BAD` means that something will not work."""

    subject: str
    state: str
    text: str


def examine() -> Iterator[Finding]:
    """All checks, the quick ones first."""
    yield Finding("Python", FINE, f"{platform.python_version()}, {sys.executable}")
    yield _memory()
    yield _shared_memory()
    yield _files()
    yield _disk()
    yield _cache()
    yield from _packages()
    yield _ray()
    yield _devices()


def _memory() -> Finding:
    cores = len(os.sched_getaffinity(0))
    there = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, StopIteration, ValueError):  # counts what caches would give back too
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(x for x in lines if x.startswith("MemAvailable"))
        there = int(line.split()[1]) * 1024
    state = FINE if there >= LEAST_MEMORY else NOTE
    return Finding("machine", state, f"{cores} cores, {megabytes(there)} of memory free")


def _shared_memory() -> Finding:
    """Processes share memory that has no name, so the size of /dev/shm doesn't matter."""
    try:
        file = os.memfd_create("shoal-doctor")
        try:
            os.truncate(file, mmap.PAGESIZE)
            with mmap.mmap(file, mmap.PAGESIZE) as block:
                block[0] = 1
        finally:
            os.close(file)
    except (OSError, AttributeError) as error:
        return Finding("shared memory", BAD, f"{error}: --backend processes can't run here")
    return Finding("shared memory", FINE, "for --backend processes")


def _files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = FINE if limit >= LEAST_FILES else NOTE
    hint = "" if state == FINE else "; with many workers raise it: ulimit -n 65536"
    return Finding("open files", state, f"at most {limit:,}{hint}")


def _disk() -> Finding:
    there = free(Path.cwd())
    state = FINE if there >= LEAST_DISK else NOTE
    return Finding("disk", state, f"{megabytes(there)} free here, where runs/ would be")


def _cache() -> Finding:
    from shoal.compile_cache import cache_folder

    folder = cache_folder()
    if folder is None:
        return Finding("compile cache", NOTE, "off: every start compiles again")
    return Finding("compile cache", FINE, str(folder))


def _packages() -> Iterator[Finding]:
    """The package itself, its extras, and versions that don't fit each other."""
    try:
        known = [Requirement(text) for text in metadata.requires(OWN) or []]
        extras = metadata.metadata(OWN).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        yield Finding("shoal", NOTE, "runs from its source, so its extras can't be checked")
        return
    yield Finding("shoal", FINE, metadata.version(OWN))
    clashes = dict(clashing(OWN))
    for extra in sorted({*extras} - {"test", "dev"}):
        needs = [x for x in known if x.marker and x.marker.evaluate({"extra": extra})]
        if any(_is_missing(one) for one in needs):
            yield Finding(extra, NOTE, f'not installed: pip install "shoal[{extra}]"')
        else:
            yield Finding(extra, FINE, ", ".join(f"{x.name} {_version(x.name)}" for x in needs))
    for package, text in clashes.items():
        yield Finding(package, BAD, text)


def _is_missing(one: Requirement) -> bool:
    """Whether a requirement, or what its own extras ask for, isn't installed."""
    if _version(one.name) is None:
        return True
    inner = [Requirement(text) for text in (metadata.requires(one.name) or []) if one.extras]
    return any(
        _is_missing(x)
        for x in inner
        if x.marker and any(x.marker.evaluate({"extra": extra}) for extra in one.extras)
    )


def clashing(root: str) -> Iterator[tuple[str, str]]:
    """Installed packages, reachable from one, whose installed requirements have other versions."""
    queue, seen = [root], set()
    while queue:
        name = queue.pop()
        if name in seen or _version(name) is None:
            continue
        seen.add(name)
        for text in metadata.requires(name) or []:
            with suppress(InvalidRequirement):
                one = Requirement(text)
                has = _version(one.name)
                is_asked = one.marker is None or one.marker.evaluate({"extra": ""})
                if has is None or not (is_asked or name == root):
                    continue
                queue.append(one.name)
                if is_asked and not one.specifier.contains(has, prereleases=True):
                    yield name, f"asks for {one.name}{one.specifier}, and {has} is installed"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ray() -> Finding:
    if _version("ray") is None:
        return Finding("Ray", NOTE, 'not installed: pip install "shoal[ray]" for --backend ray')
    address = os.environ.get("RAY_ADDRESS", "")
    where = f"RAY_ADDRESS={address}" if address else "no RAY_ADDRESS: a local one is started"
    return Finding("Ray", FINE, f"{_version('ray')}, {where}")


def _devices() -> Finding:
    import jax

    try:
        found = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    except RuntimeError as error:
        return Finding("devices", BAD, str(error).splitlines()[0])
    if shutil.which("nvidia-smi") and all(x.startswith("cpu") for x in found):
        hint = 'a GPU is here, and JAX sees none: pip install -U "jax[cuda12]"'
        return Finding("devices", NOTE, f"{', '.join(found)}; {hint}")
    return Finding("devices", FINE, ", ".join(found))
