"""How help looks: two columns in 80, one line an option, grouped, the default in brackets."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

LEFT, WIDTH = 26, 80


class Columns:
    """A help formatter of cyclopts: a heading, and a line for each command or option."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: Any) -> None:
        """Print one group of commands or options."""
        entries = [entry for entry in panel.entries if not {"--help", "--version"} & {*entry.names}]
        if not entries:
            return
        console.print(Text(f"{_plain(panel.title)}:", style="bold"))
        for entry in entries:
            console.print(_row(_name(entry), _plain(entry.description), console.width))
        console.print()

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the usage line."""
        console.print(Text(_plain(usage)))
        console.print()

    def render_description(self, console: Console, options: ConsoleOptions, text: Any) -> None:
        """Print what the command does."""
        if _plain(text):
            console.print(Text(textwrap.fill(_plain(text), min(WIDTH, console.width))))
            console.print()


def _name(entry: Any) -> str:
    """An option with what stands for its value, or a command."""
    if entry.positional_label:
        return entry.positional_label
    name = next(iter(entry.positive_names), "")
    if entry.negative_names:
        name = f"--[no-]{name.removeprefix('--')}"
    return f"{name} {entry.metavar or ''}".strip()


def _row(name: str, text: str, width: int) -> Text:
    """A name and its help, aligned; what doesn't fit continues below the help."""
    width = min(WIDTH, width)
    lines = textwrap.wrap(text, max(20, width - LEFT)) or [""]
    if len(name) > LEFT - 4:
        head, lines = f"  {name}\n", [f"{'':{LEFT}}{line}" for line in lines]
    else:
        head, lines = f"  {name:{LEFT - 2}}", [lines[0], *(f"{'':{LEFT}}{x}" for x in lines[1:])]
    row = Text(head, style="cyan")
    return row.append("\n".join(lines), style="default")


def _plain(text: Any) -> str:
    """A renderable's text."""
    if hasattr(text, "plain"):
        return text.plain.strip()
    if hasattr(text, "__rich_console__"):
        console = Console(width=1000, no_color=True, highlight=False)
        with console.capture() as found:
            console.print(text, end="")
        return found.get().strip()
    return str(text or "").strip()
