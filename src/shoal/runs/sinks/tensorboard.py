"""A sink that writes event files for TensorBoard into the run's folder."""

from __future__ import annotations

import json

from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

from shoal.runs.sinks.sink import About, Point


class TensorBoard:
    """Writes scalars by environment steps, or by ticks where nothing is stepped, and wall time."""

    def __init__(self, about: About) -> None:
        self._writer = SummaryWriter(str(about.folder / "tensorboard"))
        lines = [f"|{name}|{json.dumps(value)}|" for name, value in about.config.items()]
        self._writer.add_text("hyperparameters", "\n".join(["|name|value|", "|-|-|", *lines]))

    def see(self, point: Point) -> None:
        """Write the scalars of a point."""
        for name, value in point.scalars.items():
            self._writer.add_scalar(name, value, point.env_steps or point.tick, point.at)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
