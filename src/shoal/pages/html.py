"""The parts that all pages are made of: the document with its styles and scripts, and tables."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from shoal.runs.files.folder import as_json

DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="{icon}">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body class="{kind}">
{body}
{data}
{scripts}
</body>
</html>
"""
# Nothing is loaded from anywhere, and no script runs but those of the page.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
    "script-src {scripts}; base-uri 'none'; form-action 'none'"
)
ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><rect width='16' height='16' "
    "rx='4' fill='#2f6fde'/><path d='M3 5l4 3-4 3M9 5l4 3-4 3' stroke='#fff' stroke-width='2' "
    "fill='none' stroke-linecap='round' stroke-linejoin='round'/></svg>"
)


def document(
    title: str,
    body: str,
    scripts: Sequence[str],
    data: Mapping[str, Any],
    connect: str = "'none'",
) -> str:
    """A whole page; `scripts` are names of assets, `data` is read by them, by its names.

    A stylesheet of the same name goes with each script. `connect` is where the page may ask for
    more, in the words of a content security policy.
    """
    code = [asset(f"{name}.js") for name in scripts]
    kinds = [name for name in ("theme", *scripts) if _has(f"{name}.css")]
    return DOCUMENT.format(
        title=escape(title),
        kind=escape(scripts[-1]),
        policy=POLICY.format(connect=connect, scripts=" ".join(map(_digest, code))),
        icon="data:image/svg+xml;base64," + base64.b64encode(ICON.encode()).decode(),
        style="\n".join(asset(f"{name}.css") for name in dict.fromkeys(kinds)),
        body=body,
        data="\n".join(
            f'<script type="application/json" id="data-{name}">{json_in_html(value)}</script>'
            for name, value in data.items()
        ),
        scripts="\n".join(f"<script>{text}</script>" for text in code),
    )


def _digest(script: str) -> str:
    """A script's digest, by which a content security policy allows it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def json_in_html(data: Any) -> str:
    """JSON escaped for a script element, which would end at the first `</`."""
    return as_json(data).replace("<", "\\u003c")


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells are HTML, and a column whose head begins with `#` holds numbers."""
    kinds = [" class='number'" if name.startswith("#") else "" for name in head]
    top = "".join(
        f"<th scope='col'{k}>{name.removeprefix('#')}</th>"
        for k, name in zip(kinds, head, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{k}>{cell}</td>" for k, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f"<h2>{title}</h2>\n<div class='table' tabindex='0'><table><thead><tr>{top}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def source_link(place: str) -> str:
    """A link to a source line, such as `ppo.py:88`, whose text the page has."""
    return f"<a class='source' href='#source={escape(place)}'><code>{escape(place)}</code></a>"


def asset(name: str) -> str:
    """The text of a file in assets/."""
    text = (files("shoal.pages") / "assets" / name).read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if "sourceMappingURL" not in line)


def _has(name: str) -> bool:
    return (files("shoal.pages") / "assets" / name).is_file()
