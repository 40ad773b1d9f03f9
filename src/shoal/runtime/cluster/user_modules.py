"""Ships the user's own modules to workers with their configuration: no host needs a copy.

Ray's `runtime_env` takes local files only where the driver connects, before it has loaded them.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

OURS = Path(__file__).parents[2]


class Source(NamedTuple):
    """The source of a module: its text, its origin, and a package's search locations."""

    text: str
    origin: str
    parts: tuple[str, ...] | None = None


def own_modules() -> dict[str, Source]:
    """The loaded modules that belong to no installed package."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [*map(sysconfig.get_path, names), *site.getsitepackages()]
    installed += [site.getusersitepackages(), str(OURS)]
    roots = tuple(str(Path(folder).resolve()) + "/" for folder in installed)
    found = {}
    for name, module in list(sys.modules.items()):
        source = None if name == "__main__" else _source(module)
        if source is not None and not source.origin.startswith(roots):
            found[name] = source
    return found


def _source(module: ModuleType | None) -> Source | None:
    """A module's source, if it has one; a namespace package has an empty text."""
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return None
    parts = spec.submodule_search_locations
    within = None if parts is None else tuple(str(Path(part).resolve()) for part in parts)
    if not spec.has_location and within:
        return Source("", within[0] + "/", within)
    path = Path(spec.origin or "")
    if path.suffix != ".py" or not path.is_file():
        return None
    return Source(path.read_text(encoding="utf-8"), str(path.resolve()), within)


class Modules(MetaPathFinder, InspectLoader):
    """Imports modules that came with a worker's configuration, before others of that name."""

    def __init__(self, modules: Mapping[str, Sequence]) -> None:
        self._modules = {name: Source(*source) for name, source in modules.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a shipped module: from the same file if it is here, else from its text."""
        source = self._modules.get(fullname)
        if source is None:
            return None
        parts = None if source.parts is None else list(source.parts)
        if _is_here(source):
            return spec_from_file_location(
                fullname, source.origin, submodule_search_locations=parts
            )
        spec = spec_from_loader(fullname, self, origin=source.origin, is_package=parts is not None)
        if spec is not None and parts is not None:
            spec.submodule_search_locations = parts
        return spec

    def get_source(self, fullname: str) -> str:
        """The source text of a module."""
        return self._modules[fullname].text

    def get_code(self, fullname: str) -> CodeType:
        """The code of a module, with the file name of its origin."""
        source = self._modules[fullname]
        return compile(source.text, source.origin, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        """Whether a module is a package."""
        return self._modules[fullname].parts is not None


def _is_here(source: Source) -> bool:
    path = Path(source.origin)
    return path.is_file() and path.read_text(encoding="utf-8") == source.text
