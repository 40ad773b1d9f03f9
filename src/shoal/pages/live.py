"""`shoal watch`: a page of runs that is served to this machine alone, and follows their folders."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shoal.errors import SettingError
from shoal.pages.run_pages import watch_page
from shoal.pages.run_view import RunView
from shoal.pages.updates import Cursor, updates
from shoal.runs.files.folder import as_json

LOOPBACK = "127.0.0.1"
EVERY_S = 0.1  # between looks at the folders while a page is open
IDLE_EVERY_S = 1.0  # where no run is in progress
BEAT_S = 10.0  # after so long without news a page is sent a comment, which finds out if it is there
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Watched:
    """Runs that are read from their folders, so often at most, whatever the number of pages."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._views = [RunView(folder) for folder in folders]
        self._lock, self._last = threading.Lock(), 0.0

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [view.name for view in self._views]

    @property
    def pause(self) -> float:
        """Seconds until the next look is worth while."""
        is_busy = any(view.is_running or view.curves.part_read < 1 for view in self._views)
        return EVERY_S if is_busy else IDLE_EVERY_S

    def news(self, cursors: Sequence[Cursor]) -> list[Json]:
        """What a page with these cursors lacks, run by run."""
        with self._lock:
            if time.monotonic() - self._last >= EVERY_S / 2:
                for view in self._views:
                    view.refresh()
                self._last = time.monotonic()
            found = [updates(v, cursor) for v, cursor in zip(self._views, cursors, strict=True)]
        return [{"run": number, **news} for number, news in enumerate(found) if news]


Json = dict[str, Any]


class Server(ThreadingHTTPServer):
    """Serves the page of some runs on the loopback interface, to those who know the token."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self.watched, self.token = Watched(folders), secrets.token_urlsafe(16)
        try:
            super().__init__((LOOPBACK, port), Handler)
        except (OSError, OverflowError) as error:
            raise SettingError(
                f"port {port} can't be used: {error}", "Choose another --port, or leave it out."
            ) from error

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: a page that was closed is no error."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the page and its events."""

    server: Server  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request."""
        url = urlsplit(self.path)
        routes: dict[str, Callable[[], None]] = {"/": self._page, "/events": self._events}
        if not self._is_local():
            self._refuse(HTTPStatus.FORBIDDEN, "This page is for this machine alone.")
        elif not self._has_token(url.query):
            self._refuse(HTTPStatus.FORBIDDEN, "Open the address that shoal watch has printed.")
        elif url.path not in routes:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")
        else:
            routes[url.path]()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _is_local(self) -> bool:
        """Whether the request names this machine: another name may have been made to lead here."""
        names = {f"{host}:{self.server.server_port}" for host in (LOOPBACK, "localhost")}
        return self.headers.get("Host") in names

    def _has_token(self, query: str) -> bool:
        given = parse_qs(query).get("token", [""])[0]
        return secrets.compare_digest(given.encode(), self.server.token.encode())

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", text.encode())

    def _page(self) -> None:
        page = watch_page(self.server.watched.names)
        self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in HEADERS.items():
            self.send_header(name, value)

    def _events(self) -> None:
        """Send what is new of the runs, until the page is closed."""
        self._begin(HTTPStatus.OK, "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        cursors = [Cursor() for _ in self.server.watched.names]
        last = time.monotonic()
        while True:
            news = self.server.watched.news(cursors)
            if news:
                self.wfile.write(f"data: {as_json(news)}\n\n".encode())
                last = time.monotonic()
            elif time.monotonic() - last > BEAT_S:
                self.wfile.write(b":\n\n")
                last = time.monotonic()
            time.sleep(self.server.watched.pause)
