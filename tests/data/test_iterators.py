"""Iterators of a process without ranks, asynchronous functions, and what a shard says about itself."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_shard import shards

from powertrain import data
from powertrain.errors import DataError


def ids_of(iterator: Any, size: int = 3) -> list[int]:
    return [row for batch in iterator.iter_batches(batch_size=size) for row in batch["id"].tolist()]


@pytest.mark.parametrize("rows", [1, 10, 11])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_consumers_share_each_epoch_without_a_row_twice(rows: int, count: int) -> None:
    iterators = data.range(rows).random_shuffle(seed=1).streaming_split(count)
    for _ in range(2):
        seen = [ids_of(iterator) for iterator in iterators]
        assert sorted(row for part in seen for row in part) == list(range(rows))
    for iterator in iterators:
        iterator.close()


def test_equal_consumers_get_equally_many_rows() -> None:
    iterators = data.range(11).streaming_split(3, equal=True)
    assert [len(ids_of(iterator)) for iterator in iterators] == [3, 3, 3]
    copy = pickle.loads(pickle.dumps(iterators[1]))
    assert ids_of(copy) == ids_of(iterators[1])
    assert [len(iterator.materialize().take_all()) for iterator in iterators] == [3, 3, 3]
    for iterator in (*iterators, copy):
        iterator.close()
    with pytest.raises(DataError, match="n=0"):
        data.range(3).streaming_split(0)


def test_an_iterator_has_the_methods_of_a_shard() -> None:
    iterator = data.range(6).map(lambda row: {"id": row["id"], "half": row["id"] / 2}).iterator()
    assert iterator.schema().names == ["id", "half"]
    assert sorted(ids_of(iterator)) == list(range(6))
    assert "map(" in iterator.stats()
    assert iterator.materialize().count() == 6
    features, labels = next(iter(iterator.to_torch(label_column="half", batch_size=4)))
    assert (features.shape, labels.shape) == ((4, 1), (4, 1))
    iterator.close()


def test_torch_datasets_have_features_and_labels() -> None:
    rows = data.from_items([{"a": float(n), "b": n, "v": [n, n + 1], "y": n} for n in range(4)])
    (both, labels), _ = rows.to_torch(
        label_column="y", feature_columns=["a", "b"], feature_column_dtypes=torch.float32, batch_size=2
    )
    assert both.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert labels.tolist() == [[0], [1]]
    parts = next(iter(rows.to_torch(feature_columns={"one": ["a"], "two": ["v"]}, batch_size=4)))[0]
    assert parts["two"].shape == (4, 2)
    lists = next(
        iter(rows.to_torch(feature_columns=[["a"], ["b"]], batch_size=4, unsqueeze_feature_tensors=False))
    )[0]
    assert [part.shape for part in lists] == [(4, 1), (4, 1)]
    with pytest.raises(DataError, match="no column 'z'"):
        next(iter(rows.to_torch(label_column="z")))
    with pytest.raises(DataError, match="one type for all"):
        rows.to_torch(feature_column_dtypes={"a": torch.float32})


def test_the_schema_of_a_shard_is_that_after_its_functions(tmp_path: Path) -> None:
    made = data.range(10).map_batches(lambda batch: {"x": batch["id"].astype(np.float32)})
    with shards(made.plan, 2, tmp_path) as ranks:
        for rank in ranks:
            assert rank.schema().names == ["x"]
            assert str(rank.schema().field("x").type) == "float"
        assert ranks[0].state_dict()["position"] == 0


def test_asynchronous_functions_are_awaited() -> None:
    async def doubled(batch: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"id": batch["id"] * 2}

    class Client:
        def __init__(self) -> None:
            self.loops: list[Any] = []

        async def __call__(self, batch: dict[str, Any]) -> Any:
            self.loops.append(asyncio.get_running_loop())
            assert len(set(map(id, self.loops))) == 1  # a client may keep its connections
            for part in np.array_split(batch["id"], 2):
                await asyncio.sleep(0)
                yield {"id": part}

    async def one(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"] + 1}

    assert [row["id"] for row in data.range(4).map_batches(doubled).take_all()] == [0, 2, 4, 6]
    split = data.range(10).map_batches(Client, batch_size=4)
    assert Counter(row["id"] for row in split.take_all()) == Counter(range(10))
    assert [row["id"] for row in data.range(3).map(one).take_all()] == [1, 2, 3]

    async def broken(batch: dict[str, Any]) -> dict[str, Any]:
        raise LookupError("gone")

    with pytest.raises(DataError, match=r"map_batches\(broken\) failed.*LookupError: gone"):
        data.range(3).map_batches(broken).take_all()


def test_datasets_have_names_plans_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = data.range(5).map(lambda row: row)
    assert numbers.name is None
    numbers.set_name("five")
    assert numbers.name == "five"
    named = data.range(1)
    named.set_name("one")
    assert pickle.loads(pickle.dumps(named)).name == "one"
    assert repr(numbers).startswith("five: Dataset(range")
    numbers.take_all()
    assert numbers.stats().startswith("five: ")
    numbers.random_shuffle(seed=1).explain()
    assert "Range\n  map(" in (shown := capsys.readouterr().out)
    assert "shuffled in each epoch" in shown
    data.range(4).write_parquet(str(tmp_path))
    [path] = data.read_parquet(str(tmp_path)).filter("id > 1").input_files()
    assert path.startswith(str(tmp_path))
    assert data.range(3).input_files() == []


def test_samples_and_block_orders_follow_from_the_seed_or_the_data() -> None:
    sample = data.range(1000).random_sample(0.1, seed=3)
    assert sample.count() == 100
    assert sample.take_all() == data.range(1000).random_sample(0.1, seed=data.RandomSeedConfig(3)).take_all()
    assert sample.take_all() != data.range(1000).random_sample(0.1, seed=4).take_all()
    assert data.range(50).random_sample(0.5).take_all() == data.range(50).random_sample(0.5).take_all()
    assert data.range(9).filter(lambda row: row["id"] < 4).random_sample(0.5).count() == 2
    blocks = data.range(100).repartition(10)
    mixed = [row["id"] for row in blocks.randomize_block_order(seed=1).take_all()]
    assert mixed != list(range(100))
    assert sorted(mixed) == list(range(100))
    assert all(mixed[at : at + 10] == list(range(mixed[at], mixed[at] + 10)) for at in range(0, 100, 10))
    for fraction in (-0.1, 1.5, "x"):
        with pytest.raises(DataError, match="fraction"):
            data.range(3).random_sample(fraction)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- readers and writers


def test_lines_of_text_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\n  \ntwo\r\nthr\xc3\xa9e")
    (tmp_path / "b.txt").write_bytes(b"")
    lines = data.read_text(str(tmp_path))
    assert lines.take_all() == [{"text": "one"}, {"text": "two"}, {"text": "thrée"}]
    every = data.read_text(str(tmp_path / "a.txt"), drop_empty_lines=False, include_paths=True)
    assert [row["text"] for row in every.take_all()] == ["one", "", "  ", "two", "thrée"]
    assert every.columns() == ["text", "path"]
    (tmp_path / "c.txt").write_bytes("é".encode("latin-1"))
    assert data.read_text(str(tmp_path / "c.txt"), encoding="latin-1").take_all() == [{"text": "é"}]
    with pytest.raises(DataError, match="encoding='latin-1'"):
        data.read_text(str(tmp_path / "c.txt")).count()
    with pytest.raises(DataError, match="encoding"):
        data.read_text(str(tmp_path), encoding="utf-16").count()
    before = lines.plan.inspected().fingerprint
    (tmp_path / "a.txt").write_bytes(b"onf\ntwo\nthree\nfour")
    assert data.read_text(str(tmp_path / "a.txt")).plan.inspected().fingerprint != before


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin"):
        (tmp_path / name).write_bytes(name.encode())
    files = data.read_binary_files(str(tmp_path), include_paths=True)
    assert [row["bytes"] for row in files.take_all()] == [b"a.bin", b"b.bin"]
    assert files.take(1)[0]["path"].endswith("a.bin")
    assert (
        data.read_binary_files([str(tmp_path), str(tmp_path / "none")], ignore_missing_paths=True).count()
        == 2
    )
    kept = data.read_binary_files(
        str(tmp_path), partition_filter=lambda paths: [p for p in paths if "a" in p[-5:]]
    )
    assert kept.take_all() == [{"bytes": b"a.bin"}]
    shuffled = data.read_binary_files(str(tmp_path), shuffle=data.FileShuffleConfig(seed=1))
    assert sorted(row["bytes"] for row in shuffled.take_all()) == [b"a.bin", b"b.bin"]
    with pytest.raises(DataError, match="No file is left"):
        data.read_binary_files(str(tmp_path), partition_filter=lambda paths: []).count()


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 2)])
def test_arrays_come_back_as_they_were_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    data.from_numpy({"v": values, "other": np.arange(7)}).write_numpy(str(tmp_path), column="v")
    found = data.read_numpy(str(tmp_path))
    assert np.array_equal(found.take_batch(7)["data"], values)
    assert found.count() == 7
    tensors = next(iter(found.random_shuffle(seed=1).iter_torch_batches(batch_size=7)))["data"]
    assert tensors.shape == shape
    with pytest.raises(DataError, match="no column 'z'"):
        data.range(3).write_numpy(str(tmp_path / "x"), column="z")


def test_arrays_are_read_in_pieces_and_what_is_none_is_refused(tmp_path: Path) -> None:
    from powertrain.data.sources.files.arrays import NumpySource
    from powertrain.data.sources.files.files import file_paths

    np.save(tmp_path / "a.npy", np.arange(100))
    np.save(tmp_path / "b.npy", np.arange(100, 130))
    source = NumpySource(file_paths(str(tmp_path), None), block_bytes=160)
    facts = source.inspect()
    assert [block.rows for block in facts.blocks] == [20] * 5 + [20, 10]
    rows = [
        value
        for block in range(len(facts.blocks))
        for batch in source.read(block)
        for value in batch[0].to_pylist()
    ]
    assert rows == list(range(130))
    assert source.name_row(5, 3) == "b.npy, row 3"
    np.save(tmp_path / "c.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"c\.npy' has rows of float64\[2\]"):
        data.read_numpy(str(tmp_path)).count()
    (tmp_path / "d.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"d\.npy' is not a numpy array"):
        data.read_numpy(str(tmp_path / "d.npy")).count()
    np.save(tmp_path / "e.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match="without Python objects"):
        data.read_numpy(str(tmp_path / "e.npy")).count()
    with pytest.raises(NotImplementedError, match="runs code"):
        data.read_numpy(str(tmp_path), allow_pickle=True)


def test_directories_give_columns_as_the_partitioning_says(tmp_path: Path) -> None:
    from powertrain.data.datasource import Partitioning, PathPartitionFilter

    for year in ("2023", "2024"):
        (tmp_path / year).mkdir()
        (tmp_path / year / "x.csv").write_text("a\n1\n")
    by_year = data.read_csv(str(tmp_path), partitioning=Partitioning("dir", field_names=["year"]))
    assert by_year.take_all() == [{"a": 1, "year": "2023"}, {"a": 1, "year": "2024"}]
    (tmp_path / "hive" / "k=1").mkdir(parents=True)
    (tmp_path / "hive" / "k=1" / "x.csv").write_text("a\n1\n")
    assert data.read_csv(str(tmp_path / "hive")).columns() == ["a", "k"]
    assert data.read_csv(str(tmp_path / "hive"), partitioning=None).columns() == ["a"]
    chosen = PathPartitionFilter.of(lambda found: found.get("k") == "2", base_dir=str(tmp_path / "hive"))
    with pytest.raises(DataError, match="No file is left"):
        data.read_csv(str(tmp_path / "hive"), partition_filter=chosen).count()
    two = Partitioning("dir", field_names=["a", "b"])
    with pytest.raises(DataError, match="lies in 1 directories"):
        data.read_csv(str(tmp_path / "hive"), partitioning=two).count()
    for arguments in ({"style": "other"}, {"style": "dir"}):
        with pytest.raises(DataError):
            Partitioning(**arguments)
    with pytest.raises(NotImplementedError, match="cast"):
        Partitioning("hive", field_types={"k": int})


def test_ranges_of_tensors_and_blocks() -> None:
    tensors = data.range_tensor(3, shape=(2, 2))
    assert tensors.take_batch(3)["data"].tolist() == [[[n, n], [n, n]] for n in range(3)]
    assert tensors.count() == 3
    import pandas as pd
    import pyarrow as pa

    assert data.from_blocks([pa.table({"x": [1]}), pd.DataFrame({"x": [2]})]).take_all() == [
        {"x": 1},
        {"x": 2},
    ]


# --------------------------------------------------------------------------- iterators outside a run


def test_an_iterator_fills_batches_as_the_dataset_does() -> None:
    filtered = data.range(100).filter(lambda row: row["id"] % 3 == 0)
    for iterator in (filtered.iterator(), *filtered.streaming_split(1)):
        assert [len(batch["id"]) for batch in iterator.iter_batches(batch_size=10)] == [10, 10, 10, 4]
        iterator.close()


def test_blocks_may_decide_the_size_of_an_iterators_batches() -> None:
    for count in (1, 2):
        found = []
        for iterator in data.range(100).streaming_split(count):
            found += [row for batch in iterator.iter_batches(batch_size=None) for row in batch["id"].tolist()]
            iterator.close()
        assert sorted(found) == list(range(100))


def test_iterators_share_memory_and_disk() -> None:
    whole = data.range(100).random_shuffle(seed=1)
    [one], four = whole.streaming_split(1), whole.streaming_split(4)
    alone = one._reader.seat
    for each in four:
        assert each._reader.seat["memory_bytes"] == alone["memory_bytes"] // 4
        assert each._reader.seat["disk_bytes"] < alone["disk_bytes"] / 2
    for iterator in (one, *four):
        iterator.close()


def test_an_iterator_warns_of_rows_that_are_not_read(caplog: pytest.LogCaptureFixture) -> None:
    iterator = data.range(100).iterator()
    for _ in range(2):
        for number, _ in enumerate(iterator.iter_batches(batch_size=10)):
            if number == 3:
                break
    assert "the rows between are not read" in caplog.text
    iterator.close()
