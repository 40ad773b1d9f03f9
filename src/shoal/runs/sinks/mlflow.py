"""A sink that logs to MLflow: to MLFLOW_TRACKING_URI, by default to files in the run's folder."""

from __future__ import annotations

import json
import os

from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

from shoal.runs.sinks.sink import About, Point

ID_FILE = "mlflow.json"  # in the run's folder: a resumed run continues the same curves
EXPERIMENT = "shoal"
SHORT = ("algorithm", "env", "distribution", "backend", "seed", "envs", "ticks")
LONGEST = 500  # characters of a parameter


class MLflow:
    """Logs scalars with the number of environment steps as the step."""

    def __init__(self, about: About) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs all of MLflow
        own = (about.folder / "mlflow").resolve().as_uri()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)
        known = about.folder / ID_FILE
        if not known.exists():
            known.write_text(json.dumps({"id": self._created(about)}), encoding="utf-8")
        self._id = json.loads(known.read_text(encoding="utf-8"))["id"]
        self._client.set_terminated(self._id, "RUNNING")

    def _created(self, about: About) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        of = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        made = self._client.create_run(of, run_name=about.folder.name).info.run_id
        said = {name: about.config[name] for name in SHORT if name in about.config}
        texts = (Param(name, json.dumps(x, default=str)[:LONGEST]) for name, x in said.items())
        self._client.log_batch(made, params=list(texts))
        return made

    def see(self, point: Point) -> None:
        """Log the scalars of a point."""
        at = int(point.at * 1000)
        found = [Metric(name, x, at, point.env_steps) for name, x in point.scalars.items()]
        self._client.log_batch(self._id, metrics=found)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
