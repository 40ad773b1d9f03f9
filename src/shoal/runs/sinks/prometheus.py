"""A sink that serves the newest scalars to Prometheus, on this machine alone, while a run lasts."""

from __future__ import annotations

import os
import re

from prometheus_client import (  # pyright: ignore[reportMissingImports]
    CollectorRegistry,
    Gauge,
    start_http_server,
)

from shoal.runs.sinks.sink import AXES, About, Point

LOOPBACK, PORT = "127.0.0.1", "SHOAL_PROMETHEUS_PORT"  # by default any port that is free


class Prometheus:
    """Serves a gauge a scalar, such as `shoal_charts_episodic_return{run="mine"}`."""

    def __init__(self, about: About) -> None:
        self._run, self._registry = about.folder.name, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        wanted = int(os.environ.get(PORT, "0"))
        self._server, self._thread = start_http_server(wanted, LOOPBACK, self._registry)
        about.say(f"Prometheus: http://{LOOPBACK}:{self._server.server_port}/metrics")

    def see(self, point: Point) -> None:
        """Serve the scalars of a point from now on."""
        for name, value in {axis: getattr(point, axis) for axis in AXES}.items():
            self._set(name, value)
        for name, value in point.scalars.items():
            self._set(name, value)

    def _set(self, name: str, value: float) -> None:
        plain = re.sub(r"\W", "_", f"shoal_{name}")
        if plain not in self._gauges:
            self._gauges[plain] = Gauge(plain, name, ["run"], registry=self._registry)
        self._gauges[plain].labels(run=self._run).set(value)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
