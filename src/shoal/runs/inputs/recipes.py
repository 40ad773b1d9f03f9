"""Plain objects as JSON, and back: how a run folder describes the loop that it trained.

A dataclass is its type and its settings, a function or class its name; for those outside Shoal the
file is kept too, since a script's module can't be imported by name. Only Shoal's own
registered types are made again from a recipe; anything else needs the user's trust (trust.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from shoal.errors import SettingError, of_user_code
from shoal.shapes import ShapeError, misfit

NOT_PLAIN = object()  # what has no recipe: an object that isn't made of plain data
DEPTH = 50  # of a recipe: no object of Shoal's is nested deeper
Recipe = dict[str, Any]
_SOURCES: dict[int, tuple[Any, Recipe]] = {}  # objects that were named in a file, by their id
Resolve = Callable[[Recipe], Any]  # what a recipe with a name stands for, or a ShoalError


def with_source(thing: Any, file: Path, name: str) -> Any:
    """`thing`, after noting that `name` of a file is it, for its recipe."""
    _SOURCES[id(thing)] = (thing, {"from": str(file.resolve()), "name": name})
    return thing


def recipe_of(thing: Any) -> Any:
    """`thing` as JSON, or NOT_PLAIN."""
    found = _recipe_of(thing)
    known, source = _SOURCES.get(id(thing), (None, NOT_PLAIN))
    return source if found is NOT_PLAIN and known is thing else found


def _recipe_of(thing: Any) -> Any:
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


def made_from(recipe: Any, resolve: Resolve, depth: int = 0) -> Any:
    """The object that a recipe describes; `resolve` finds, or refuses, the types that it names."""
    if depth > DEPTH:
        raise ShapeError("it is nested too deeply")

    def made(inner: Any) -> Any:
        return made_from(inner, resolve, depth + 1)

    if isinstance(recipe, list):
        return [made(item) for item in recipe]
    if not isinstance(recipe, dict):
        return recipe
    match recipe:
        case {"tuple": list(items)}:
            found = tuple(made(item) for item in items)
        case {"float": "inf" | "-inf" | "nan" as text}:
            found = float(text)
        case {"dict": dict(items)}:
            found = {name: made(item) for name, item in items.items()}
        case {"name": str()}:
            found = _made_named(recipe, resolve, made)
        case _:
            raise ShapeError("it is no recipe of an object")
    return found


def _made_named(recipe: Recipe, resolve: Resolve, made: Callable[[Any], Any]) -> Any:
    """What a recipe names, or an object of it with the recipe's settings."""
    match recipe:
        case {"module": str(), "settings": dict(settings)}:
            kind = resolve(recipe)
            return build(kind, {name: made(item) for name, item in settings.items()})
        case {"module": str()} if "settings" not in recipe:
            return resolve(recipe)
        case {"from": str()}:
            found = resolve(recipe)
            found = found() if inspect.isclass(found) or inspect.isfunction(found) else found
            return with_source(found, Path(recipe["from"]), recipe["name"])
    raise ShapeError(f"it names {ascii(recipe['name'])[:100]} of nothing")


def build(kind: Any, settings: dict[str, Any]) -> Any:
    """A `kind` with these settings, if they are its own and of their types."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ShapeError("it gives settings to what has none")
    hints, title = _hints(kind), kind.__name__
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    for name, value in settings.items():
        if name not in known:
            raise ShapeError(f"{title} has no setting `{name}`")
        if wrong := misfit(value, hints.get(name, Any), name):
            raise ShapeError(f"in {title}, {wrong}")
    try:
        return kind(**settings)
    except TypeError as error:
        raise ShapeError(str(error)) from error


def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:  # a user's own type, whose annotations name what only its function knows
        return {}


def named_code(recipe: Recipe) -> Any:
    """What a recipe names, imported from its module or file: this runs their code."""
    if "from" in recipe:
        found = getattr(load_file(Path(recipe["from"])), recipe["name"], None)
    else:
        found = _inside(_module(recipe["module"], recipe.get("file")), recipe["name"])
    if found is None:
        place = recipe.get("from") or recipe.get("file") or recipe["module"]
        raise SettingError(
            f"the run was made with {recipe['name']} of {place}, which is no longer there",
            "Restore it, or give the algorithm and env to shoal.resume.",
        )
    return found


def load_file(path: Path) -> ModuleType:
    """A Python file as a module, which can import files beside it."""
    if not path.is_file():
        raise SettingError(f"there is no file {path}", "Give the path of a Python file.")
    version, known = _version(path), sys.modules.get(path.stem)
    if known is not None and getattr(known, "__shoal_version__", None) == version:
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise of_user_code(f"{path} can't be imported", error) from error
    module.__shoal_version__ = version
    return module


def _version(path: Path) -> tuple[str, int, int]:
    """What changes when a file does: one that is as it was needn't be loaded again."""
    found = path.stat()
    return str(path.resolve()), found.st_mtime_ns, found.st_size


def _of_sequence(things: list[Any] | tuple[Any, ...]) -> Any:
    inside = [recipe_of(x) for x in things]
    if NOT_PLAIN in inside or hasattr(things, "_fields"):
        return NOT_PLAIN
    return inside if isinstance(things, list) else {"tuple": inside}


def _named(thing: Any) -> Any:
    """The recipe of a class or function by its name, if the name resolves to it."""
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
