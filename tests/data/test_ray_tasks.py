"""Datasets and Ray tasks: ours computed on a cluster, and Ray's written into a run. Who computes changes nothing."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tests.ray_nodes import RayNodes

import powertrain
import powertrain.data as data
from powertrain.data.dataset import Dataset
from powertrain.data.output import tables
from powertrain.data.ray import errors, tasks
from powertrain.data.ray import snapshot as ray_snapshot
from powertrain.data.ray.snapshot import snapshot
from powertrain.errors import ConfigError, DataError
from powertrain.run.events import Warned
from powertrain.run.record import journal
from powertrain.storage import open_storage

ray = pytest.importorskip("ray")


def files(directory: Path, rows: int = 1000) -> Dataset:
    """A dataset of Parquet files with several row groups."""
    directory.mkdir()
    for number in range(2):
        first = number * rows // 2
        x = np.random.default_rng(number).random(rows // 2)
        table = pa.table({"id": pa.array(np.arange(first, first + rows // 2)), "x": pa.array(x)})
        parquet.write_table(table, directory / f"{number}.parquet", row_group_size=100)
    return data.read_parquet(str(directory))


class Counting:
    """A class, made once per process."""

    def __init__(self, add: int) -> None:
        self._add = add

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "id": row["id"] + self._add}


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "noise": rng.random()}


def global_noise(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "noise": random.random()}


def odd_twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row, row] if row["id"] % 2 else []


def centred(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"] - batch["x"].mean()}


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Few rows are many tasks, and here as there they are handled 64 at a time. Gets one entry for each task."""
    monkeypatch.setattr(tasks, "batch_rows", lambda inspected: 64)
    monkeypatch.setattr(tables, "batch_rows", lambda inspected: 64)
    begun: list[int] = []
    fetched = tasks._fetched

    def counted(ray: Any, reference: Any) -> Any:
        begun.append(1)
        return fetched(ray, reference)

    monkeypatch.setattr(tasks, "_fetched", counted)
    return begun


def test_without_a_cluster_the_way_to_one_is_reported(tmp_path: Path) -> None:
    """The first test of this file: later ones are connected, and to say otherwise would have any thread of Ray's that
    asks for something connect again, which ends the process."""
    assert not ray.is_initialized()
    with pytest.raises(ConfigError, match=r"not connected to one.*powertrain.init\(address"):
        files(tmp_path / "in").materialize(on="ray")
    with pytest.raises(DataError, match="on='spark' is unknown"):
        files(tmp_path / "other").materialize(on="spark")


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize(
    "change",
    [
        lambda ds: ds.map(noisy),
        lambda ds: ds.map(global_noise, concurrency=1),
        lambda ds: ds.flat_map(odd_twice).map(noisy),
        lambda ds: ds.map_batches(centred, batch_size=50),
        lambda ds: ds.map(Counting, fn_constructor_args=[5]).filter(lambda row: row["id"] % 3 == 0),
    ],
    ids=["rng", "global generator", "flat_map", "map_batches", "class and filter"],
)
def test_rows_order_and_random_numbers_are_those_of_one_process(
    tmp_path: Path, change: Callable[[Dataset], Dataset], shuffled: bool, many_tasks: list[int]
) -> None:
    dataset = change(files(tmp_path / "in").random_shuffle(seed=5))
    if not shuffled:  # with the seed, from which random numbers follow
        dataset = Dataset(dataclasses.replace(dataset.plan, shuffled=False))
    assert dataset.materialize(on="ray").to_pandas().equals(dataset.materialize().to_pandas())
    assert len(many_tasks) >= 8


@pytest.mark.usefixtures("ray_cluster")
def test_rows_in_memory_are_computed_by_many_tasks(many_tasks: list[int]) -> None:
    rows = [{"id": number, "x": float(number % 7), "text": str(number)} for number in range(3000)]
    dataset = data.from_items(rows).map_batches(centred, batch_size=50)
    assert dataset.materialize(on="ray").take_all() == dataset.materialize().take_all()
    assert len(many_tasks) >= 30


@pytest.mark.usefixtures("ray_cluster")
def test_files_are_written_as_without_ray(tmp_path: Path) -> None:
    dataset = files(tmp_path / "in").map(lambda row: {"id": row["id"], "half": row["x"] / 2})
    dataset.write_parquet(str(tmp_path / "here"))
    dataset.write_parquet(str(tmp_path / "there"), on="ray")
    dataset.write_csv(str(tmp_path / "csv"), on="ray")
    dataset.write_json(str(tmp_path / "json"), on="ray")
    here = data.read_parquet(str(tmp_path / "here")).to_pandas()
    assert data.read_parquet(str(tmp_path / "there")).to_pandas().equals(here)
    assert data.read_csv(str(tmp_path / "csv")).to_pandas()["id"].tolist() == here["id"].tolist()
    assert data.read_json(str(tmp_path / "json")).to_pandas()["id"].tolist() == here["id"].tolist()
    assert "1,000 rows" in dataset.stats()


@pytest.mark.usefixtures("ray_cluster")
def test_the_rows_are_computed_elsewhere(tmp_path: Path) -> None:
    dataset = files(tmp_path / "in").map(lambda row: {"pid": os.getpid()})
    assert os.getpid() not in {row["pid"] for row in dataset.materialize(on="ray").take_all()}


@pytest.mark.usefixtures("ray_cluster")
def test_a_failing_function_is_reported_as_without_ray_and_leaves_no_file(tmp_path: Path) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 700:
            raise ValueError("too many")
        return row

    dataset = files(tmp_path / "in").map(fails)
    with pytest.raises(DataError) as here:
        dataset.materialize()
    with pytest.raises(DataError) as there:
        dataset.write_parquet(str(tmp_path / "out"), on="ray")
    assert str(there.value) == str(here.value)
    assert isinstance(there.value.__cause__, ValueError)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.usefixtures("ray_cluster")
def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(DataError, match="cannot be sent to Ray's tasks"):
        files(tmp_path / "in").map(lambda row: {"held": lock.locked()}).materialize(on="ray")


# --------------------------------------------------------------------------- Ray's datasets, written into a run


@pytest.fixture
def ray_data(ray_cluster: RayNodes) -> Any:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data


def test_a_snapshot_has_all_rows_in_rays_order_and_is_written_once(tmp_path: Path, ray_data: Any) -> None:
    run = open_storage(tmp_path / "run")
    wide = ray_data.range(50, override_num_blocks=5).map(
        lambda row: {"id": row["id"], "image": np.full((2, 2), row["id"], np.uint8)}
    )
    dataset, said = snapshot("train/a", wide, run)
    assert "was written once" in said
    assert "50 rows in 1 Parquet file)" in said
    assert sorted(row["id"] for row in dataset.take_all()) == list(range(50))
    assert dataset.take_batch(3)["image"].shape == (3, 2, 2)
    assert snapshot("limited", wide.limit(13), run)[0].count() == 13
    again, said = snapshot("train/a", ray_data.range(7), run)
    assert "earlier start of this run" in said
    assert again.count() == 50


def test_what_an_unfinished_start_has_left_is_written_again(
    tmp_path: Path, ray_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_snapshot, "_FILE_BYTES", 1)
    run = open_storage(tmp_path / "run")
    run.put("data/train/000009.parquet", b"half a file")
    dataset, said = snapshot("train", ray_data.range(10, override_num_blocks=2), run)
    assert "in 2 Parquet files" in said
    assert sorted(row["id"] for row in dataset.take_all()) == list(range(10))


def test_a_snapshot_that_fails_leaves_nothing_and_says_what_ray_said(tmp_path: Path, ray_data: Any) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("row is broken")

    run = open_storage(tmp_path / "run")
    with pytest.raises(DataError) as failed:
        snapshot("train", ray_data.range(4).map(fails), run)
    assert re.match(
        r"The Ray dataset 'train' cannot be written. Ray says: ValueError: row is broken \(test_ray_tasks.py:\d+ in "
        r"fails\)\n",
        str(failed.value),
    )
    assert "\x1b" not in str(failed.value)
    with pytest.raises(DataError, match="'train' has no rows"):
        snapshot("train", ray_data.range(4).filter(lambda row: False), run)
    assert run.list() == []


_IN_A_TASK = """\x1b[36mray::Map(f)()\x1b[39m (pid=1, ip=10.0.0.1)
  File "/home/me/first.py", line 3, in look
    raise KeyError("first")
KeyError: 'first'

During handling of the above exception, another exception occurred:

\x1b[36mray::Map(f)()\x1b[39m (pid=1, ip=10.0.0.1)
  File "/home/me/train.py", line 14, in f
    return numpy.load(row["path"])
           ^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/site-packages/numpy/io.py", line 99, in load
    raise OSError(text)
OSError: no such array
It was looked for twice.

The above exception was the direct cause of the following exception:

\x1b[36mray::Map(f)()\x1b[39m (pid=1, ip=10.0.0.1)
ray.exceptions.UserCodeException: UDF failed to process a data block."""


def test_what_ray_says_begins_with_what_the_users_function_raised_and_where() -> None:
    said = errors.ray_error_message(RuntimeError(_IN_A_TASK))
    assert said.startswith("Ray says: OSError: no such array (train.py:14 in f)\nray::Map(f)() (pid=1")
    assert said.endswith("UDF failed to process a data block.")
    assert errors.ray_error_message(RuntimeError("\x1b[36mgone\x1b[39m")) == "Ray says: RuntimeError: gone"
    wrapped = RuntimeError("outside")
    wrapped.__cause__ = DataError("The column 'x' is broken.")
    assert errors.ray_error_message(wrapped) == "The column 'x' is broken."


def test_a_column_that_is_only_rays_is_refused_by_its_own_sentence(tmp_path: Path, ray_data: Any) -> None:
    dataset = ray_data.range(4).map(lambda row: {"thing": object if row["id"] else {1, 2}})
    with pytest.raises(
        DataError, match=r"'train' cannot be written. The column 'thing' of a Ray dataset holds Python"
    ):
        snapshot("train", dataset, open_storage(tmp_path / "run"))


def test_storage_that_nodes_do_not_share_is_refused(
    tmp_path: Path, ray_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_storage(tmp_path / "run")
    monkeypatch.setattr(type(run), "list", lambda self, prefix="": [])
    with pytest.raises(DataError, match="its nodes do not share that storage"):
        snapshot("train", ray_data.range(4), run)


def test_a_run_on_any_engine_reads_the_snapshot_of_a_ray_dataset(tmp_path: Path, ray_data: Any) -> None:
    def loop(config: dict[str, Any]) -> list[int]:
        shard = powertrain.get_dataset_shard("train")
        return [row["id"] for row in shard.iter_rows()]

    def fit() -> powertrain.Result:
        return powertrain.DataParallelTrainer(
            loop,
            train_loop_config={},
            scaling_config=powertrain.ScalingConfig(num_workers=0, engine="inline"),
            run_config=powertrain.RunConfig(name="with-ray", storage_path=str(tmp_path)),
            datasets={"train": ray_data.range(30, override_num_blocks=3)},
            dataset_config=powertrain.DataConfig(snapshot=True),
        ).fit()

    first, second = fit(), fit()
    assert sorted(first.return_value) == list(range(30))
    assert second.return_value == first.return_value
    events = journal.read(open_storage(first.path))
    said = [event.message for event in events if isinstance(event, Warned)]
    assert any("'train' was written once" in message for message in said)
    assert any("earlier start of this run" in message for message in said)
