"""Whether programs have kernels, and which of their parts do; imports nothing that is slow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import SettingError

VARIABLE = "SHOAL_KERNELS"
MODES = ("off", "auto", "interpret")


@dataclass(frozen=True)
class Launch:
    """How kernels are run; `is_tried`: each is compiled by itself before it is relied on."""

    interpret: bool = False
    is_tried: bool = True
    warps: int = 4
    name: str = "shoal_kernel"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a program that could be a kernel: what it is, and why it isn't one if it isn't."""

    name: str
    source: str
    why_not: str = ""

    def __str__(self) -> str:
        runs = f"XLA: {self.why_not}" if self.why_not else "a kernel"
        where = f" ({self.source})" if self.source else ""
        return f"{self.name}{where} runs as {runs}"


Report = Callable[[Part], None]


def mode() -> str:
    """Whether kernels are made, as the environment says."""
    found = os.environ.get(VARIABLE, "off")
    if found not in MODES:
        raise SettingError(
            f"{VARIABLE}={found} is none of {', '.join(MODES)}",
            "Set it to `auto` to run kernels on GPUs that can, or leave it out.",
        )
    return found


def launch_on(devices: Sequence[Any]) -> Launch | None:
    """How kernels run on these devices, or None where they don't."""
    chosen = mode()
    if chosen == "interpret":
        return Launch(interpret=True)
    gpus = [d for d in devices if d.platform == "gpu"]
    fit = gpus and len(gpus) == len(devices) and all(map(_has_triton, gpus))
    return Launch() if chosen == "auto" and fit else None


def _has_triton(device: Any) -> bool:
    """Whether a GPU is NVIDIA's and new enough for JAX's Triton (Ampere and later)."""
    capability = str(getattr(device, "compute_capability", ""))
    return capability.replace(".", "").isdigit() and float(capability) >= 8.0
