"""Imports of modules that are loaded when they are first used, or that users name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def loaded_later(*names: str) -> Iterator[None]:
    """Give what is imported inside a stand-in for these modules, which loads them when used."""
    stands_in = {name: ModuleType(name) for name in names if name not in sys.modules}
    for name, module in stands_in.items():
        module.__getattr__ = partial(_first_use, name)  # type: ignore[method-assign]
    sys.modules |= stands_in
    try:
        yield
    finally:
        for name, module in stands_in.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def import_named(name: str) -> ModuleType:
    """Import a module that the user names, which may be a file in the current folder.

    Only then does Python look there, and there last: a folder of others may hold files that are
    called as optional packages are.
    """
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    return import_module(name)


def _first_use(name: str, attribute: str) -> Any:
    if attribute.startswith("__"):  # asked by the import system itself
        raise AttributeError(attribute)
    return getattr(import_module(name), attribute)
