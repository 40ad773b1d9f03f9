"""Commands about pages of runs: watch, report."""

from __future__ import annotations

import webbrowser
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from shoal.cli.files import check_file, run_folder, write_text
from shoal.errors import SettingError
from shoal.pages import RunView, report_page
from shoal.pages.live import LOOPBACK, Server
from shoal.runs.inputs.options import Doc
from shoal.runs.results.listing import group
from shoal.shapes import Between

PAGE, OUTPUT = "The page", "Output"
RUNS = Doc("runs, or folders of runs such as --seeds makes; by default the newest", "", "RUN")


@dataclass(frozen=True)
class WatchOptions:
    """The options of `shoal watch`."""

    runs: Annotated[tuple[str, ...], RUNS] = ()
    _: KW_ONLY
    port: Annotated[int, Between(0, 65535), Doc("of the page", PAGE, "N", "any that is free")] = 0
    open: Annotated[bool, Doc("open the page in the browser", PAGE)] = False


@dataclass(frozen=True)
class ReportOptions:
    """The options of `shoal report`."""

    runs: Annotated[tuple[str, ...], RUNS] = ()
    _: KW_ONLY
    out: Annotated[
        Path | None, Doc("the page", OUTPUT, "FILE", "report.html in the run's folder")
    ] = None


def watch(options: WatchOptions) -> int:
    """Serve a live page of some runs until interrupted."""
    with Server(_folders(options.runs), options.port) as server:
        print(f"Watching {', '.join(server.watched.names)} on {server.url}")
        port = server.server_port
        print(f"From another machine: ssh -L {port}:{LOOPBACK}:{port} HOST. Ctrl-C ends it.")
        if options.open:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0


def report(options: ReportOptions) -> int:
    """Write a page with all about some runs, by default into the folder of the only one."""
    folders = _folders(options.runs)
    out = options.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    check_file(out)
    if options.out is None and out.is_symlink():  # it may lead out of a folder of others
        raise SettingError(f"{out} is a link", "Remove it, or name a file with --out.")
    write_text(out, report_page([RunView(folder) for folder in folders]))
    print(f"Written to {out}")
    return 0


def _folders(runs: tuple[str, ...]) -> list[Path]:
    """The folders of runs, and of all runs of groups, such as the seeds of one experiment."""
    if not runs:
        return [run_folder(None)]
    return [folder for named in runs for folder in _group(named)]


def _group(named: str) -> list[Path]:
    folder = run_folder(named)
    if "*" in named or next(folder.glob("*/run.json"), None):
        return [run.folder for run in group(named).runs]
    return [folder]
