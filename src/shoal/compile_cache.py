"""JAX's compilation cache on disk, so that a program is compiled only once."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

VARIABLE = "SHOAL_CACHE"
OFF = ("off", "0", "no", "false")
LEAST_SECONDS = 0.1  # compiled sooner than this, a program isn't worth a file


def use_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder from now on.

    `SHOAL_CACHE` names another folder, or turns it off. A cache that is set for JAX itself stays.
    """
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return  # nothing can be kept there, and nothing depends on it
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def cache_folder() -> Path | None:
    """The folder of compiled programs, one per processor type; None if they aren't kept.

    Machines that share a home directory may differ in their instruction sets.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() in OFF:
        return None
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    top = Path(wanted).expanduser() if wanted else caches / "shoal"
    return top / f"xla-{_processor()}"


def _processor() -> str:
    """A short hash of this machine's processor and its instruction sets."""
    description = platform.machine() + platform.processor()
    if (info := Path("/proc/cpuinfo")).exists():
        first = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        names = ("model name", "flags", "Features", "CPU part")
        description += "".join(line for line in first.splitlines() if line.startswith(names))
    return hashlib.sha256(description.encode()).hexdigest()[:8]
