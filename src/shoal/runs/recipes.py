"""Plain objects as JSON, and back: what a run folder says of the loop that it trained.

A dataclass is its class and its settings, a function or class its name; of those outside Shoal the
file is kept too, since a script's module has no other name to be found by.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import SettingError

NOT_PLAIN = object()  # what has no recipe: an object that isn't made of plain data


def recipe_of(thing: Any) -> Any:
    """`thing` as JSON, or NOT_PLAIN."""
    match thing:
        case None | bool() | int() | float() | str():
            is_number = not isinstance(thing, float) or math.isfinite(thing)
            return thing if is_number else {"float": str(thing)}  # JSON has no infinity
        case list() | tuple():
            return _of_sequence(thing)
        case dict():
            inside = {name: recipe_of(x) for name, x in thing.items()}
            plain = all(isinstance(name, str) for name in thing)
            return {"dict": inside} if plain and NOT_PLAIN not in inside.values() else NOT_PLAIN
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = [f.name for f in dataclasses.fields(thing) if f.init]
        settings = {name: recipe_of(getattr(thing, name)) for name in fields}
        name = _named(type(thing))
        if name is NOT_PLAIN or NOT_PLAIN in settings.values():
            return NOT_PLAIN
        return {**name, "settings": settings}
    return _named(thing)


def made_from(recipe: Any) -> Any:
    """The object that a recipe is of."""
    match recipe:
        case {"tuple": items}:
            return tuple(made_from(item) for item in items)
        case {"float": text}:
            return float(text)
        case {"dict": items}:
            return {name: made_from(item) for name, item in items.items()}
        case {"name": _, "module": _}:
            return _made_named(recipe)
        case list():
            return [made_from(item) for item in recipe]
    return recipe


def _made_named(recipe: dict[str, Any]) -> Any:
    """What a recipe names, or where it says settings, one made with them."""
    found = _found(recipe)
    if "settings" not in recipe:
        return found
    return found(**{name: made_from(x) for name, x in recipe["settings"].items()})


def load_file(path: Path) -> ModuleType:
    """A Python file as a module, which finds what lies beside it."""
    if not path.is_file():
        raise SettingError(f"there is no file {path}", "Give the path of a Python file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _of_sequence(things: list[Any] | tuple[Any, ...]) -> Any:
    inside = [recipe_of(x) for x in things]
    if NOT_PLAIN in inside or hasattr(things, "_fields"):
        return NOT_PLAIN
    return inside if isinstance(things, list) else {"tuple": inside}


def _named(thing: Any) -> Any:
    """A class or function by its name, if the name leads back to it."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    name = getattr(thing, "__qualname__", "")
    if module is None or _inside(module, name) is not thing:
        return NOT_PLAIN
    found = {"name": name, "module": module.__name__}
    file = getattr(module, "__file__", None)
    if file and not module.__name__.startswith("shoal."):
        found["file"] = str(Path(file).resolve())
    return found


def _inside(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _found(recipe: dict[str, Any]) -> Any:
    """What a name in a module stands for now."""
    found = _inside(_module(recipe["module"], recipe.get("file")), recipe["name"])
    if found is None:
        raise SettingError(
            f"the run was made with {recipe['name']} of {recipe.get('file') or recipe['module']}, "
            "which is no longer there",
            "Bring it back, or give the algorithm and env to shoal.resume.",
        )
    return found


def _module(name: str, file: str | None) -> ModuleType:
    """A module by name, if it is the same file; else by its file."""
    known = sys.modules.get(name)
    try:
        known = known or (importlib.import_module(name) if name != "__main__" else None)
    except ModuleNotFoundError:
        known = None
    where = getattr(known, "__file__", None)
    if known is not None and (file is None or (where and Path(where).resolve() == Path(file))):
        return known
    if file is None:
        raise SettingError(f"there is no module {name}", "Install what the run was made with.")
    return load_file(Path(file))
