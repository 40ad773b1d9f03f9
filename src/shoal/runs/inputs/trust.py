"""Which code a file may run: Shoal's registered types only, unless the user trusts it.

A run folder or a recording may come from another author. `REGISTERED` lists the types that their
recipes may name; everything else they name is code, which runs only with `trust`. The runs that a
user makes on this machine are remembered outside of their folders, so that resuming one's own run
needs no flag.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.algorithms import ALGORITHMS
from shoal.algorithms.evaluated import Evaluated
from shoal.envs import registry
from shoal.envs.environment import Environment
from shoal.envs.hosted import HostEnvironment
from shoal.envs.previous import Previous
from shoal.errors import MissingExtraError, SettingError, TrustError
from shoal.planning import policy
from shoal.runs.inputs.recipes import Recipe, Resolve, made_from, named_code
from shoal.shapes import ShapeError

SIMULATORS = {(module, kind): name for name, (module, kind, _) in registry.FAMILIES.items()}
TYPES: tuple[type, ...] = (
    *ALGORITHMS.values(),
    Evaluated,
    Environment,
    HostEnvironment,
    Previous,
    policy.DistributionPolicy,
    policy.Fragment,
    policy.Latest,
    policy.Lockstep,
    policy.Queue,
    policy.Serve,
    policy.Wire,
)
# Every type that a recipe may name without trust. Simulators are imported when they are needed:
# each needs its family's package.
REGISTERED: dict[tuple[str, str], type | None] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in TYPES},
    **dict.fromkeys(SIMULATORS),
}
# Registered environments of Gymnasium that themselves import what their settings name.
IMPORTING = ("GymV21Environment", "GymV26Environment")


def make(recipe: Any, where: str, *, trusted: bool) -> Any:
    """The object that `recipe`, found at `where`, describes; code that it names needs trust."""
    found = () if trusted else tuple(code_in(recipe))
    if found:
        raise untrusted(where, found)
    resolve: Resolve = _anything if trusted else _registered
    try:
        return made_from(recipe, resolve)
    except (ShapeError, RecursionError) as error:
        raise SettingError(
            f"{where} describes nothing that can be made: {error}",
            "Restore the file, or resume with the version of Shoal that made it.",
        ) from error


def code_in(recipe: Any) -> Iterator[str]:
    """The parts of a recipe that are code, or cause imports: each described in a few words."""
    queue, count = [recipe], 0
    while queue:
        one, count = queue.pop(), count + 1
        if isinstance(one, dict):
            if "module" in one or "from" in one:
                yield from _code_named(one)
            queue += one.values()
        elif isinstance(one, list | tuple):
            queue += one


def code_of_env(family: str, name: Any, settings: Any) -> Iterator[str]:
    """What making the environment `name` of a family would import beyond what is registered."""
    is_known = isinstance(name, str) and name in registry.load_family(family).names()
    if not is_known or name.startswith(IMPORTING):
        yield f"whatever registers {quoted(name)} of {family}"
    if _mentions(settings, "wrappers"):
        yield f"the wrappers of {quoted(name)}: {quoted(settings)}"


def untrusted(where: str, found: tuple[str, ...]) -> TrustError:
    """The error that names the code which opening a file would run."""
    shown = "; ".join(dict.fromkeys(found[:5])) + (" and more" if len(found) > 5 else "")
    return TrustError(
        f"{where} names code that isn't Shoal's own, which would run: {shown}",
        "Look at it first. If you trust its author, add --trust (in Python: trust=True).",
    )


def describe(recipe: Recipe) -> str:
    """The code that a recipe names, in a few words."""
    place = recipe.get("from") or recipe.get("file") or recipe.get("module")
    return f"{quoted(recipe.get('name'))} of {quoted(place)}"


def quoted(text: Any) -> str:
    """Text of unknown origin in printable characters, at most 100."""
    shown = ascii(text)[1:-1] if isinstance(text, str) else ascii(text)
    return f"`{shown if len(shown) <= 100 else shown[:97] + '...'}`"


def remember(file: Path, named: Any) -> None:
    """Note that what a file names now is this user's own, or trusted; a full disk is no error."""
    with suppress(OSError, RuntimeError):
        note = _note_of(file)
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.write_text(_digest(named), encoding="utf-8")


def is_remembered(file: Path, named: Any) -> bool:
    """Whether it was noted that a file in this place names just this."""
    try:
        return _note_of(file).read_text(encoding="utf-8") == _digest(named)
    except (OSError, RuntimeError, ValueError):
        return False


def recipes_of(record: Mapping[str, Any]) -> list[Any]:
    """All recipes in a `run.json`."""
    return [record[name] for name in ("algorithm", "env", "distribution")]


def _registered(recipe: Recipe) -> Any:
    """The registered type that a recipe names; anything else is refused."""
    if found := tuple(_code_named(recipe)):
        raise untrusted("a recipe", found)
    key = (recipe["module"], recipe["name"])
    return REGISTERED[key] or getattr(registry.load_family(SIMULATORS[key]), recipe["name"])


def _anything(recipe: Recipe) -> Any:
    """What a trusted recipe names."""
    return REGISTERED.get((recipe.get("module", ""), recipe["name"])) or named_code(recipe)


def _code_named(recipe: Recipe) -> Iterator[str]:
    key = (recipe.get("module"), recipe.get("name"))
    try:
        family = SIMULATORS.get(key)
        is_known = key in REGISTERED and "from" not in recipe and "settings" in recipe
    except TypeError:  # a name that is no text
        family, is_known = None, False
    if not is_known:
        yield describe(recipe)
    elif family is not None:
        settings = recipe["settings"]
        settings = settings if isinstance(settings, dict) else {}
        with suppress(MissingExtraError):  # reported when it is made
            yield from code_of_env(family, settings.get("id"), settings.get("settings"))


def _mentions(data: Any, word: str) -> bool:
    """Whether `word` is anywhere in plain data."""
    if isinstance(data, dict):
        return any(name == word or _mentions(x, word) for name, x in data.items())
    if isinstance(data, list | tuple):
        return any(_mentions(x, word) for x in data)
    return data == word


def _note_of(file: Path) -> Path:
    """The path of the note that a file is the user's own: outside of any run folder."""
    root = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    return Path(root) / "shoal" / "trusted" / name


def _digest(named: Any) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
