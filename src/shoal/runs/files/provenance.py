"""Where a run comes from: command, time, host, git commit and package versions, for `run.json`."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

GIT_TIMEOUT_S = 2.0
PACKAGES = (
    *("shoal", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "flax", "gymnax", "brax"),
    *("gymnasium", "ale-py", "mujoco", "envpool", "pettingzoo", "jaxmarl", "ray"),
)


def provenance() -> dict[str, Any]:
    """What is known of this process, as plain data."""
    return {
        "started": now(),
        "command": command(),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "devices": [str(device) for device in jax.devices()],
        "packages": versions(),
        "git": git(Path.cwd()),
    }


def now() -> str:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command() -> str:
    """The command line of this process, as a shell takes it."""
    first, *rest = sys.argv or [""]
    is_shoal = Path(first).name in ("shoal", "__main__.py", "entry.py")
    return shlex.join(["shoal" if is_shoal else first, *rest])


def versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers may depend on, of those installed."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git(folder: Path) -> dict[str, Any]:
    """The commit of the repository that a folder is in, and whether files differ from it."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    """The output of a git command; None if it failed."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True,
            timeout=GIT_TIMEOUT_S, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
        return done.stdout.strip()
    return None
