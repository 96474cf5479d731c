"""Datasets on a trainer: what is refused, who gets which rows, and where a run goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.data.small_source import NumberedBlocks, numbered

import powertrain
from powertrain import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from powertrain.data.dataset import Dataset
from powertrain.data.plan.plan import Part, Plan
from powertrain.driver import blueprint
from powertrain.driver.datasets import prepare_data, prepare_like_rank_zero
from powertrain.engine.local.warm_server import WarmServer
from powertrain.errors import ConfigError, DataChangedError, DataError, OutsideWorkerError
from powertrain.run import events as ev
from powertrain.run.record import journal
from powertrain.storage import open_storage
from powertrain.storage.files import private_roots
from powertrain.worker.place import DataSettings, Place

BLOCKS = [7, 13, 20]
ROWS = sum(BLOCKS)


def dataset(blocks: list[int] | None = None, seed: int | None = None) -> Dataset:
    return Dataset(numbered(blocks or BLOCKS, seed=seed))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this node keeps blocks of data; nothing is left there by any test."""
    monkeypatch.setattr(private_roots, "_LASTING", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    yield tmp_path / "node"
    assert list((tmp_path / "node").iterdir()) == []


def read(config: dict[str, Any]) -> list[int]:
    """Read batches of 8 rows of all ranks, and report the rows with a checkpoint; end after ``batches``, if given."""
    if config.get("asks", True):
        powertrain.get_checkpoint()
    shard = powertrain.get_dataset_shard("train")
    rows: list[int] = []
    number = 0
    while shard.epoch < config.get("epochs", 1):
        for batch in shard.iter_batches(global_batch_size=8):
            number += 1
            rows += batch["id"].tolist()
            with powertrain.checkpoint_dir() as directory:
                Path(directory, f"rank-{powertrain.get_context().get_world_rank()}").write_text("x")
                powertrain.report(
                    {"rows": batch["id"].tolist()}, checkpoint=Checkpoint.from_directory(directory)
                )
            if number == config.get("batches"):
                return rows
    return rows


def fit(
    name: str = "data", data: Any = None, config: DataConfig | None = None, workers: int = 0, **loop: Any
) -> Result:
    return DataParallelTrainer(
        read,
        train_loop_config=loop,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name),
        datasets={"train": data or dataset()},
        dataset_config=config,
    ).fit()


def warnings_of(result: Result) -> list[str]:
    events = journal.read(open_storage(result.path))
    return [event.message for event in events if isinstance(event, ev.Warned)]


def record_of(result: Result) -> dict[str, Any]:
    return dict(json.loads(Path(result.path, "run.json").read_text()))


# --------------------------------------------------------------------------- what is refused


def make(**arguments: Any) -> Callable[[], Any]:
    scaling = ScalingConfig(num_workers=0)
    return lambda: DataParallelTrainer(lambda: None, scaling_config=scaling, **arguments)


class OfRay:
    """What a dataset of Ray looks like from outside."""

    def streaming_split(self, n: int) -> None: ...


class IteratorOfRay:
    """Something else of Ray's."""


OfRay.__module__ = "ray.data.dataset"
IteratorOfRay.__module__ = "ray.data.iterator"


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        ({"datasets": [1]}, ["must be a dict", "list"]),
        ({"datasets": {"": 1}}, ["must be a dict from names"]),
        ({"datasets": {"train": [1, 2]}}, ["datasets['train'] is a builtins.list", "from_items"]),
        (
            {"datasets": {"train": OfRay()}},
            ["'train' is Ray's", "engine='ray'", "snapshot=True", "powertrain.data.read_parquet"],
        ),
        (
            {"datasets": {"train": IteratorOfRay()}, "dataset_config": DataConfig(snapshot=True)},
            ["ray.data.iterator.IteratorOfRay", "not a ray.data.Dataset"],
        ),
        (
            {"datasets": {"train": dict}, "dataset_config": DataConfig(datasets_to_split=["trian"])},
            ["'trian'", "('train')", "Correct the name"],
        ),
        ({"dataset_config": DataConfig(datasets_to_split=["train"])}, ["'train'", "(none)"]),
    ],
)
def test_what_is_no_dataset_is_refused_when_the_trainer_is_made(
    arguments: dict[str, Any], pieces: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**arguments)()
    for piece in pieces:
        assert piece in str(refused.value)


@pytest.mark.usefixtures("node")
def test_data_that_cannot_be_read_are_refused_by_fit_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WarmServer, "fork", lambda *_, **__: pytest.fail("a worker was started"))
    with pytest.raises(DataError, match="'train' has no rows"):
        fit("empty", dataset([0]), workers=1)
    with pytest.raises(ConfigError, match=r"datasets\['train'\] is a int"):
        fit("odd", lambda: 3)


@pytest.mark.usefixtures("node")
def test_a_dataset_that_cannot_travel_is_named() -> None:
    source = NumberedBlocks(BLOCKS)
    source.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'train' cannot be sent to the workers.*lock"):
        fit("locked", Dataset(Plan((Part(source),))), workers=1)
    assert fit("inline", Dataset(Plan((Part(source),)))).return_value == list(range(ROWS))


@pytest.mark.usefixtures("node")
def test_a_function_that_requests_data_it_was_not_given_gets_an_error() -> None:
    def ask() -> None:
        powertrain.get_dataset_shard("test")

    trainer = DataParallelTrainer(
        ask, scaling_config=ScalingConfig(num_workers=0), datasets={"train": dataset()}
    )
    with pytest.raises(TrainingFailedError, match="no dataset 'test'"):
        trainer.fit()


def test_the_driver_has_no_shards() -> None:
    with pytest.raises(OutsideWorkerError, match="get_dataset_shard"):
        powertrain.get_dataset_shard("train")


# --------------------------------------------------------------------------- who gets what


@pytest.mark.usefixtures("node")
def test_a_run_goes_on_in_mid_epoch_and_reads_every_row_once() -> None:
    first = fit(batches=2)
    assert first.data_positions["train"].position == 16
    assert (first.data_positions["train"].epoch, first.data_positions["train"].rows) == (0, ROWS)
    second = fit(epochs=2)
    rows = first.return_value + second.return_value
    assert sorted(rows[:ROWS]) == sorted(rows[ROWS:]) == list(range(ROWS))
    assert rows[:ROWS] != list(range(ROWS)), "they are shuffled"
    assert rows[:ROWS] != rows[ROWS:], "each epoch has an order of its own"
    assert record_of(first)["data_seed"] == record_of(second)["data_seed"]
    assert not [message for message in warnings_of(second) if "epoch" in message]


@pytest.mark.usefixtures("node")
def test_the_end_card_says_how_far_data_were_read(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    assert "  data        train: epoch 0, 100 %\n" in capsys.readouterr().out


@pytest.mark.usefixtures("node")
def test_a_seed_that_was_asked_for_makes_the_order_of_any_run() -> None:
    one, same, other = (
        fit(f"run-{number}", config=DataConfig(seed=seed)) for number, seed in enumerate((5, 5, 6))
    )
    assert one.return_value == same.return_value != other.return_value
    assert record_of(one)["data_seed"] == 5


@pytest.mark.usefixtures("node")
def test_workers_get_their_parts_by_pickle_and_a_restored_run_has_its_datasets() -> None:
    first = fit(workers=2, batches=2)
    by_rank = first.dataframe(ranks="all")
    seen = [row for rows in by_rank["rows"] for row in rows]
    assert len(seen) == len(set(seen)) == 16
    restored = DataParallelTrainer.restore(first.path, train_loop_config={})
    second = restored.fit()
    later = [row for rows in second.dataframe(ranks="all")["rows"] for row in rows]
    assert sorted(later) == list(range(ROWS)), "all rows of both starts, each once"


@pytest.mark.usefixtures("node")
def test_a_dataset_that_is_not_split_is_whole_on_every_rank() -> None:
    result = fit(workers=2, config=DataConfig(datasets_to_split=[]), data=dataset)
    frame = result.dataframe(ranks="all")
    for rank in (0, 1):
        rows = [row for rows in frame[frame["rank"] == rank]["rows"] for row in rows]
        assert sorted(rows) == list(range(ROWS))


@pytest.mark.usefixtures("node")
def test_blocks_are_kept_where_was_asked_for_and_gone_at_the_end(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(powertrain.UserCallback):
        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            seen.append(any((tmp_path / "fast").glob("powertrain-*/*/blocks/*")))

    result = DataParallelTrainer(
        read,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="kept", callbacks=[Looks()]),
        datasets={"train": dataset()},
        dataset_config=DataConfig(cache_dir=tmp_path / "fast"),
    ).fit()
    assert sorted(result.return_value) == list(range(ROWS))
    assert any(seen)
    assert list((tmp_path / "fast").iterdir()) == []


# --------------------------------------------------------------------------- going on


@pytest.mark.usefixtures("node")
def test_changed_data_are_refused_and_say_how_to_start_the_epoch_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit(batches=2)
    with pytest.raises(DataChangedError) as refused:
        fit(data=dataset([7, 13]))
    for piece in ("'train'", "40 rows then", "20 now", 'DataConfig(on_change="restart_epoch")'):
        assert piece in str(refused.value)
    again = fit(data=dataset([7, 13]), config=DataConfig(on_change="restart_epoch"))
    assert sorted(again.return_value) == list(range(20))
    (remark,) = [message for message in warnings_of(again) if "is not what it was" in message]
    assert "40 rows then, 20 now" in remark
    assert "epoch 0 starts again" in remark


@pytest.mark.usefixtures("node")
def test_a_loop_that_does_not_ask_for_its_checkpoint_begins_anew_and_that_is_said() -> None:
    fit(batches=2)
    again = fit(asks=False)
    assert sorted(again.return_value) == list(range(ROWS))
    (warning,) = [message for message in warnings_of(again) if "has not asked for its checkpoint" in message]
    assert "train: epoch 0, 40 %" in warning


@pytest.mark.usefixtures("node")
def test_data_begin_anew_in_a_run_that_begins_from_another_runs_checkpoint() -> None:
    first = fit(batches=2)
    other = DataParallelTrainer(
        read,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="other"),
        datasets={"train": dataset()},
        resume_from_checkpoint=first.checkpoint,
    ).fit()
    assert sorted(other.return_value) == list(range(ROWS))


# --------------------------------------------------------------------------- what a run keeps of its datasets


@pytest.mark.parametrize(
    "held",
    [b"x" * 2**25, "s3://bucket/rows?secret_key=hunter2", threading.Lock()],
    ids=["many rows", "a secret", "no pickle"],
)
def test_datasets_that_are_better_not_kept_are_asked_for_again(tmp_path: Path, held: Any) -> None:
    storage = open_storage(tmp_path)
    assert blueprint.store(storage, {"datasets": {"train": held}, "metadata": 1}) == ""
    kept = blueprint.load(storage)
    assert kept == {"datasets": None, "needs_datasets": ["train"], "metadata": 1}
    assert b"hunter2" not in (tmp_path / "trainer.pickle").read_bytes()
    storage.put("run.json", b"{}")
    with pytest.raises(ConfigError, match=r"does not keep its datasets \(train\).*datasets=\{\.\.\.\}"):
        DataParallelTrainer.restore(tmp_path)


def test_datasets_that_are_kept_come_back(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    blueprint.store(storage, {"datasets": {"train": "s3://bucket/rows"}})
    assert blueprint.load(storage) == {"datasets": {"train": "s3://bucket/rows"}}


# --------------------------------------------------------------------------- processes with datasets of their own


def test_a_process_that_makes_its_own_datasets_must_find_those_of_rank_zero(tmp_path: Path) -> None:
    trainer = make(datasets={"train": dataset})()
    own: Mapping[str, Any] = prepare_like_rank_zero(
        trainer._request,
        Place(rank=1, data=DataSettings(seed=9, cache=str(tmp_path), fingerprints=fingerprints(tmp_path))),
    )
    assert (own["train"].seed, own["train"].rows) == (9, ROWS)
    with pytest.raises(DataError, match=r"'train' of rank 1, with 40 rows, is not the one of rank 0"):
        prepare_like_rank_zero(
            trainer._request,
            Place(rank=1, data=DataSettings(cache=str(tmp_path), fingerprints={"train": "another"})),
        )


def fingerprints(directory: Path) -> dict[str, str]:
    trainer = make(datasets={"train": dataset})()
    prepared = prepare_data(trainer._request, 9, str(directory), None, open_storage(directory))
    return {name: found.fingerprint for name, found in prepared.items()}


def test_a_dataset_of_hugging_face_is_taken_as_it_is(tmp_path: Path) -> None:
    hugging_face = pytest.importorskip("datasets")
    dataset = hugging_face.Dataset.from_dict({"id": [1, 2, 3]})
    found: list[int] = []

    def read() -> None:
        found.extend(row["id"] for row in powertrain.get_dataset_shard("train").iter_rows())

    DataParallelTrainer(
        read,
        datasets={"train": dataset},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    assert sorted(found) == [1, 2, 3]


def test_splits_of_hugging_face_are_refused_with_what_to_give() -> None:
    hugging_face = pytest.importorskip("datasets")
    splits = hugging_face.DatasetDict({"train": hugging_face.Dataset.from_dict({"id": [1]})})
    with pytest.raises(DataError, match=r"DatasetDict of the splits 'train'. Pick one: dataset\['train'\]"):
        DataParallelTrainer(lambda: None, datasets={"train": splits})
