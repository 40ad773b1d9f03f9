"""The flags of a command: one for each option, policy parameter and setting of an algorithm."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from inspect import Parameter as Slot
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from cyclopts import Group, Parameter

from shoal.cli.words import Words
from shoal.errors import SettingError, printable
from shoal.runs.inputs.options import (
    GROUPS,
    Doc,
    LoopOptions,
    TrainOptions,
    check_values,
    doc_of,
    hints_of,
    option_of,
    unknown,
)

Read = Callable[[str], Any]
BOOLEANS = {"true": True, "false": False}  # as YAML and JSON spell them; Python's work too
SETTINGS, PARAMETERS, MORE = "settings", "distribute_settings", "More"
TABLES = ("settings", "env_settings", "distribute_settings")  # of a TOML file
MEANS = {
    "devices": "devices to spread the program over",
    "actors": "replicas that step environments and act; 2-16: elastic",
    "lag": "ticks that parameters are behind; served, at most",
    "envs": "replicas that step environments",
    "ring": "groups of environments a replica keeps in flight",
    "workers": "replicas that step environments, or compute gradients",
    "take": "rollouts that the learner takes a tick",
    "max_lag": "ticks that parameters may be behind when used",
    "learners": "replicas that learn, and agree on gradients",
    "inference": "replicas that act",
    "actor_devices": "devices that act",
    "learner_devices": "devices that learn",
}
COUNTED = ("actors", "workers", "envs")  # parameters that may say from how many to how many
LENGTHS = (("steps", "ticks"), ("ticks", "steps"))  # two ways to say how long a run is
ALIASES = {"settings": "--set", "env_settings": "--env-set"}


@dataclass(frozen=True)
class Flag:
    """A flag or a positional word of a command, and the option that it fills."""

    name: str  # --learning-rate; of a positional word, ALGORITHM
    option: str
    read: Read | None  # None: a switch
    doc: Doc
    key: str = ""  # in the option, if that is a table
    repeats: bool = False
    is_shown: bool = True
    is_many: bool = False  # a positional word that may come several times

    def slot_in(self, group: Group) -> Slot:
        """The flag as a parameter of a function that cyclopts calls."""
        many = self.repeats or self.is_many
        kind: Any = bool if self.read is None else list[str] if many else str
        help = f"{self.doc.text} [{self.doc.default}]" if self.doc.default else self.doc.text
        details = Parameter(
            name=None if self.is_positional else self.name,
            help=help, group=group, show=self.is_shown, show_default=False,
            metavar=self.doc.metavar or None, negative_iterable=(), allow_repeating=True,
        )  # fmt: skip
        where = Slot.POSITIONAL_ONLY if self.is_positional else Slot.KEYWORD_ONLY
        return Slot(self.slot, where, default=None, annotation=Annotated[kind | None, details])

    @property
    def spellings(self) -> tuple[str, ...]:
        """How the flag may be written."""
        return (
            (self.name, self.name.replace("--", "--no-", 1)) if self.read is None else (self.name,)
        )

    @property
    def slot(self) -> str:
        """The name of that parameter."""
        return self.name.strip("-").replace("-", "_").lower()

    @property
    def is_positional(self) -> bool:
        """Whether it is a word without a name."""
        return not self.name.startswith("--")


def flags_of(kind: type, words: Words) -> list[Flag]:
    """All flags of a command with options of this kind, as far as its words determine them."""
    found = list(_option_flags(kind, words))
    if any(flag.option == "distribute" for flag in found):
        found += _parameter_flags(words)
    taken = {spelling for flag in found for spelling in flag.spellings}
    is_loop = words.algorithm and issubclass(kind, LoopOptions)
    if is_loop and (words.asks_for_help or words.flags - taken):
        found += [flag for flag in _setting_flags(words) if flag.name not in taken]
    return found


def signature_of(flags: Sequence[Flag]) -> Signature:
    """The flags as the signature of a function, its positional words first."""
    ordered = sorted(flags, key=lambda flag: not flag.is_positional)
    titles = {flag.doc.group or MORE: None for flag in flags}
    order = [*(title for title in GROUPS if title in titles), *titles]
    groups = {title: Group(title, sort_key=order.index(title)) for title in titles}
    return Signature([flag.slot_in(groups[flag.doc.group or MORE]) for flag in ordered])


def options_of(kind: type, flags: Sequence[Flag], given: Mapping[str, Any], words: Words) -> Any:
    """The options object of a command from what its flags were given; a TOML file fills in."""
    values, said = config_of(kind, words), said_by(flags, given, words)
    for one, other in LENGTHS:  # a flag takes the place of either in the file
        if one in said and other not in said:
            values.pop(other, None)
    for option, value in said.items():
        values[option] = {**values.get(option, {}), **value} if option in TABLES else value
    for field in dataclasses.fields(kind):
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if is_needed and field.name not in values:
            name = next(flag.name for flag in flags if flag.option == field.name)
            raise SettingError(
                f"{words.title}: {name} is missing", f"`{words.title} --help` has an example."
            )
    return check_values(kind(**values))


def said_by(flags: Sequence[Flag], given: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """The options that flags were given; one that two flags set differently is refused."""
    said: dict[str, Any] = {}
    for flag in flags:
        value = given.get(flag.slot)
        if value is None or value == []:
            continue
        read = _reader(flag)
        value = [read(text) for text in value] if isinstance(value, list) else read(value)
        if flag.option not in TABLES:
            said[flag.option] = tuple(value) if isinstance(value, list) else value
            continue
        table = said.setdefault(flag.option, {})
        if flag.key and flag.key in table and table[flag.key] != value:
            raise SettingError(
                f"{words.title}: {flag.name} and --set {flag.key}={table[flag.key]} differ",
                "Give one of them.",
            )
        table.update({flag.key: value} if flag.key else dict(value))
    return said


def _reader(flag: Flag) -> Read:
    """How a word of a flag is read; an error names the flag."""

    def read(text: Any) -> Any:
        try:
            return text if flag.read is None else flag.read(text)
        except ValueError as error:
            raise SettingError(
                f"{flag.name} {printable(text)[:60]} is {error}",
                f"{flag.name} {flag.doc.metavar}: {flag.doc.text}.",
            ) from None

    return read


def config_of(kind: type, words: Words) -> dict[str, Any]:
    """The options in the TOML file of the words; of one for `shoal train`, those of the loop."""
    known = hints_of(kind)
    others = hints_of(TrainOptions) if issubclass(kind, LoopOptions) else {}
    found = dict(words.config)
    for name, value in words.config.items():
        if name in others and not doc_of(known.get(name)).text and doc_of(others[name]).text:
            del found[name]
            continue
        if name not in known:
            raise unknown(name, known, words.config_file)
        if name in TABLES and not isinstance(value, dict):
            raise SettingError(
                f"`{name}` of {words.config_file} is no table",
                f"Write [{name}], and a line for each.",
            )
    return found


# Flags of options


def _option_flags(kind: type, words: Words) -> Iterator[Flag]:
    positional = {
        name
        for name, slot in signature(kind).parameters.items()
        if slot.kind is Slot.POSITIONAL_OR_KEYWORD and name != "distribute"
    }
    for name, hint in hints_of(kind).items():
        doc = doc_of(hint)
        if not doc.text:
            continue
        repeats, read = _reading(hint)
        option = ALIASES.get(name, f"--{name.replace('_', '-')}")
        is_word = name in positional
        yield Flag(
            name.upper() if is_word else option, name, read, doc,
            repeats=repeats, is_many=is_word and repeats, is_shown=not words.is_about_settings,
        )  # fmt: skip


def _reading(hint: Any) -> tuple[bool, Read | None]:
    """Whether a type is of several values, and how a word becomes one of them."""
    plain = _plain(hint)
    origin = get_origin(plain) or plain
    if origin in (list, tuple):
        return True, _reading(get_args(plain)[0])[1]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return True, setting
    readers: dict[Any, Read | None] = {bool: None, int: whole, float: number, Path: Path}
    return False, readers.get(origin, str)


def _plain(hint: Any) -> Any:
    """A type without what it is annotated with, and without None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    inner = [x for x in get_args(hint) if x is not type(None)]
    is_optional = type(None) in get_args(hint)
    return _plain(inner[0]) if is_optional and len(inner) == 1 else hint


# Flags of distribution policies


def policy_parameters() -> dict[str, list[str]]:
    """Every parameter of the named distribution policies, and which of them take it."""
    from shoal.planning.policies import POLICIES

    found: dict[str, list[str]] = {}
    for name, make in POLICIES.items():
        for parameter in signature(make).parameters:
            found.setdefault(parameter, []).append(name)
    return found


def _parameter_flags(words: Words) -> Iterator[Flag]:
    from shoal.planning.policies import POLICIES

    chosen = (words.distribute or "").replace("-", "_")
    known = signature(POLICIES[chosen]).parameters if chosen in POLICIES else {}
    for name in policy_parameters():
        default = str(known[name].default) if name in known else ""
        doc = Doc(MEANS[name], f"Parameters of {words.distribute}", "N", default)
        read = replicas if name in COUNTED else whole
        yield Flag(option_of(name), PARAMETERS, read, doc, key=name, is_shown=name in known)


# Flags of algorithms


def _setting_flags(words: Words) -> Iterator[Flag]:
    """A flag for each setting of the algorithm that is named; its default is the effective one."""
    from shoal.runs.inputs.catalogue import effective_settings

    title, rows = effective_settings(words.algorithm, words.env)
    for row in rows:
        is_switch = isinstance(row.value, bool)
        metavar = "" if is_switch else row.metavar
        doc = Doc(row.help, f"Settings of {title}", metavar, as_word(row.value))
        read = None if is_switch else literal
        name = f"--{row.name.replace('_', '-')}"
        yield Flag(name, SETTINGS, read, doc, key=row.name, is_shown=words.is_about_settings)


# Words as values


def whole(text: str) -> int:
    """A whole number: `100`, `1_000` or `1e6`."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        if (value := float(text)).is_integer():
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError("no whole number")


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("no number") from None


def replicas(text: str) -> int | tuple[int, int]:
    """A count, or `2-16`: from how many to how many replicas."""
    counts = text.split("-")
    if len(counts) > 2 or not all(count.isdecimal() for count in counts):
        raise ValueError("no number of replicas; write 4, or 2-16 for from 2 to 16")
    least, most = int(counts[0]), int(counts[-1])
    return (least, most) if len(counts) == 2 else least


def literal(text: str) -> Any:
    """A value as Python writes it (`1e-3`, `64,64`, `None`), or the text itself."""
    try:
        return BOOLEANS[text] if text in BOOLEANS else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def as_word(value: Any) -> str:
    """A value as it may be written on the command line."""
    if isinstance(value, tuple | list) and all(isinstance(x, int | float) for x in value):
        return ",".join(map(str, value)) or "()"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def setting(text: str) -> tuple[str, Any]:
    """A name and a value, from `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError("no NAME=VALUE")
    return name, literal(value)
