"""The words of a command line before they are parsed: what decides which flags there are."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import SettingError

CONFIG, DEBUG, HELP = "--config", "--debug", ("--help", "-h")


@dataclass(frozen=True)
class Words:
    """A command and its words, with what has to be known before they can be parsed."""

    title: str  # such as "shoal train"
    rest: tuple[str, ...] = ()  # to be parsed
    config: dict[str, Any] = field(default_factory=dict)  # what the TOML file says
    config_file: str = ""
    algorithm: Any = None
    env: Any = None
    distribute: Any = None

    @property
    def flags(self) -> set[str]:
        """The words that are flags, without their values."""
        return {word.partition("=")[0] for word in self.rest if word.startswith("--")} - {"--"}

    @property
    def asks_for_help(self) -> bool:
        """Whether they ask for the help of the command."""
        return any(word in HELP for word in self.rest)

    @property
    def is_about_settings(self) -> bool:
        """Whether they ask for help with an algorithm's settings."""
        return self.asks_for_help and bool(self.algorithm)


def scanned(title: str, words: Sequence[str], switches: Collection[str]) -> Words:
    """The words of a command, with the loop that they name, or that their TOML file names."""
    rest, file = _without_config(title, words)
    config = read_toml(file) if file else {}
    named, distribute = [*_positional(rest, switches)], _value_of("--distribute", rest)
    first, second = [*named, None, None][:2]
    return Words(
        title, tuple(rest), config, file,
        first or config.get("algorithm"), second or config.get("env"),
        distribute or config.get("distribute"),
    )  # fmt: skip


def _without_config(title: str, words: Sequence[str]) -> tuple[list[str], str]:
    """The words without `--config FILE`, and the file."""
    rest, files, ahead = [], [], iter(words)
    for word in ahead:
        if word == CONFIG:
            files.append(next(ahead, ""))
        elif word.startswith(f"{CONFIG}="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    if len(files) > 1 or "" in files:
        raise SettingError(f"{title}: {CONFIG} takes one TOML file", "Name one after it.")
    return rest, files[0] if files else ""


def _positional(words: Sequence[str], switches: Collection[str]) -> Iterator[str]:
    """The words that are no flags and no values of flags."""
    is_value, ahead = False, iter(words)
    for word in ahead:
        if word == "--":  # none after it is a flag
            yield from ahead
        elif word.startswith("--"):
            is_value = "=" not in word and word not in switches and word not in HELP
        elif is_value:
            is_value = False
        elif word not in HELP:
            yield word


def _value_of(flag: str, words: Sequence[str]) -> str:
    """The last value that a flag is given; empty without one."""
    found = ""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word == flag:
            found = after
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def read_toml(file: str) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no TOML: {error}"
        raise SettingError(
            f"{file} can't be read: {why}", f"{CONFIG} takes a TOML file with lines as ticks = 100."
        ) from None
