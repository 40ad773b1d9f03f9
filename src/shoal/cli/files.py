"""Files and folders that commands are given."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.errors import SettingError, printable
from shoal.runs.files.folder import newest_run


def run_folder(named: str | Path | None) -> Path:
    """The folder of a run: a path, or a name in runs/; by default the newest there."""
    if named is None:
        return newest_run(Path("runs"))
    beside, plain = Path("runs") / named, Path(named)
    try:
        return beside if beside.exists() and not plain.exists() else plain
    except (OSError, ValueError):  # too long, or with a NUL: no folder is called so
        raise SettingError(
            f"there is no run in {str(named)[:60]!r}", "Name the folder of a run."
        ) from None


def check_file(path: Path | None, *suffixes: str) -> None:
    """Refuse a file that can't be written, before there is something to write into it."""
    if path is None:
        return
    wrong, fix = "", "Name a file in a folder that is there, and that you may write to."
    try:
        if path.is_dir() or not path.name:
            wrong = "it is a folder"
        elif path.exists() and not path.is_file():
            wrong = "it is no plain file"
        elif not path.parent.is_dir():
            wrong = "its folder isn't there"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            wrong = "you may not write there"
    except (OSError, ValueError) as error:  # too long, or with a NUL
        wrong = error.strerror or "" if isinstance(error, OSError) else str(error)
    if not wrong and suffixes and path.suffix not in suffixes:
        wrong, fix = "its name doesn't say in which format", f"End it in {', '.join(suffixes)}."
    if wrong:
        raise SettingError(f"can't write {printable(str(path))[:100]}: {wrong}", fix)


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingError(
            f"can't write {path}: {why}", "Name a file in a folder that is there."
        ) from error
