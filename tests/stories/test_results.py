"""What is left of a run when the process that trained is gone: the same result, read from the run's directory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ending
import pytest
import story

import powertrain
from powertrain import CheckpointConfig, PreemptedError, Result, TrainingFailedError
from powertrain.errors import StorageError
from powertrain.run.remote import protocol
from powertrain.storage import signed
from powertrain.storage.files.private_roots import runtime_root


def ended(fits: Any, how: str) -> Result:
    """The result of a run that has ended so."""
    trainer = fits.trainer(
        ending.end_as,
        name=how,
        train_loop_config={"how": how},
        datasets={"train": powertrain.data.range(12)},
        checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min"),
        log_to_file=True,
    )
    try:
        result: Result = trainer.fit()
    except (TrainingFailedError, PreemptedError) as error:
        result = error.result
    assert result.state == how
    return result


def stop_once_it_goes_on() -> None:
    story.await_told("rank 0 goes on", "rank 1 goes on")
    (live,) = protocol.live_runs(runtime_root())
    assert list(protocol.send_request(live.directory, protocol.StopRequest(by="a story")))


@pytest.mark.smoke
def test_a_result_read_later_holds_what_the_caller_of_fit_got(fits: Any) -> None:
    results = [ended(fits, how) for how in ("finished", "failed", "preempted")]
    for told in ("rank 0 goes on", "rank 1 goes on"):
        (fits.directory / told).unlink()
    stopping = threading.Thread(target=stop_once_it_goes_on)
    stopping.start()
    results.append(ended(fits, "stopped"))
    stopping.join()

    then = [ending.said_by(result) for result in results]
    read = subprocess.run(
        [sys.executable, ending.__file__, *(result.path for result in results)],
        capture_output=True,
        text=True,
        timeout=story.PATIENCE,
        check=True,
    )
    for live, later in zip(then, json.loads(read.stdout), strict=True):
        assert {name: (live[name], later[name]) for name in live if live[name] != later[name]} == {}
    finished, failed, preempted, stopped = then
    assert finished["return_value"] == "{'rank': 0, 'path': PosixPath('somewhere')}"
    assert "Rank 1 raised ValueError: shard 7 is empty" in failed["error"]
    assert f"{fits.directory}/storage/failed/logs" in failed["error"]
    assert "'train': DataPosition(epoch=" in finished["data_positions"]
    assert [said["return_value"] for said in (failed, preempted, stopped)] == ["None"] * 3
    assert [said["error"] for said in (finished, preempted, stopped)] == ["None"] * 3
    assert "SIGTERM" in preempted["reason"]
    assert "asked by a story" in stopped["reason"]


def return_what_is_asked(config: dict[str, Any]) -> Any:
    return config["value"]


def returned(fits: Any, value: Any) -> Result:
    result: Result = fits.trainer(
        return_what_is_asked, "inline", name="returns", train_loop_config={"value": value}
    ).fit()
    return result


def test_a_run_that_is_started_again_has_the_newest_return_value_or_none(fits: Any) -> None:
    for value in ("first", "second", None, "fourth"):
        path = returned(fits, value).path
        assert Result.from_path(path).return_value == value


class Trap:
    """Leaves a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


@contextlib.contextmanager
def configured_in(place: str | Path) -> Iterator[None]:
    """As a user whose key lies there."""
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.setenv("XDG_CONFIG_HOME", str(place))
        yield


def test_a_return_value_that_another_user_wrote_is_not_opened_unasked(fits: Any, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    result = Result.from_path(returned(fits, Trap(sprung)).path)
    with (
        configured_in(tmp_path / "of another user"),
        pytest.raises(StorageError, match=r"not written by you.*open_return_value\(trust=True\)"),
    ):
        result.return_value  # noqa: B018
    result._repr_html_()
    assert not sprung.exists()
    result.open_return_value(trust=True)
    assert sprung.exists()


def test_a_return_value_that_could_not_be_kept_is_reported_and_is_there_in_memory(
    fits: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with configured_in("/dev/null"):  # below which no key can be made
        result = returned(fits, "kept in memory")
    assert result.return_value == "kept in memory"
    assert "is not kept in the run's directory: NotADirectoryError" in " ".join(
        capfd.readouterr().out.split()
    )
    with pytest.raises(StorageError, match="was not kept in its directory"):
        Result.from_path(result.path).return_value  # noqa: B018


def report_solo_or_nothing(config: dict[str, Any]) -> None:
    for report in config["reports"]:
        powertrain.report(report["metrics"], solo=report.get("solo", False))


@pytest.mark.parametrize(
    ("reports", "metrics"),
    [
        ([], None),
        ([{"metrics": {}}], {}),
        ([{"metrics": {"a": 1}}, {"metrics": {}}], {}),
        ([{"metrics": {"a": 1}, "solo": True}], {"a": 1}),
        ([{"metrics": {"a": 1}}, {"metrics": {"b": 2}, "solo": True}], {"a": 1}),
    ],
)
def test_the_last_metrics_are_the_same_live_and_later(fits: Any, reports: Any, metrics: Any) -> None:
    options = {"name": "reports", "train_loop_config": {"reports": reports}}
    result = fits.trainer(report_solo_or_nothing, "inline", **options).fit()
    assert result.metrics == metrics
    assert Result.from_path(result.path).metrics == metrics


def test_what_is_kept_is_readable_by_its_owner_only(fits: Any) -> None:
    path = Path(returned(fits, "secret").path)
    assert (path / "return_value.pickle").stat().st_mode & 0o077 == 0
    assert signed.get(powertrain.storage.open_storage(path), "return_value.pickle")
