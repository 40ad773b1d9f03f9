"""The algorithms as text: a description, the action spaces, and the settings of each."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from shoal.algorithms import ALGORITHMS, PRESETS
from shoal.errors import UnknownNameError

COMMENT = re.compile(r"^ +(\w+): .*?# (.*)$", re.MULTILINE)


def catalogue() -> str:
    """Every algorithm in a few lines."""
    end = "shoal algorithms NAME shows the settings of one, with their defaults."
    return "\n\n".join([*map(entry, ALGORITHMS), end])


def settings(name: str) -> str:
    """One algorithm with all its settings."""
    if name not in ALGORITHMS:
        raise UnknownNameError("algorithm", name, ALGORITHMS)
    lines = list(_settings(ALGORITHMS[name]))
    wide = max((len(line) for line, comment in lines if comment), default=0)
    shown = [f"  {line:{wide}}  {comment}".rstrip() for line, comment in lines]
    end = f"Change one with: shoal train {name} ENV --set NAME=VALUE"
    return "\n".join([entry(name), "", *shown, "", end])


def entry(name: str) -> str:
    """An algorithm's summary, paper, action spaces, agents and presets."""
    kind, pad = ALGORITHMS[name], " " * 2
    lines = [f"{name}: {_summary(kind)}"]
    lines.append(f"{pad}paper    {kind.paper}")
    lines.append(f"{pad}actions  {', '.join(space.__name__ for space in kind.actions)}")
    if presets := PRESETS.get(name):
        lines.append(f"{pad}presets  {', '.join(presets)}")
    lines.append(f"{pad}agents   {getattr(kind, 'agents', 'one, or several that are alike')}")
    return "\n".join(lines)


def _summary(kind: Any) -> str:
    """The first line of its file, without the paper, which is listed separately."""
    first = (inspect.getdoc(sys.modules[kind.__module__]) or "").split("\n")[0]
    return first.replace(f" ({kind.paper})", "")


def _settings(kind: Any) -> Iterator[tuple[str, str]]:
    """Each setting with its type and default, and the comment beside it."""
    comments = dict(COMMENT.findall(inspect.getsource(kind)))
    for field in dataclasses.fields(kind):
        written = field.type if isinstance(field.type, str) else _type_text(field.type)
        yield f"{field.name}: {written} = {field.default!r}", comments.get(field.name, "")


def _type_text(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
