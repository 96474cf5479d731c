"""MLflow's own store has each point once, in one run: by SQLite, and by a real server that is down for a while."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trackers.mlflow_server import MLflowServer
from tests.trackers.recorded import RecordedRun, loss, send_all

from powertrain.errors import ConfigError
from powertrain.trackers import MLflow, cursor, sending

pytest.importorskip("mlflow")
#: Whichever test is first imports MLflow and makes a store, which takes many seconds.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without runs: to make its tables takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    code = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{path}"], check=True, timeout=600)
    return path


@pytest.fixture
def uri(tmp_path: Path, empty_store: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(autouse=True)
def _variables_of_mlflow() -> Iterator[None]:
    """The tracker sets variables in its own process, which here is that of all tests."""
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
            patch.setenv(name, "1" if name.endswith("RETRIES") else "30")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which newer versions refuse otherwise
        patch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "")  # which importing MLflow sets
        yield


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(uri)


def only_run(uri: str, experiment: str = "Default") -> Any:
    found = client(uri).get_experiment_by_name(experiment)
    (run,) = client(uri).search_runs([found.experiment_id])
    return run


def history(uri: str, metric: str = "loss", experiment: str = "Default") -> list[tuple[int, float]]:
    found = client(uri).get_metric_history(only_run(uri, experiment).info.run_id, metric)
    return sorted((point.step, point.value) for point in found)


def test_metrics_parameters_tags_and_the_end_are_in_one_run(run: RecordedRun, uri: str) -> None:
    tracker = MLflow(uri, experiment="digits", tags={"stage": "test"})
    run.report(range(1, 4))
    assert send_all(run, tracker) is None
    assert only_run(uri, "digits").info.status == "RUNNING"
    run.report([4], loss=math.inf, eval={"top 5%": 0.5})
    run.end()
    assert send_all(run, tracker, "finished") is None
    found = only_run(uri, "digits")
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params == {"lr": "0.1", "net/depth": "3"}
    assert {"team": "a", "stage": "test"}.items() <= found.data.tags.items()
    assert history(uri, experiment="digits")[:3] == [(row, loss(0, row)) for row in (1, 2, 3)]
    assert history(uri, "eval/top 5_", "digits") == [(4, 0.5)]


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_points_of_a_killed_process_are_not_doubled(
    run: RecordedRun, uri: str, tmp_path: Path, kind: str
) -> None:
    """SQLite itself keeps a point once that comes twice; files have every line that is sent."""
    if kind == "files":
        uri = f"file://{tmp_path}/mlruns"
    run.report(range(1, 6))
    assert send_all(run, MLflow(uri)) is None
    kept = cursor.read(run.storage, "mlflow")
    assert kept is not None
    # As after a kill: MLflow has points, and a run, that the cursor does not know of.
    cursor.write(run.storage, "mlflow", cursor.Cursor(key=kept.key, attempt=0, row=2))
    run.report(range(6, 9))
    assert send_all(run, MLflow(uri)) is None
    assert history(uri) == [(row, loss(0, row)) for row in range(1, 9)]


def test_a_changed_parameter_keeps_its_first_value_and_stops_nothing(run: RecordedRun, uri: str) -> None:
    from tests.trackers.recorded import facts_of

    from powertrain.trackers.sending import Sender

    run.report([1])
    assert send_all(run, MLflow(uri)) is None
    run.report([2])
    sender = Sender(MLflow(uri), run.storage, facts_of(run, params={"lr": 0.2, "new": 1}), print)
    sender.end(None, 60.0)
    assert sender.follow() is None
    assert only_run(uri).data.params == {"lr": "0.1", "net/depth": "3", "new": "1"}


def test_rows_that_are_trained_again_keep_their_first_values(run: RecordedRun, uri: str) -> None:
    run.report(range(1, 6))
    assert send_all(run, MLflow(uri)) is None
    run.fail(0)
    run.begin(1, first_row=4)
    run.report(range(4, 8), attempt=1)
    assert send_all(run, MLflow(uri)) is None
    assert history(uri) == [(row, loss(0 if row < 6 else 1, row)) for row in range(1, 8)]


def test_more_metrics_than_a_request_takes_are_sent_in_several(run: RecordedRun, uri: str) -> None:
    many: dict[str, Any] = {f"metric {number}": float(number) for number in range(1200)}
    run.report([1, 2], **many)
    assert send_all(run, MLflow(uri)) is None
    metrics = only_run(uri).data.metrics
    assert metrics == many


def test_a_secret_in_the_address_is_refused_with_the_variables_to_set() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        MLflow("https://me:hunter2@mlflow.local")
    assert "hunter2" not in str(refused.value)


def test_the_environment_is_filled_in_for_a_later_process() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.local:5000")
        patch.setenv("MLFLOW_EXPERIMENT_NAME", "vision")
        settled = MLflow().settled("")
    assert (settled.tracking_uri, settled.experiment) == ("http://mlflow.local:5000", "vision")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MLflowServer]:
    server = MLflowServer(tmp_path / "server")
    yield server
    server.stop()


@pytest.mark.timeout(900)
def test_a_server_that_is_down_for_half_of_the_points_gets_each_of_them_once(
    run: RecordedRun, server: MLflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "REFUSED_TIMEOUT_S", 0.0)
    tracker = MLflow(server.uri)
    server.start()
    run.report(range(1, 501))
    assert send_all(run, tracker) is None
    server.stop()
    run.report(range(501, 1001))
    unsent = send_all(run, tracker, "finished")
    assert unsent is not None
    assert unsent.points == 500
    server.start()
    assert send_all(run, tracker, "finished") is None
    server.stop()
    assert history(server.store) == [(row, loss(0, row)) for row in range(1, 1001)]
    assert only_run(server.store).info.status == "FINISHED"
