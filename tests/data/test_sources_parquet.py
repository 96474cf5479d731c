"""Parquet: blocks, types, columns, what is wrong with files, object stores, threads."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from tests.s3_server import S3Server

from powertrain.data.sources.base import IMAGES, Source
from powertrain.data.sources.files import object_files, parquet
from powertrain.data.sources.files.files import file_paths
from powertrain.data.sources.files.parquet import ParquetSource
from powertrain.data.sources.filtered import FilteredSource, ProjectedSource
from powertrain.errors import DataError
from powertrain.storage import open_storage


def source(paths: Any, columns: Sequence[str] | None = None, **more: Any) -> ParquetSource:
    return ParquetSource(file_paths(paths, None, usual=["parquet"]), columns, **more)


def everything(found: Source, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    blocks = range(len(found.inspect().blocks))
    return [row for block in blocks for batch in found.read(block, columns) for row in batch.to_pylist()]


def write(path: Path, columns: Any, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **more)
    return path


def test_a_block_is_a_row_group(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", {"n": range(10, 13)})
    write(tmp_path / "a.parquet", {"n": range(10)}, row_group_size=4)
    found = source(tmp_path)
    facts = found.inspect()
    assert [(block.rows, block.nbytes) for block in facts.blocks] == [(4, 32), (4, 32), (2, 16), (3, 24)]
    assert [row["n"] for row in everything(found)] == list(range(13))
    assert found.name_row(2, 1) == "a.parquet, row group 2, row 1"
    assert found.name_row(3, 0) == "b.parquet, row group 0, row 0"


def test_nothing_is_looked_at_before_it_is_asked_for(tmp_path: Path) -> None:
    later = source(tmp_path / "later.parquet")
    write(tmp_path / "later.parquet", {"n": [1]})
    assert everything(later) == [{"n": 1}]


def test_facts_and_rows_survive_pickling_and_little_travels(tmp_path: Path) -> None:
    for number in range(20):
        columns = {f"column_{i}": range(20) for i in range(20)}
        write(tmp_path / f"{number:03}.parquet", columns, row_group_size=4)
    found = source(tmp_path)
    found.inspect()
    pickled = cloudpickle.dumps(found)
    assert len(pickled) < 15_000, "the footers stay behind"
    again = cloudpickle.loads(pickled)
    assert again._facts == found.inspect()
    assert everything(again, ["column_3"]) == everything(found, ["column_3"])


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    write(tmp_path / "one/a.parquet", {"n": [1, 2]})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = source(tmp_path / "one").inspect().fingerprint
    assert source(tmp_path / "two").inspect().fingerprint == first
    assert len(first) <= 32
    write(tmp_path / "two/a.parquet", {"n": [1, 3]})
    assert source(tmp_path / "two").inspect().fingerprint != first


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {"a": [1], "b": ["x"], "c": [0.5]})
    found = source(tmp_path, ["c", "a"])
    assert found.inspect().schema.names == ["c", "a"]
    (batch,) = found.read(0)
    assert batch.schema.names == ["c", "a"]
    (batch,) = found.read(0, ["a"])
    assert batch.to_pylist() == [{"a": 1}]
    (batch,) = source(tmp_path).read(0, [])
    assert (batch.num_rows, batch.num_columns) == (1, 0)


def test_selecting_columns_keeps_blocks_and_reads_less(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {"a": range(100), "b": range(100)}, row_group_size=50)
    whole = source(tmp_path)
    whole.inspect()
    chosen = whole.select(["b"])
    assert [block.rows for block in chosen.inspect().blocks] == [50, 50]
    assert chosen.inspect().blocks[0].nbytes == 400
    assert chosen.inspect().fingerprint == whole.inspect().fingerprint
    assert everything(chosen)[:2] == [{"b": 0}, {"b": 1}]


def test_a_column_that_does_not_exist_is_named_with_those_that_it_may_be(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {"feature": [1], "label": [2]})
    for wrong in (source(tmp_path, ["features"]), source(tmp_path)):
        with pytest.raises(
            DataError, match=r"no column 'features'.*Did you mean 'feature'\?.*'feature', 'label'"
        ):
            if wrong._columns is None:
                wrong.inspect()
                wrong.select(["features"])
            wrong.inspect()
    with pytest.raises(DataError, match="selected twice"):
        source(tmp_path, ["label", "label"]).inspect()


def test_partition_directories_add_text_columns(tmp_path: Path) -> None:
    write(tmp_path / "a=1/b=x/part.parquet", {"n": [1, 2]})
    write(tmp_path / "a=2/b=__HIVE_DEFAULT_PARTITION__/part.parquet", {"n": [3]})
    found = source(tmp_path)
    assert everything(found) == [
        {"n": 1, "a": "1", "b": "x"},
        {"n": 2, "a": "1", "b": "x"},
        {"n": 3, "a": "2", "b": None},
    ]
    assert everything(found, ["a"]) == [{"a": "1"}, {"a": "1"}, {"a": "2"}]
    assert everything(source(tmp_path, ["b", "n"]))[0] == {"b": "x", "n": 1}


def test_a_column_in_the_file_wins_over_that_of_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "a=7/part.parquet", {"a": [1]})
    assert everything(source(tmp_path)) == [{"a": 1}]


def test_different_partitions_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a=1/part.parquet", {"n": [1]})
    write(tmp_path / "b=1/part.parquet", {"n": [1]})
    with pytest.raises(DataError, match=r"partition columns \['b'\].*\['a'\]"):
        source(tmp_path).inspect()


def test_paths_may_be_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"n": [1]})
    assert everything(source(tmp_path, include_paths=True)) == [{"n": 1, "path": str(path)}]
    write(path, {"path": [1]})
    with pytest.raises(DataError, match="has one of that name"):
        source(tmp_path, include_paths=True).inspect()


# --------------------------------------------------------------------------- what is wrong with files


def test_files_that_are_not_parquet_are_named_with_what_they_are(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", {"n": range(1000)}).read_bytes()
    cases = {
        "text.parquet": (b"a,b\n1,2\n" * 10, "is not a Parquet file"),
        "short.parquet": (whole[:-20], "is cut short: it begins as one, and after"),
        "tiny.parquet": (b"PAR1", "is cut short"),
        "empty.parquet": (b"", "has 0 bytes"),
        "lies.parquet": (whole[:-8] + (10**9).to_bytes(4, "little") + b"PAR1", "is damaged"),
        "noise.parquet": (whole[:-60] + b"\xff" * 52 + whole[-8:], "cannot be understood"),
        "secret.parquet": (b"PARE" + bytes(20) + b"PARE", "is encrypted"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.*{words}"):
            source(tmp_path / name).inspect()


def test_damaged_pages_are_an_error_that_names_the_row_group(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"n": range(100)}, row_group_size=50, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"Row group 0 of the Parquet file .*x\.parquet' cannot be decoded|cannot be read"
    ):
        everything(source(path))


def test_other_schemas_are_refused_with_both_files_and_the_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"n": [1], "s": ["x"]})
    write(tmp_path / "b.parquet", {"n": [1.5], "s": ["x"]})
    with pytest.raises(DataError, match=r"column 'n': int64 in '.*a\.parquet', double in '.*b\.parquet'"):
        source(tmp_path).inspect()
    write(tmp_path / "b.parquet", {"n": [1]})
    with pytest.raises(DataError, match=r"'.*a\.parquet' has 's' and '.*b\.parquet' does not"):
        source(tmp_path).inspect()
    write(tmp_path / "b.parquet", {"n": [1], "s": ["x"], "t": [1]})
    with pytest.raises(DataError, match=r"'.*b\.parquet' has 't' and '.*a\.parquet' does not"):
        source(tmp_path).inspect()


def test_other_orders_of_columns_and_columns_of_nulls_fit(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"n": [1], "s": pa.nulls(1)})
    write(tmp_path / "b.parquet", {"s": ["x"], "n": [2]})
    found = source(tmp_path)
    assert found.inspect().schema.field("s").type == pa.string()
    assert everything(found) == [{"n": 1, "s": None}, {"n": 2, "s": "x"}]


def test_a_file_that_changes_or_goes_while_in_use_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"n": range(10)})
    found = source(path)
    found.inspect()
    elsewhere = cloudpickle.loads(cloudpickle.dumps(found))
    write(path, {"n": range(1, 11)})
    with pytest.raises(DataError, match="not the one that was inspected"):
        everything(elsewhere)
    path.unlink()
    with pytest.raises(DataError, match="is gone"):
        everything(cloudpickle.loads(cloudpickle.dumps(found)))


def test_files_and_row_groups_without_rows_are_fine(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"n": pa.array([], pa.int64())}))
    writer = pq.ParquetWriter(tmp_path / "b.parquet", pa.schema([("n", pa.int64())]))
    with writer:
        for rows in ([], [1], []):
            writer.write_table(pa.table({"n": pa.array(rows, pa.int64())}))
    found = source(tmp_path)
    assert sum(block.rows for block in found.inspect().blocks) == 1
    assert everything(found) == [{"n": 1}]
    assert everything(source(tmp_path / "a.parquet")) == []


# --------------------------------------------------------------------------- sizes


def test_a_giant_row_group_is_streamed_in_moderate_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ONE_BATCH_BYTES", 64_000)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 32_000)
    values = np.arange(100_000).reshape(10_000, 10)
    table = pa.table({"n": range(10_000), "l": list(values)})
    found = source(write(tmp_path / "x.parquet", table))
    batches = list(found.read(0))
    assert len(batches) > 10
    assert all(batch.nbytes < 2 * 32_000 for batch in batches[1:])
    assert pa.Table.from_batches(batches).column("n").to_pylist() == list(range(10_000))


def test_text_that_a_dictionary_makes_small_is_streamed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ONE_BATCH_BYTES", 2_000_000)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1_000_000)
    monkeypatch.setattr(parquet, "_CAUTIOUS_ROWS", 500)
    path = write(tmp_path / "x.parquet", {"s": ["x" * 1000, "y" * 1000] * 5000})
    found = source(path)
    assert found.inspect().blocks[0].nbytes < 100_000, "the file does not say how large it is"
    sizes = [batch.nbytes for batch in found.read(0)]
    assert len(sizes) > 5
    assert max(sizes) < 3_000_000


def test_a_row_group_of_usual_size_is_one_batch(tmp_path: Path) -> None:
    found = source(write(tmp_path / "x.parquet", {"s": ["a", "b"] * 30_000, "n": range(60_000)}))
    (batch,) = found.read(0)
    assert batch.num_rows == 60_000


# --------------------------------------------------------------------------- types


def test_dictionaries_views_and_foreign_extensions_become_plain(tmp_path: Path) -> None:
    table = pa.table(
        {
            "d": pa.array(["x", "y", "x"]).dictionary_encode(),
            "u": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)] * 3, pa.binary(16))),
            "l": pa.array([["a"], [], ["b"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        }
    )
    found = source(write(tmp_path / "x.parquet", table))
    types = {field.name: field.type for field in found.inspect().schema}
    assert types["d"] == pa.string()
    assert types["u"] == pa.binary(16)
    assert types["l"].value_type == pa.string()
    assert everything(found)[0] == {"d": "x", "u": bytes(16), "l": ["a"]}
    assert all(batch.schema.equals(found.inspect().schema) for batch in found.read(0))


def test_tensors_stay_tensors(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    table = pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    (batch,) = source(write(tmp_path / "x.parquet", table)).read(0)
    tensors: Any = batch.column(0)
    assert (tensors.to_numpy_ndarray() == values).all()


def test_images_of_hugging_face_are_their_bytes_and_marked(tmp_path: Path) -> None:
    (tmp_path / "only-a-path").write_bytes(b"from the file")
    stored = [
        {"bytes": b"png", "path": "x.png"},
        {"bytes": None, "path": str(tmp_path / "only-a-path")},
        None,
    ]
    told = json.dumps({"info": {"features": {"image": {"_type": "Image"}, "n": {"_type": "Value"}}}})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(stored, kind), "n": [1, 2, 3]}).replace_schema_metadata(
        {"huggingface": told}
    )
    found = source(write(tmp_path / "x.parquet", table))
    field = found.inspect().schema.field("image")
    assert field.type == pa.binary()
    assert field.metadata is not None
    assert json.loads(field.metadata[IMAGES]) == {"size": None, "mode": None}
    (batch,) = found.read(0)
    assert batch.schema.equals(found.inspect().schema, check_metadata=True)
    assert batch.column("image").to_pylist() == [b"png", b"from the file", None]


# --------------------------------------------------------------------------- places and threads


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {"n": range(4000), "s": [str(i) for i in range(4000)]}, row_group_size=100)
    found = cloudpickle.loads(cloudpickle.dumps(_inspected(source(tmp_path))))
    together = threading.Barrier(4)

    def read(thread: int) -> list[int]:
        together.wait(10)
        return [
            n for block in range(thread, 40, 4) for batch in found.read(block) for n in batch["n"].to_pylist()
        ]

    with ThreadPoolExecutor(4) as pool:
        assert sorted(n for part in pool.map(read, range(4)) for n in part) == list(range(4000))


def _inspected(found: ParquetSource) -> ParquetSource:
    found.inspect()
    return found


def test_a_bucket_is_read_row_group_by_row_group(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = f"d{secrets.token_hex(4)}"
    data = write(
        tmp_path / "x.parquet", {"n": range(1000), "s": ["text"] * 1000}, row_group_size=250
    ).read_bytes()
    storage = open_storage(s3.uri(top))
    storage.put("k=1/x.parquet", data)
    storage.put("k=2/x.parquet", data)
    found = cloudpickle.loads(cloudpickle.dumps(_inspected(source(s3.uri(top)))))
    assert [row["n"] for row in everything(found)] == [*range(1000), *range(1000)]
    assert everything(found, ["k"])[1000] == {"k": "2"}
    fetched: list[Any] = []
    whole = object_files.open_object
    monkeypatch.setattr(parquet, "open_object", lambda *a: _spied(whole(*a), fetched))
    assert next(found.read(1, ["n"])).num_rows == 250
    assert len(fetched) == 1, "one request for one column of one row group"
    monkeypatch.setattr(parquet, "ONE_BATCH_BYTES", 100)
    assert sum(batch.num_rows for batch in found.read(1)) == 250
    storage.delete("k=1/x.parquet")
    with pytest.raises(DataError, match="is gone"):
        everything(found)


def _spied(opened: Any, fetched: list[Any]) -> Any:
    """The file, which writes down every request that it makes."""
    ask = opened._object.ranges
    opened._object.ranges = lambda wanted: fetched.append(wanted) or ask(wanted)
    return opened


def ray_tensors(values: Any, shape: list[int], name: str = "ray.data.arrow_tensor_v2") -> pa.Table:
    """What Ray Data writes for tensors, as it is seen where Ray is not loaded."""
    marks = {"ARROW:extension:name": name, "ARROW:extension:metadata": json.dumps(shape)}
    array = pa.array(values, pa.large_list(pa.float32()))
    return pa.table([array], schema=pa.schema([pa.field("x", array.type, metadata=marks)]))


@pytest.mark.parametrize("name", ["ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"])
def test_tensors_that_ray_data_wrote_have_their_shape(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.parquet", ray_tensors([[1, 2, 3, 4], [5, 6, 7, 8]], [2, 2], name))
    found = source(tmp_path)
    assert found.inspect().schema.field("x").type == pa.fixed_shape_tensor(pa.float32(), [2, 2])
    [batch] = found.read(0)
    tensors: Any = batch.column("x")
    assert tensors.to_numpy_ndarray().tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


def test_tensors_of_different_shapes_are_refused_with_both_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ray_tensors([[1, 2]], [1, 2]))
    write(tmp_path / "b.parquet", ray_tensors([[1, 2, 3, 4]], [2, 2]))
    with pytest.raises(DataError, match=r"column 'x': of shape \(1, 2\).*a\.parquet', \(2, 2\).*b\.parquet"):
        source(tmp_path).inspect()


def test_files_may_differ_in_columns_that_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "k=1/a.parquet", {"n": [1], "other": [1]})
    write(tmp_path / "k=1/b.parquet", {"more": [2], "n": [2], "other": ["x"]})
    assert everything(source(tmp_path, ["n"])) == [{"n": 1}, {"n": 2}]
    assert everything(source(tmp_path, ["k", "n"])) == [{"k": "1", "n": 1}, {"k": "1", "n": 2}]
    assert everything(ProjectedSource(source(tmp_path), ["n"], {"n": "m"})) == [{"m": 1}, {"m": 2}]
    filtered = FilteredSource(source(tmp_path), pc.field("n") > 1)
    assert everything(ProjectedSource(filtered, ["k"])) == [{"k": "1"}]
    for narrowed in (
        lambda: source(tmp_path, ["n"]).select(["k"]),
        lambda: FilteredSource(source(tmp_path, ["n"]), pc.field("k") == "1").select(["n"]),
    ):
        with pytest.raises(DataError, match=r"no column 'k'|No match for .*k"):
            narrowed()
    with pytest.raises(DataError, match=r"no column 'q'.*Its columns are: 'n', 'other', 'k'\."):
        source(tmp_path, ["q"]).inspect()
    with pytest.raises(DataError, match=r"different columns: .*b\.parquet' has 'more'"):
        source(tmp_path).inspect()
    with pytest.raises(DataError, match="different types in column 'other'"):
        source(tmp_path, ["other"]).inspect()
