"""Profiles kept between runs: one for each loop, and what messages cost on a machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax

from shoal.compile_cache import cache_folder
from shoal.errors import ShoalError
from shoal.graph.ir import Graph
from shoal.planning.cluster import Cluster
from shoal.search.calibrate import dispatch_seconds, quiet
from shoal.search.messages import message_cost
from shoal.simulation.profile import Profile
from shoal.simulation.script import loop_print

MACHINE = "machine"
Say = Callable[[str], None]


def machine_name() -> str:
    """What a profile's times depend on: the processor, the cores, the accelerators, and JAX."""
    folder = cache_folder()
    processor = folder.name.removeprefix("xla-") if folder else "unknown"
    kinds = sorted({d.device_kind for d in jax.devices() if d.platform != "cpu"})
    cores = len(os.sched_getaffinity(0))
    return ", ".join([f"{cores} cores", processor, *kinds, f"jax {jax.__version__}"])


def profile_path(loop: str) -> Path | None:
    """The file of a loop's profile on this machine; None if nothing is kept."""
    if (folder := cache_folder()) is None:
        return None
    return folder.with_name(folder.name.replace("xla-", "profiles-")) / f"{loop}.json"


def kept_profile(graph: Graph, say: Say = quiet) -> Profile | None:
    """The kept profile of a loop; one of another machine or loop is not used, which is said."""
    loop = loop_print(graph)
    path = profile_path(loop)
    if path is None or not path.exists():
        return None
    try:
        found = Profile.load(path)
    except ShoalError as error:
        say(f"{error.what}; measuring again")
        return None
    if wrong := found.misfit(loop, machine_name()):
        say(f"the profile {path} is not used: {wrong}; measuring again")
        return None
    return found


def keep(profile: Profile) -> None:
    """Keep a profile for later runs, if there is a folder for it."""
    if (path := profile_path(profile.loop)) is not None:
        with suppress(OSError):
            profile.save(path)


def machine_profile(graph: Graph) -> Profile:
    """A profile that only says what calls, and messages measured before, cost on this machine."""
    name, path = machine_name(), profile_path(MACHINE)
    known = Profile(MACHINE, name, dispatch=0.0)
    if path is not None and path.exists():
        with suppress(ShoalError):
            found = Profile.load(path)
            known = found if not found.misfit(MACHINE, name) else known
    if not known.dispatch:
        known = replace(known, dispatch=dispatch_seconds())
    return replace(known, loop=loop_print(graph))


def with_messages(profile: Profile, backend: str, cluster: Cluster, say: Say) -> Profile:
    """The profile with what messages between workers of a backend cost, kept for all loops."""
    if backend in profile.messages:
        return profile
    say(f"measuring messages between {backend}")
    messages = {**profile.messages, backend: message_cost(backend, cluster)}
    keep(Profile(MACHINE, profile.machine, {}, messages, profile.dispatch))
    return replace(profile, messages=messages)
