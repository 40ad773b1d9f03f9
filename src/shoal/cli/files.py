"""Files and folders that commands are given."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import SettingError
from shoal.runs.folder import newest_run


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


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingError(
            f"can't write {path}: {why}", "Name a file in a folder that is there."
        ) from error
