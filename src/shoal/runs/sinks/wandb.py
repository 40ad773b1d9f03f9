"""A sink that logs to Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

from __future__ import annotations

import json
import secrets

import wandb  # pyright: ignore[reportMissingImports]

from shoal.runs.sinks.sink import About, Point

ID_FILE = "wandb.json"  # in the run's folder: a resumed run continues the same curves


class WeightsAndBiases:
    """Logs scalars over `global_step`, the number of environment steps."""

    def __init__(self, about: About) -> None:
        known = about.folder / ID_FILE
        if not known.exists():
            known.write_text(json.dumps({"id": secrets.token_hex(4)}), encoding="utf-8")
        self._run = wandb.init(
            id=json.loads(known.read_text(encoding="utf-8"))["id"], resume="allow",
            name=about.folder.name, dir=str(about.folder), config=dict(about.config),
            settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def see(self, point: Point) -> None:
        """Log the scalars of a point."""
        self._run.log({**point.scalars, "tick": point.tick, "global_step": point.env_steps})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
