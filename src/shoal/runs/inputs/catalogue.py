"""What there is to choose from, as data: settings with their help, presets, environments."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.rl.ranges import MEANINGS
from shoal.runs.inputs.making import find_preset, make_algorithm

COMMENT = re.compile(r"^ +(\w+): [^#\n]*(?:\(\n[^#\n]*)?# (.*)$", re.MULTILINE)
FILLED_IN = "total_ticks"  # by the run


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of an algorithm: its type as written, value, the class's default, and help."""

    name: str
    kind: str
    value: Any
    default: Any
    help: str

    @property
    def metavar(self) -> str:
        """What stands for a value in the help."""
        kinds = {int: "N", float: "X", str: "NAME", tuple: "X,X"}
        return kinds.get(type(self.value), "X")


def settings_of(algorithm: Any) -> Iterator[Setting]:
    """Each setting of an algorithm, a class or an object, with the comment beside it as help."""
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    comments = dict(COMMENT.findall(_source(kind)))
    for field in dataclasses.fields(kind):
        written = field.type if isinstance(field.type, str) else _type_text(field.type)
        default = None if field.default is dataclasses.MISSING else field.default
        value = default if algorithm is kind else getattr(algorithm, field.name)
        text = comments.get(field.name) or MEANINGS.get(field.name, "")
        yield Setting(field.name, written, value, default, text)


def effective_settings(algorithm: str, env: str | None) -> tuple[str, list[Setting]]:
    """An algorithm's title, and the settings that a run of it in an environment would have."""
    made = make_algorithm(algorithm, {}, find_preset(algorithm, env))
    if not dataclasses.is_dataclass(made):
        return type(made).__name__, []
    found = [one for one in settings_of(made) if one.name != FILLED_IN]
    return type(made).__name__, found


def _source(kind: type) -> str:
    """The source of a class and of those that it extends, the class's own comments last."""
    found = []
    for each in reversed(kind.__mro__):
        if dataclasses.is_dataclass(each):
            try:
                found.append(inspect.getsource(each))
            except (OSError, TypeError):  # made in a prompt
                continue
    return "\n".join(found)


def _type_text(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
