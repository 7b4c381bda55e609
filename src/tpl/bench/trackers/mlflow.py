"""MLflow: parameters and metrics in a folder, a database or on a server."""

from __future__ import annotations

import os
from pathlib import Path

from tpl.bench.trackers.base import LOSS, PROJECT, Numbers, TrackedRun, Tracker


class MlflowTracker(Tracker):
    """A run of the experiment `tpl` in WHERE: a folder, a database such as sqlite:///runs.db, or a server's address."""

    package, extra = "mlflow", "mlflow"

    def __init__(self, where: str, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is what needs no database
        from mlflow import MlflowClient

        uri = where or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        self.client = MlflowClient(uri if "://" in uri else Path(uri).expanduser().absolute().as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self.client.get_experiment_by_name(name)
        ident = experiment.experiment_id if experiment else self.client.create_experiment(name)
        known = self.client.search_runs([ident], f"tags.`tpl.run` = '{run.ident}'") if run.resumed else []
        if known:
            self.run_id = known[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return
        tags = {"tpl.run": run.ident, "tpl.directory": str(run.place.absolute())}
        self.run_id = self.client.create_run(ident, tags=tags, run_name=run.place.name).info.run_id
        for key, value in run.settings.items():
            self.client.log_param(self.run_id, key, str(value)[:500])

    def stage(self, task: int, numbers: Numbers) -> None:
        """The numbers after a task."""
        for key, value in numbers.items():
            self.client.log_metric(self.run_id, key, value, step=task)

    def loss(self, epoch: int, value: float) -> None:
        """The loss of an epoch."""
        self.client.log_metric(self.run_id, LOSS, value, step=epoch)

    def close(self, finished: bool) -> None:
        """No more to tell."""
        self.client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")
