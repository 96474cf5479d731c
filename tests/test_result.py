from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_run import at, attempt, points, write
from tests.s3_server import S3Server

from powertrain import Result
from powertrain.checkpoint import Checkpoint
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.committed import record_validation
from powertrain.checkpoint.manifest import ManifestFile, Validation
from powertrain.errors import ConfigError, StorageError
from powertrain.result import return_value
from powertrain.run import events as ev
from powertrain.run.record.journal import Journal
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import parse
from powertrain.worker.data.shards import DataPosition

SCORES: list[dict[str, Any]] = [{"eval": {"loss": loss}} for loss in (0.5, 0.2, float("nan"))] + [{}]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def storage_of(kind: str, tmp_path: Path, server: S3Server) -> Storage:
    if kind == "local":
        return open_storage(tmp_path / "run")
    if kind == "s3":
        return open_storage(server.uri(f"{tmp_path.name}/run"))
    from pyarrow import fs

    filesystem, _ = fs.FileSystem.from_uri("mock://x")
    return open_storage("runs/run", filesystem=filesystem)


@pytest.fixture(params=["local", "s3", "filesystem"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Storage:
    storage = storage_of(request.param, tmp_path, server)
    chain = Chain.take_over(storage, 1)
    for row, metrics in enumerate(SCORES, start=1):
        digest = storage.put_file(f"checkpoints/c{row}/model", __file__)
        file = ManifestFile(name="model", size=digest.size, xxh3=digest.xxh3, rank=0)
        commit(
            storage, chain, name=f"c{row}", row=row, attempt=0, files=[file], metrics=metrics, world_size=1,
            metadata={"row": row},
            extras={"data": {"train": {"v": 1, "epoch": row, "position": 10 * row, "rows": 100}}},
        )  # fmt: skip
    return storage


def result_of(storage: Storage) -> Result:
    return Result(path=storage.uri, state="finished", storage_filesystem=getattr(storage, "filesystem", None))


def row_of(checkpoint: Checkpoint | None) -> Any:
    assert checkpoint is not None
    return checkpoint.get_metadata()["row"]


def test_checkpoints_of_a_result_are_found_on_any_storage(storage: Storage) -> None:
    result = result_of(storage)
    assert row_of(result.checkpoint) == 4
    assert [row_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [1, 2, 3, 4]
    assert [metrics for _, metrics in result.best_checkpoints][:2] == SCORES[:2]
    with result.checkpoint.as_directory() as directory:  # type: ignore[union-attr]
        assert Path(directory, "model").read_bytes() == Path(__file__).read_bytes()


def test_the_best_has_the_best_number_and_a_name_that_none_has_is_refused_with_those_there_are(
    storage: Storage,
) -> None:
    result = result_of(storage)
    assert row_of(result.get_best_checkpoint("eval/loss", "min")) == 2
    assert row_of(result.get_best_checkpoint("eval/loss", "max")) == 1
    with pytest.raises(
        ConfigError, match=r"under the metric 'eval/los'. Did you mean 'eval/loss'\? There are "
    ):
        result.get_best_checkpoint("eval/los", "max")
    with pytest.raises(ConfigError, match="neither 'min' nor 'max'"):
        result.get_best_checkpoint("eval/loss", "best")


def test_metrics_of_validations_count(storage: Storage) -> None:
    record_validation(storage, "c3", Validation(status="VALIDATED", metrics={"accuracy": 0.9}))
    record_validation(storage, "c1", Validation(status="VALIDATED", metrics={"accuracy": 0.7}))
    result = result_of(storage)
    assert row_of(result.get_best_checkpoint("accuracy", "max")) == 3
    assert result.best_checkpoints[0][1] == {"eval": {"loss": 0.5}, "accuracy": 0.7}


def test_data_positions_are_those_of_the_newest_checkpoint(storage: Storage, tmp_path: Path) -> None:
    (position,) = result_of(storage).data_positions.items()
    assert position == ("train", DataPosition(epoch=4, position=40, rows=100))
    assert Result(path=str(tmp_path / "empty"), state="finished").data_positions == {}


def test_its_path_can_be_read_on_its_filesystem_as_it_stands(storage: Storage) -> None:
    result = result_of(storage)
    with result.filesystem.open_input_stream(os.path.join(result.path, "checkpoints/c1/model")) as stream:
        assert stream.read() == Path(__file__).read_bytes()


def test_a_directory_without_a_run_is_refused_by_its_name(tmp_path: Path, server: S3Server) -> None:
    for path in (str(tmp_path), server.uri("nothing")):
        with pytest.raises(StorageError, match="holds no run") as caught:
            Result.from_path(path)
        assert "secret_key=testing" not in str(caught.value)


def test_secrets_in_an_address_are_in_no_path_and_not_shown(server: S3Server) -> None:
    assert "secret_key=testing" in server.uri("absent")
    result = Result(path=server.uri("absent"), state="finished")
    assert "testing" not in result.path + repr(result)
    checkpoint = Checkpoint(server.uri("absent"))
    assert "testing" not in checkpoint.path + repr(checkpoint)


def test_path_and_filesystem_together_name_the_same_checkpoint_and_run_again(storage: Storage) -> None:
    result = result_of(storage)
    checkpoint = result.checkpoint
    assert checkpoint is not None
    again = Checkpoint(checkpoint.path, checkpoint.filesystem)
    assert again == checkpoint
    assert row_of(again) == 4
    assert row_of(Result(path=result.path, state="x", storage_filesystem=result.filesystem).checkpoint) == 4
    if again.given_filesystem is None:  # pyarrow's mock cannot be pickled
        assert row_of(pickle.loads(pickle.dumps(again))) == 4


def test_the_filesystem_of_an_object_store_takes_paths_without_scheme(
    tmp_path: Path, server: S3Server
) -> None:
    from pyarrow import fs

    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("content")
    filesystem = Checkpoint(server.uri("plain/run")).filesystem
    bucket = parse(server.uri("plain/run")).bucket
    fs.copy_files(str(tmp_path / "here"), f"{bucket}/plain/run/sub/there", destination_filesystem=filesystem)
    found = filesystem.get_file_info(fs.FileSelector(f"{bucket}/plain/run/sub", recursive=True))
    assert [info.path for info in found] == [
        f"{bucket}/plain/run/sub/there",
        f"{bucket}/plain/run/sub/there/file",
    ]
    assert open_storage(server.uri("plain/run")).get("sub/there/file") == b"content"
    with Checkpoint(f"{bucket}/plain/run/sub/there", filesystem).as_directory() as directory:
        assert Path(directory, "file").read_text() == "content"
    with pytest.raises(StorageError, match="is not a path of this file system"):
        Checkpoint("other-bucket/x", filesystem)


# --------------------------------------------------------------------------- from a run's directory


def failed(message: str, attempt: int = 0) -> ev.Failed:
    culprit = ev.WorkerFailure(rank=1, kind="raised", summary="", error_type="ValueError", message=message)
    return ev.Failed(
        time=at(2), attempt=attempt, failures=(culprit,), decision="give_up", reason="that was enough"
    )


def ended(state: str, **fields: Any) -> ev.Ended:
    return ev.Ended(time=at(3), state=state, reason="that was enough", **fields)


def started_again(directory: Path, *facts: ev.Event) -> None:
    journal = Journal(open_storage(directory), 2)
    start = ev.RunStarted(time=at(4), name="run", lease=2, host="h", pid=2, version="0", engine="local")
    for fact in (start, *facts):
        journal.append(fact)
    journal.close()


def test_the_error_of_a_failed_run_is_that_of_its_newest_start(tmp_path: Path) -> None:
    write(tmp_path / "run", facts=[failed("first")], end=ended("failed"))
    error = Result.from_path(tmp_path / "run").error
    assert error is not None
    assert str(error).startswith("Rank 1 raised ValueError: first\n")
    assert str(error).endswith("That was enough.")
    assert error.worker_failures[1].error_type == "ValueError"
    assert error.result.error is error

    started_again(tmp_path / "run", ended("failed"))
    error = Result.from_path(tmp_path / "run").error
    assert str(error) == "The run failed before any worker did.\nThat was enough."
    started_again(tmp_path / "run")
    assert Result.from_path(tmp_path / "run").error is None


def test_a_run_that_goes_on_after_a_failure_has_no_error(tmp_path: Path) -> None:
    write(tmp_path / "run", facts=[failed("first"), attempt(1, 1, 1)])
    result = Result.from_path(tmp_path / "run")
    assert (result.error, result.return_value) == (None, None)


@pytest.mark.parametrize("attribute", ["metrics_dataframe", "return_value", "findings"])
def test_a_directory_that_is_gone_is_not_taken_for_a_run_that_left_nothing(
    tmp_path: Path, attribute: str
) -> None:
    write(tmp_path / "run", points([1], lambda row, rank: {"loss": 0.5}))
    result = Result.from_path(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageError, match="holds no run, or not any more"):
        getattr(result, attribute)
    with pytest.raises(StorageError, match="holds no run, or not any more"):
        result.plot()


def test_the_metrics_are_rank_zeros_unless_other_ranks_are_asked_for(tmp_path: Path) -> None:
    def reported(row: int, rank: int) -> dict[str, Any]:
        return {"loss": row + rank / 10, **({"only": 1} if rank else {})}

    write(tmp_path / "run", points([1, 2], reported, ranks=(0, 1)))
    result = Result.from_path(tmp_path / "run")
    own = result.metrics_dataframe
    assert own["loss"].tolist() == [1.0, 2.0]
    assert "only" not in own, "another rank's metric is no column of rank 0's"
    assert result.dataframe(ranks="all")["loss"].tolist() == [1.0, 1.1, 2.0, 2.1]
    assert result.dataframe(ranks=1)["only"].tolist() == [1, 1]
    assert len(result.dataframe(ranks=7)) == 0


@pytest.mark.parametrize("ranks", [-1, True, "some", None, 1.5])
def test_ranks_that_are_none_are_refused(tmp_path: Path, ranks: Any) -> None:
    write(tmp_path / "run", points([1], lambda row, rank: {"loss": 0.5}))
    with pytest.raises(ConfigError, match=r"is not a rank. Give a number from 0 on, or \"all\""):
        Result.from_path(tmp_path / "run").dataframe(ranks=ranks)


def test_a_value_that_the_journal_names_and_that_is_missing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "run", end=ended("failed", returned=12))
    with pytest.raises(StorageError, match="returned a value that was not kept in its directory"):
        Result.from_path(tmp_path / "run").return_value  # noqa: B018


def test_a_value_of_an_earlier_start_is_not_taken_for_one_of_the_newest(tmp_path: Path) -> None:
    storage = write(tmp_path / "run", end=ended("failed", returned=12))
    assert return_value.store(storage, pickle.dumps("earlier")) == ""
    assert Result.from_path(tmp_path / "run").return_value == "earlier"
    started_again(tmp_path / "run", ended("failed"))
    assert Result.from_path(tmp_path / "run").return_value is None


def test_a_value_is_kept_on_any_storage_and_can_be_removed(storage: Storage) -> None:
    assert return_value.store(storage, pickle.dumps({"loss": 0.5})) == ""
    assert return_value.opened(return_value.load(storage)) == {"loss": 0.5}
    return_value.remove(storage)
    with pytest.raises(StorageError, match="was not kept") as caught:
        return_value.load(storage)
    assert "secret_key=testing" not in str(caught.value)


def test_a_large_value_is_not_kept_and_the_reason_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(return_value, "LARGEST", 10**6)
    storage = open_storage(tmp_path)
    assert return_value.store(storage, bytes(10**6)) == ""
    return_value.remove(storage)
    assert return_value.store(storage, bytes(2 * 10**6)) == "it takes 2 MB, more than the limit of 1 MB"
    assert storage.list() == []


def test_a_value_whose_class_is_not_here_says_what_to_do(tmp_path: Path) -> None:
    storage = write(tmp_path / "run", end=ended("failed", returned=12))
    return_value.store(storage, b"cnot_there_at_all\nThing\n.")
    with pytest.raises(
        StorageError, match=r"cannot be opened in this process: .*not_there_at_all.*importable"
    ):
        Result.from_path(tmp_path / "run").return_value  # noqa: B018


def test_a_result_can_be_made_with_rays_arguments_without_a_run(tmp_path: Path) -> None:
    import pandas as pd

    first, second = (Checkpoint(tmp_path / name) for name in ("a", "b"))
    frame = pd.DataFrame([{"loss": 1.0}])
    error = RuntimeError("it failed")
    result = Result(
        metrics={"loss": 1.0, "config": {"lr": 1}},
        checkpoint=second,
        error=error,
        path=str(tmp_path),
        metrics_dataframe=frame,
        best_checkpoints=[(first, {"loss": 0.5}), (second, {"loss": 1.0})],
        _storage_filesystem=None,
        return_value=7,
    )
    assert (result.checkpoint, result.error, result.return_value) == (second, error, 7)
    assert result.metrics_dataframe is frame
    assert result.best_checkpoints == [(first, {"loss": 0.5}), (second, {"loss": 1.0})]
    assert result.get_best_checkpoint("loss", "min") == first
    assert (result.config, result.state, result.findings) == ({"lr": 1}, "failed", ())
    assert "it failed" in result._repr_html_()
    with pytest.raises(ConfigError, match="not loaded from a run"):
        result.plot()


def test_a_result_needs_only_rays_positional_arguments() -> None:
    result = Result({"loss": 1}, None, None, "somewhere")
    assert (result.metrics, result.checkpoint, result.error, result.path) == (
        {"loss": 1},
        None,
        None,
        "somewhere",
    )
    given: list[Any] = [result.metrics_dataframe, result.best_checkpoints, result.return_value]
    assert given == [None, [], None]
    assert result.get_best_checkpoint("loss", "min") is None
