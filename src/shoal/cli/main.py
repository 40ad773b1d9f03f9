"""The `shoal` command: parses words into a command's options, runs it, and reports its error."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Signature
from itertools import pairwise
from typing import Any

from cyclopts import App, CycloptsError, Group
from cyclopts.exceptions import (
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from rich.console import Console

from shoal import __version__
from shoal.cli.commands import COMMANDS, GROUPS, NAMED, Command, command_in
from shoal.cli.flags import Flag, flags_of, options_of, signature_of
from shoal.cli.help import Columns
from shoal.cli.words import DEBUG, Words, scanned
from shoal.errors import RunError, SettingError, ShoalError, printable, user_place
from shoal.rl import ranges
from shoal.runs.inputs.options import SYNONYMS

BAD_INPUT = 2  # the exit code for bad input; nothing was started
ABOUT = "Write a training loop once; run it fused, on threads, processes or a cluster."
EXAMPLES = """Examples:
  shoal train ppo CartPole-v1
  shoal train ppo gymnasium:LunarLander-v3 --distribute impala --actors 2
  shoal train my_file.py:MyAlgorithm CartPole-v1 --steps 1e6

`shoal COMMAND --help` says more; --debug shows whole tracebacks."""


@dataclass(frozen=True)
class Parsed:
    """A command with its options; without a command, `options` is what prints the help."""

    command: Command | None
    options: Any


def main(words: list[str] | None = None) -> int:
    """Run one command; the user's mistakes are reported without a traceback."""
    words = sys.argv[1:] if words is None else words
    is_debugging = DEBUG in words
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        parsed = parse([word for word in words if word != DEBUG])
        if parsed.command is None:
            parsed.options()
            return 0
        return parsed.command.function(parsed.options)
    except ShoalError as error:
        if is_debugging:
            traceback.print_exc()
        console.print(f"[bold red]{type(error).__name__}:[/] ", end="")
        console.print(in_one_line(error), markup=False)
        return 1 if isinstance(error, RunError) else BAD_INPUT
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    except BrokenPipeError:  # what reads the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if is_debugging:
            raise
        first, place = (str(error).splitlines() or [""])[0], user_place(error)
        line = printable(f"{type(error).__name__}: {first}".rstrip(": "))
        console.print(f"{line} ({place})" if place else line, markup=False)
        console.print("Run it again with --debug for the whole traceback.", markup=False)
        return 1


def in_one_line(error: ShoalError) -> str:
    """An error and its fix in one line."""
    place = f" ({error.where})" if error.where else ""
    stop = "" if error.what.endswith((".", "!", "?")) else "."
    return printable(" ".join(f"{error.what}{place}{stop} {error.fix}".split()))


def parse(words: Sequence[str]) -> Parsed:
    """The command that words name, with its options; a mistake is a SettingError."""
    command, rest = command_in(list(words))
    if command is None:
        return Parsed(None, _unnamed(list(words)))
    kind = command.options
    scan = scanned(f"shoal {command.name}", rest, _switches(kind))
    flags = flags_of(kind, scan)
    try:
        called, bound, _ = _app(command, flags).parse_args([*command.name.split(), *scan.rest])
    except CycloptsError as error:
        raise _refusal(error, scan, flags) from None
    if called is not _values:
        return Parsed(None, partial(called, *bound.args, **bound.kwargs))
    return Parsed(command, options_of(kind, flags, bound.arguments, scan))


def _unnamed(words: list[str]) -> Any:
    """What to call for words that name no command: it prints the help, or the version."""
    if words and not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], NAMED, 1)
        raise SettingError(
            f"shoal: unknown command `{words[0][:40]}`"
            + (f"; did you mean `{near[0]}`?" if near else ""),
            "`shoal --help` lists the commands.",
        )
    try:
        called, bound, _ = _app(None, []).parse_args(words)
    except CycloptsError:
        raise SettingError(
            f"shoal: unknown option {words[0][:40]}", "`shoal --help` lists the commands."
        ) from None
    return partial(called, *bound.args, **bound.kwargs)


def _app(wanted: Command | None, flags: Sequence[Flag]) -> App:
    """The command line as cyclopts sees it, with the flags of one command."""
    how: dict[str, Any] = {"help_formatter": Columns(), "help_format": "plaintext"}
    how |= {"print_error": False, "exit_on_error": False}
    app = App(name="shoal", help=ABOUT, version=__version__, help_epilogue=EXAMPLES, **how)
    app.usage = "Usage: shoal COMMAND ..."
    groups = {name: Group(name, sort_key=number) for number, name in enumerate(GROUPS)}
    for number, command in enumerate(COMMANDS):
        parent, _, name = command.name.rpartition(" ")
        above = app if not parent else app[parent]
        _values.__signature__ = Signature()  # type: ignore[attr-defined]
        one = App(
            name=name, help=f"{command.about[0].upper()}{command.about[1:]}.",
            usage=f"Usage: {command.usage}", help_epilogue=f"Example:\n  {command.example}",
            group=groups[command.group], sort_key=number,
        )  # fmt: skip
        one.default(_values if command is wanted else _nothing)
        above.command(one)
    _values.__signature__ = signature_of(flags)  # type: ignore[attr-defined]
    return app


def _values(*values: Any, **named: Any) -> None:
    """Stands for the command that is parsed: its signature is that command's flags."""


def _nothing() -> None:
    """Stands for the commands that aren't parsed."""


def _switches(kind: type) -> list[str]:
    """The flags of a command that take no value."""
    return _switch_names(flags_of(kind, Words("")))


def _refusal(error: CycloptsError, words: Words, flags: Sequence[Flag]) -> ShoalError:
    """What is wrong with the words of a command, in one line, with what was meant."""
    helps = f"`{words.title} --help` lists what there is."
    match error:
        case UnknownOptionError():
            given = error.token.keyword or error.token.value
            meant = near_miss(given, [flag.name for flag in flags])
            hint = f"; did you mean {meant}?" if meant else ""
            if not words.algorithm and (setting := setting_called(given)):
                hint = f": {setting} is a setting of an algorithm, and none is named"
            return SettingError(f"{words.title}: unknown option {given[:40]}{hint}", helps)
        case MissingArgumentError():
            name = error.argument.name if error.argument else ""
            return SettingError(f"{words.title}: {name} is given without a value", helps)
        case UnusedCliTokensError():
            spare = " ".join(error.unused_tokens or [])[:60]
            if (switch := _before(spare, words.rest)) in _switch_names(flags):
                off = switch.replace("--", "--no-", 1)
                return SettingError(
                    f"{words.title}: {switch} takes no value, and is given `{spare}`",
                    f"Write {switch} or {off}.",
                )
            return SettingError(f"{words.title}: `{spare}` is too much", helps)
    text = " ".join(str(error).split())
    return SettingError(f"{words.title}: {text[:200]}", helps)


def _before(word: str, words: Sequence[str]) -> str:
    """The word before the first that is `word`; empty where there is none."""
    return next((one for one, after in pairwise(words) if after == word), "")


def _switch_names(flags: Sequence[Flag]) -> list[str]:
    return [flag.name for flag in flags if flag.read is None]


def setting_called(given: str) -> str:
    """The setting of algorithms that is meant by an option; empty for other options."""
    plain = given.strip("-").replace("-", "_")
    right = ranges.SYNONYMS.get(plain, plain)
    return f"--{right.replace('_', '-')}" if right in ranges.MEANINGS else ""


def near_miss(given: str, flags: Sequence[str]) -> str:
    """The flag that is meant: by what other libraries call it, or by its letters."""
    plain = given.strip("-").replace("-", "_")
    for names in (SYNONYMS, ranges.SYNONYMS):
        right = f"--{names.get(plain, plain).replace('_', '-')}"
        if right in flags:
            return right
    return next(iter(difflib.get_close_matches(given, flags, 1)), "")
