"""A host stage's Python function as a plain call, without JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Given:
    """An argument that is the same in every call."""

    value: Any


@dataclass(frozen=True, slots=True)
class PlainCall:
    """A function of flat arrays to flat arrays, with its declared specs."""

    function: Callable[..., Any]
    fixed: tuple[Any, ...]
    specs: tuple[tuple[tuple[int, ...], str], ...]

    def __call__(self, *args: Any) -> list[Any]:
        """Call the function and check its results."""
        found = self.function(*self.fixed, *map(np.asarray, args))
        results = list(found) if isinstance(found, tuple | list) else [found]
        if len(results) != len(self.specs):
            raise ValueError(f"it returned {len(results)} arrays, but promised {len(self.specs)}")
        return [as_spec(x, *spec) for x, spec in zip(results, self.specs, strict=True)]


@dataclass(frozen=True, slots=True)
class Task:
    """One host stage of a fragment: its call, and which values go in and come out."""

    stage: str
    source: str
    args: tuple[str | Given, ...]
    outs: tuple[str | None, ...]
    call: Callable[..., list[Any]]

    def run(self, env: dict[str, Any]) -> None:
        """Call it with what `env` holds, and enter what it returns."""
        args = [a.value if isinstance(a, Given) else env[a] for a in self.args]
        for name, x in zip(self.outs, self.call(*args), strict=True):
            if name is not None:
                env[name] = x


def as_spec(x: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """`x` as an array of that dtype; its shape must be right."""
    array = np.asarray(x)
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(
            f"it returned {array.dtype}{list(array.shape)}, but promised {dtype}{list(shape)}"
        )
    return array.astype(dtype, copy=False)
