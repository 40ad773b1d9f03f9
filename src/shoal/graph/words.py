"""Values, sizes and places as readable text."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
Row = tuple[str, str, str]

ROWS = 12  # more values than this are grouped by the prefixes of their names
NAMES = 2  # as many names as a label has room for


def size_text(count: float) -> str:
    """Bytes as text: `38 kB`, `2.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 9.95 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count_text(count: int, noun: str) -> str:
    """A number and what it counts: `1 value`, `2 values`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def spec_text(value: Json) -> str:
    """Shape and dtype of a value, its environment axis marked: `float32[128, 64 envs, 4]`."""
    shape = [f"{n} envs" if i == value["axis"] else str(n) for i, n in enumerate(value["shape"])]
    return f"{value['dtype']}[{', '.join(shape)}]"


def name_text(name: str) -> str:
    """A value's or node's name without the loops that contain it."""
    last = name.rpartition("/")[2]
    return re.sub(r"^((in|out|loop)\.)+(?=[a-z])", "", last)


def place_text(places: Sequence[str]) -> str:
    """Places, those of one kind together: `host0/cpu:0-3`."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for place in dict.fromkeys(places):
        kind, _, number = place.rpartition(":")
        numbers[kind].append(int(number))
    return ", ".join(f"{kind}:{_range_text(found)}" for kind, found in numbers.items())


def value_rows(values: Iterable[Json]) -> tuple[Row, ...]:
    """Name, spec and size of each value; many values are grouped by prefix."""
    groups = _groups(list(values), ROWS)
    return tuple(
        (name, _spec_of(group), size_text(sum(v["bytes"] for v in group)))
        for name, group in groups.items()
    )


def what_text(values: Sequence[Json]) -> str:
    """What the values are, largest first, by the shortest prefixes that distinguish them."""
    names = {value["name"]: name_text(value["name"]).rstrip("'") for value in values}
    sizes: dict[str, int] = defaultdict(int)
    depth = next((d for d in range(1, 9) if len({_head(n, d) for n in names.values()}) > 1), 1)
    for value in values:
        sizes[_head(names[value["name"]], depth)] += value["bytes"]
    heads = [_last_word(head) for head in sorted(sizes, key=lambda head: -sizes[head])]
    words = sorted(dict.fromkeys(heads), key=lambda word: word == "loop")
    more = f" + {len(words) - NAMES}" if len(words) > NAMES else ""
    return ", ".join(words[:NAMES]) + more


def _head(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def _last_word(head: str) -> str:
    """The last part of a dotted name that is not a number."""
    return next((part for part in reversed(head.split(".")) if not part.isdigit()), head)


def _spec_of(group: Sequence[Json]) -> str:
    return spec_text(group[0]) if len(group) == 1 else count_text(len(group), "value")


def _groups(values: Sequence[Json], limit: int) -> dict[str, list[Json]]:
    """The values by as much of their names as leaves at most `limit` groups, if any does."""
    found: dict[str, list[Json]] = {}
    for depth in range(1, 9):
        groups: dict[str, list[Json]] = defaultdict(list)
        for value in values:
            groups[_head(name_text(value["name"]), depth)].append(value)
        if found and len(groups) > limit:
            break
        found = groups
    return found


def _range_text(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    if len(numbers) > 1 and last - first + 1 == len(numbers):
        return f"{first}-{last}"
    return ",".join(map(str, numbers))
