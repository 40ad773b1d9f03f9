"""Creates the virtual environments of peers: one each under `.bench/`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def python_of(peer: str) -> Path:
    """The Python of a peer's virtual environment, with pinned versions; created if missing."""
    folder = HERE.parents[1] / ".bench" / peer
    wanted, installed = HERE / f"{peer}.txt", folder / "installed.txt"
    python = folder / "bin" / "python"
    if not installed.exists() or installed.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", wanted], check=True)
        installed.write_text(wanted.read_text())
    return python
