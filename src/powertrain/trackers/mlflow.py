"""Points as metrics of an MLflow run: on a tracking server, or in a local store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from powertrain.config.checks import Config, Refusal, option, optional, replace, text
from powertrain.text.redaction import has_secrets
from powertrain.trackers.base import RunEnding, TrackedPoint, TrackedRun, Tracker, TrackerSession
from powertrain.trackers.settings import require, tracker_name

#: Of one request, as MLflow limits them.
_METRICS_PER_BATCH, _PARAMS_PER_BATCH = 1000, 100
_KEY_LIMIT, _PARAM_LIMIT = 250, 6000
#: Characters that MLflow does not take in a name.
_UNFIT = re.compile(r"[^\w\-. /:]")
#: The tag by which a run is found whose id was lost.
_KEY_TAG = "powertrain.key"
#: This process retries by itself, so MLflow's own retries of some minutes would only hide the error.
_ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}
_T = TypeVar("_T")


def _tracking_uri(value: Any) -> str:
    given = os.fsdecode(value) if isinstance(value, os.PathLike) else text(value)
    if has_secrets(given):
        raise Refusal(
            "it holds a secret, and the run's directory keeps the address",
            "Leave it out of the address, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN.",
        )
    is_path = "://" not in given and not given.startswith(("databricks", "sqlite:"))
    return os.path.abspath(os.path.expanduser(given)) if is_path else given


@dataclass(frozen=True, repr=False)
class MLflow(Config, Tracker):
    """Sends the numbers of rank 0's reports to an MLflow run, with ``train_loop_config`` as its parameters.

    Args:
        tracking_uri: The tracking server, or a local store such as ``"sqlite:///mlflow.db"``. None: the variable
            MLFLOW_TRACKING_URI, else MLflow's own default.
        experiment: The name of the experiment, which is made where it is missing. None: the variable
            MLFLOW_EXPERIMENT_NAME, else "Default".
        tags: Tags of the run, beside those of ``metadata``.
        name: Names the tracker where a run has several of its kind.

    Raises:
        ConfigError: A value cannot be used.

    Example::

        RunConfig(trackers=[powertrain.trackers.MLflow("http://mlflow.local:5000", experiment="digits")])
    """

    tracking_uri: str | None = option(None, optional(_tracking_uri))
    experiment: str | None = option(None, optional(text))
    tags: Mapping[str, str] = option(None, lambda value: _tags(value))
    name: str = option("mlflow", tracker_name)

    def settled(self, directory: str) -> MLflow:
        """Return the tracker with address and experiment filled in."""
        require(self.name, "mlflow", "mlflow")
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None
        experiment = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        return replace(self, tracking_uri=uri, experiment=experiment)

    def open(self, run: TrackedRun) -> TrackerSession:
        """Find the run of this key, or make it."""
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        return _MLflowSession(self, run)


class _MLflowSession(TrackerSession):
    def __init__(self, settings: MLflow, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=settings.tracking_uri)
        self.last_step = run.last_step
        found = self._find(settings, run)
        self.id = found.info.run_id
        # The newest step of each metric: points that a killed process sent and did not record are not sent again.
        self._newest = {metric.key: metric.step for metric in found.data._metric_objs}
        if found.info.status != "RUNNING":
            self._client.update_run(self.id, status="RUNNING")
        self._log_params(run.params, found.data.params)

    def _find(self, settings: MLflow, run: TrackedRun) -> Any:
        if run.id:
            return self._client.get_run(run.id)
        experiment = self._experiment(settings.experiment or "Default")
        known = self._client.search_runs([experiment], f"tags.`{_KEY_TAG}` = '{run.key}'", max_results=1)
        if known:
            return self._client.get_run(known[0].info.run_id)
        tags = {**run.tags, **settings.tags, _KEY_TAG: run.key, "powertrain.path": run.path}
        return self._client.create_run(
            experiment,
            start_time=int(run.started * 1000) or None,
            run_name=run.name,
            tags={_fit(name): value for name, value in tags.items()},
        )

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has made it in between
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_params(self, params: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Add missing parameters: MLflow refuses to change one, and the run began with the present ones."""
        from mlflow.entities import Param

        new = {_fit(name): str(value)[:_PARAM_LIMIT] for name, value in params.items()}
        missing = [Param(name, value) for name, value in new.items() if name not in known]
        for batch in _pieces(missing, _PARAMS_PER_BATCH):
            self._client.log_batch(self.id, params=batch)

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Send metrics in as few requests as MLflow allows."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(point.time * 1000), point.step)
            for point in points
            for name, value in ((_fit(name), value) for name, value in point.numbers.items())
            if point.step > self._newest.get(name, -1)
        ]
        for batch in _pieces(metrics, _METRICS_PER_BATCH):
            self._client.log_batch(self.id, metrics=batch)
            self._newest.update((metric.key, metric.step) for metric in batch)

    def finish(self, ending: RunEnding) -> None:
        """Set the status, and the reason and the findings as tags."""
        if ending.reason:
            self._client.set_tag(self.id, "powertrain.reason", ending.reason[:_PARAM_LIMIT])
        self._client.set_tag(self.id, "powertrain.findings", ", ".join(ending.findings))
        self._client.set_terminated(self.id, status=_STATUS.get(ending.state, "KILLED"))


def _tags(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) for item in value.items() for part in item
    ):
        raise Refusal("it is not a dict of text", 'Give {"team": "vision"}.')
    return dict(value)


def _fit(name: str) -> str:
    """A name that MLflow takes."""
    return _UNFIT.sub("_", name)[:_KEY_LIMIT]


def _pieces(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
