"""Commands that list what there is: environments, policies, presets, settings, this machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console

from shoal.algorithms import ALGORITHMS, PRESETS
from shoal.cli.flags import as_word
from shoal.envs.registry import FAMILIES, load_family
from shoal.errors import MissingExtraError, UnknownNameError
from shoal.runs.doctor import BAD, examine
from shoal.runs.inputs.catalogue import effective_settings
from shoal.runs.inputs.guide import GUIDES, parameters_of
from shoal.runs.inputs.options import Doc

MOST = 60  # names of a family that are printed
COMPILED = ("gymnax", "brax", "jaxmarl")
WIDTH = 78


@dataclass(frozen=True)
class EnvsOptions:
    """The options of `shoal envs`."""

    word: Annotated[str | None, Doc("a part of names; without it, families are counted")] = None


@dataclass(frozen=True)
class PoliciesOptions:
    """The options of `shoal policies`."""


@dataclass(frozen=True)
class PresetsOptions:
    """The options of `shoal presets`."""

    word: Annotated[str | None, Doc("an algorithm, or a part of an environment's name")] = None


@dataclass(frozen=True)
class SettingsOptions:
    """The options of `shoal settings`."""

    algorithm: Annotated[str, Doc("a name, or yours: file.py:Class")]
    env: Annotated[str | None, Doc("an environment, whose preset is then taken")] = None


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `shoal doctor`."""


def envs(options: EnvsOptions) -> int:
    """Print how many environments each family has, or those whose names have a word in them."""
    found = 0
    for family in FAMILIES:
        manner = "compiled by XLA" if family in COMPILED else "stepped in Python"
        try:
            names = load_family(family).names()
        except MissingExtraError as error:
            if options.word is None:
                print(f"{family:11} {manner:17} {error.fix}")
            continue
        if options.word is None:
            example = f"{family}:{names[0]}" if names else ""
            print(f"{family:11} {manner:17} {len(names)} environments, such as {example}")
            continue
        matching = [name for name in names if options.word.lower() in name.lower()]
        found += len(matching)
        for line in _env_lines(family, matching):
            print(line)
    if options.word is None:
        print("\nshoal envs WORD lists those with a word in their name. Your own: file.py:name")
    elif not found:
        raise UnknownNameError("environment", options.word, _all_names())
    return 0


def _env_lines(family: str, names: list[str]) -> Iterator[str]:
    """A line for each environment: its full name, and the algorithms with a preset for it."""
    for name in names[:MOST]:
        known = [algorithm for algorithm, of in PRESETS.items() if name in of]
        yield f"{family}:{name}" + (f"   preset of {', '.join(known)}" if known else "")
    if len(names) > MOST:
        yield f"... and {len(names) - MOST} more of {family}"


def _all_names() -> list[str]:
    found = []
    for family in FAMILIES:
        try:
            found += [f"{family}:{name}" for name in load_family(family).names()]
        except MissingExtraError:
            continue
    return found


def policies(options: PoliciesOptions) -> int:
    """Print each distribution policy: its fragments, when to use it, and its parameters."""
    del options
    for name, guide in GUIDES.items():
        print(name.replace("_", "-"))
        print(f"  {guide.picture}")
        print(textwrap.fill(guide.when, WIDTH, initial_indent="  ", subsequent_indent="  "))
        print(f"  {parameters_of(name)}\n")
    print("Use one with --distribute NAME; `shoal plan` shows what it makes of your loop.")
    return 0


def presets(options: PresetsOptions) -> int:
    """Print the pairs of an algorithm and an environment that have settings known to learn."""
    word = (options.word or "").lower()
    rows = [
        (name, env, preset)
        for name, known in PRESETS.items()
        for env, preset in known.items()
        if word in env.lower() or word == name
    ]
    if not rows:
        raise UnknownNameError(
            "preset", word, [*PRESETS, *{e for of in PRESETS.values() for e in of}]
        )
    wide = max(len(env) for _, env, _ in rows)
    print(f"{'algorithm':9}  {'environment':{wide}}  {'envs':>5}  {'ticks':>7}")
    for name, env, preset in rows:
        print(f"{name:9}  {env:{wide}}  {preset.envs:5}  {preset.ticks:7,}")
    print("\nA preset is taken by itself; `shoal settings ALGORITHM ENV` shows its values.")
    return 0


def settings(options: SettingsOptions) -> int:
    """Print the settings that a run of an algorithm would have, and which of them a preset sets."""
    if options.algorithm not in ALGORITHMS and ".py:" not in options.algorithm:
        raise UnknownNameError("algorithm", options.algorithm, ALGORITHMS)
    env = (options.env or "").rpartition(":")[2]
    preset = PRESETS.get(options.algorithm, {}).get(env)
    title, rows = effective_settings(options.algorithm, options.env)
    head = f"{title} with its preset for {env}" if preset else f"{title}, defaults"
    print(head + (f" (no preset for {options.env})" if options.env and not preset else ""))
    if preset:
        print(f"--envs {preset.envs} --ticks {preset.ticks}")
    lines = [(f"--{row.name.replace('_', '-')} {as_word(row.value)}", row) for row in rows]
    wide = min(36, max((len(line) for line, _ in lines), default=0))
    for line, row in lines:
        changed = (
            f"[{as_word(row.default)} without the preset] " if row.value != row.default else ""
        )
        print(f"  {line:{wide}}  {changed}{row.help}".rstrip())
    return 0


def doctor(options: DoctorOptions) -> int:
    """Print what this machine has; the exit code is 1 if something will not work."""
    del options
    console, worst = Console(highlight=False, soft_wrap=True), 0
    for finding in examine():
        console.print(f"{finding.state:5} {finding.subject:14} {finding.text}", markup=False)
        worst = worst or int(finding.state == BAD)
    return worst
