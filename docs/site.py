"""What mkdocs adds to the pages of this folder: README and the like, and the API reference."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

import shoal

ROOT = Path(__file__).resolve().parents[1]
# Files outside of this folder, and the pages that they become.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/ppo.py": "example_ppo.md",
    "examples/train_and_compare.ipynb": "train_and_compare.ipynb",
    "examples/cut_a_loop.ipynb": "cut_a_loop.ipynb",
}
KINDS = ("Training", "Distribution policies", "Values", "Stages, and how replicas agree")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that aren't in this folder."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            text = f"# A PPO in one file\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=relinked(text, Path(source).parent)))
    files.append(File.generated(config, "api.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links out of this folder lead to the pages that those files have become."""
    return markdown if page.file.generated_by else relinked(markdown, Path("docs"))


def relinked(text: str, folder: Path) -> str:
    """A text of a folder whose links to files are links to pages."""

    def page(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        place = (ROOT / folder / target).resolve()
        named = str(place.relative_to(ROOT)) if place.is_relative_to(ROOT) else ""
        if named in PAGES:
            return f"]({PAGES[named]}{anchor})"
        return f"]({named.removeprefix('docs/')}{anchor})" if place.exists() else found[0]

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", page, text)


def reference() -> str:
    """The public names of `shoal`, with their signatures and docstrings."""
    parts = ["# API reference", "What `import shoal` offers, from the docstrings."]
    known = {name: getattr(shoal, name) for name in shoal.__all__}
    things = {name: x for name, x in known.items() if not inspect.ismodule(x)}
    for kind in KINDS:
        parts.append(f"## {kind}")
        for name in sorted(n for n, x in things.items() if kind_of(n, x) == kind):
            parts.append(described(f"shoal.{name}", things[name]))
    for module in (n for n, x in known.items() if inspect.ismodule(x)):
        parts.append(f"## shoal.{module}")
        inner = known[module]
        for name in inner.__all__:
            thing = getattr(inner, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                parts.append(described(f"shoal.{module}.{name}", thing))
    return "\n\n".join(parts) + "\n"


def kind_of(name: str, thing: Any) -> str:
    """Under which heading a name belongs."""
    home = getattr(thing, "__module__", "")
    if home.endswith("planning.policies"):
        return KINDS[1]
    if home.startswith("shoal.tracing") and name not in ("trace", "interpret"):
        return KINDS[3]
    return KINDS[0] if inspect.isfunction(thing) else KINDS[2]


def described(name: str, thing: Any) -> str:
    """A name's signature and docstring; of a constant, its value."""
    if not callable(thing):
        return f"### {name}\n\n```python\n{name} = {thing!r}\n```"
    signature = re.sub(r"<(\w[\w. ]*?)( at 0x\w+)?>", r"\1", str(signature_of(thing)))
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    text = re.sub(
        r"^    (\w+): ", r"- `\1`: ", inspect.cleandoc(thing.__doc__ or ""), flags=re.MULTILINE
    )
    text = text.replace("Options:\n", "Options:\n\n")
    code = f"{name}{signature}"
    if len(code) > 90:
        inside = re.sub(r", (?=\*?[a-z_]+[:=,)]|\*)", ",\n    ", signature[1:])
        code = f"{name}(\n    {inside}"
    return f"### {name}\n\n```python\n{code}\n```\n\n{text}"


def signature_of(thing: Any) -> Any:
    """The parameters of a function or a class, as far as Python knows them."""
    try:
        return inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
