"""Rows that are in memory, Python objects as columns, image files, other libraries' datasets."""

from __future__ import annotations

import io
import json
import os
import threading
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.sources.base import IMAGES, PYTHON_FLOATS, Source
from powertrain.data.sources.content_hash import content_hash
from powertrain.data.sources.files.files import file_paths
from powertrain.data.sources.files.images import IMAGE_EXTENSIONS, ImageSource
from powertrain.data.sources.indexed import HuggingFaceSource, IndexedSource
from powertrain.data.sources.items import column_of_numpy, table_of_items
from powertrain.data.sources.memory import MappedSource, RangeSource, TableSource
from powertrain.errors import DataError


def everything(found: Source, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    rows = []
    for block, known in enumerate(found.inspect().blocks):
        batches = list(found.read(block, columns))
        assert sum(batch.num_rows for batch in batches) == known.rows
        if columns is None:
            assert all(batch.schema.equals(found.inspect().schema, check_metadata=True) for batch in batches)
        rows += [row for batch in batches for row in batch.to_pylist()]
    return rows


# --------------------------------------------------------------------------- tables


def test_a_table_is_one_block_and_survives_pickling() -> None:
    found = TableSource(pa.table({"n": range(100), "s": ["x"] * 100}).slice(10, 5), "item")
    found.inspect()
    pickled = cloudpickle.dumps(found)
    assert len(pickled) < 3000, "only the slice travels"
    again = cloudpickle.loads(pickled)
    assert again._facts == found.inspect()
    assert [row["n"] for row in everything(again)] == list(range(10, 15))
    assert everything(again, ["s"])[0] == {"s": "x"}
    assert (again.in_memory, again.name_row(0, 3)) == (True, "item 3")


def test_published_rows_lie_in_one_file_and_little_travels(tmp_path: Path) -> None:
    table = table_of_items([{"x": 0.5, "t": np.ones((2, 3), np.float32), "s": "text"}] * 1000)
    found = TableSource(table)
    published = found.publish(str(tmp_path / "below"))
    again = found.publish(str(tmp_path / "below"))
    assert isinstance(published, MappedSource)
    assert len(os.listdir(tmp_path / "below")) == 1
    assert len(cloudpickle.dumps(published)) < 3000
    assert again.inspect() == published.inspect() == found.inspect()
    elsewhere = cloudpickle.loads(cloudpickle.dumps(published))
    assert everything(elsewhere) == everything(found)
    assert elsewhere.inspect().schema.field("x").metadata == dict([PYTHON_FLOATS])
    os.unlink(tmp_path / "below" / os.listdir(tmp_path / "below")[0])
    with pytest.raises(DataError, match="Start the run again"):
        everything(elsewhere)


def test_rows_that_differ_in_a_mark_only_lie_in_different_files(tmp_path: Path) -> None:
    for items in ([1.5], [np.float64(1.5)]):
        found = TableSource(table_of_items(items))
        assert found.publish(str(tmp_path)).inspect() == found.inspect()
        assert everything(found.publish(str(tmp_path))) == [{"item": 1.5}]
    assert len(os.listdir(tmp_path)) == 2


def test_rows_that_cannot_be_published_say_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"could not be written to .* for the workers"):
        TableSource(pa.table({"n": [1]})).publish(str(tmp_path / "file"))


_values = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(-5, 5)), max_size=12),
    st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=12),
    st.lists(
        st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=3)), max_size=12
    ),
    st.lists(
        st.one_of(st.none(), st.fixed_dictionaries({"a": st.booleans(), "b": st.text(max_size=2)})),
        max_size=12,
    ),
)


@given(_values, st.data())
def test_the_hash_of_a_table_does_not_depend_on_its_chunks(values: list[Any], data: st.DataObject) -> None:
    array = pa.array(values)
    cut = data.draw(st.integers(0, len(values)))
    whole = pa.table({"v": array})
    chunks: Any = pa.chunked_array([array.slice(0, cut), array.slice(cut)], type=array.type)
    parts = pa.table({"v": chunks})
    assert content_hash(parts) == content_hash(whole)
    place = data.draw(st.integers(0, max(0, len(values) - 1)))
    if values and values[place] is not None:
        other = [*values[:place], None, *values[place + 1 :]]
        assert content_hash(pa.table({"v": pa.array(other, array.type)})) != content_hash(whole)


def test_the_hash_does_not_depend_on_what_lies_where_a_null_is() -> None:
    one = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(bytes(16))])
    other = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(bytes(8) + b"\xff" * 8)]
    )
    assert content_hash(pa.table({"v": one})) == content_hash(pa.table({"v": other}))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([True, None, False]),
        pa.array([15, None], pa.decimal128(5, 2)),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        pa.array([[1, 2], None], pa.list_(pa.int32(), 2)),
        pa.array([b"ab", None], pa.binary(2)),
        pa.nulls(3),
    ],
)
def test_every_type_has_a_hash(values: Any) -> None:
    table = pa.table({"v": values})
    assert len(content_hash(table)) == 32
    assert content_hash(table) != content_hash(table.slice(1))
    assert content_hash(table.slice(1)) == content_hash(
        pa.table({"v": values.take(pa.array(range(1, len(values))))})
    )


def test_a_range_is_counted_when_it_is_read() -> None:
    found = RangeSource(10, block_rows=4)
    assert [block.rows for block in found.inspect().blocks] == [4, 4, 2]
    assert [row["id"] for row in everything(found)] == list(range(10))
    assert not found.in_memory
    assert RangeSource(10).in_memory
    assert everything(RangeSource(0)) == []
    assert next(found.read(2, [])).num_rows == 2
    assert found.name_row(1, 2) == "number 6"


# --------------------------------------------------------------------------- items


def schema_of(*items: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in table_of_items(items).schema}


def test_keys_are_columns_and_missing_ones_null() -> None:
    table = table_of_items([{"a": 1, "b": "x"}, {"a": 2, "c": [1, 2]}])
    assert table.to_pylist() == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": [1, 2]}]
    assert table_of_items([3, None]).to_pylist() == [{"item": 3}, {"item": None}]
    assert table_of_items([]).column_names == ["item"]


def test_pythons_own_floats_are_marked_also_in_lists() -> None:
    torch = pytest.importorskip("torch")
    table = table_of_items(
        [
            {
                "a": 1.5,
                "b": [[1.5]],
                "c": np.float64(1),
                "d": np.ones(2),
                "e": 1,
                "f": torch.ones(2),
                "g": (1, 2.5),
                "h": torch.tensor(1.0, dtype=torch.float64),
            }
        ]
    )
    marked = {field.name for field in table.schema if field.metadata == dict([PYTHON_FLOATS])}
    assert marked == {"a", "b", "g"}
    assert table_of_items([{"a": None}, {"a": 1}, {"a": 2.5}]).schema.field("a").metadata == dict(
        [PYTHON_FLOATS]
    )


def test_arrays_of_one_shape_are_tensors_and_others_lists() -> None:
    torch = pytest.importorskip("torch")
    table = table_of_items([{"t": torch.ones(2, 3), "n": np.arange(2)}] * 2)
    assert isinstance(table.schema.field("t").type, pa.FixedShapeTensorType)
    tensors: Any = table.column("t").chunk(0)
    numbers: Any = table.column("n").chunk(0)
    assert tensors.to_numpy_ndarray().shape == (2, 2, 3)
    assert numbers.to_numpy_ndarray().tolist() == [[0, 1], [0, 1]]
    ragged = table_of_items([np.ones((1, 2), np.int8), None, np.zeros((3, 1), np.int8)])
    assert ragged.column("item").to_pylist() == [[[1, 1]], None, [[0], [0], [0]]]
    assert schema_of([np.ones(2), np.ones(2)])["item"].startswith("extension<arrow.fixed_shape_tensor")
    assert table_of_items([torch.tensor([1.5], dtype=torch.bfloat16)]).to_pylist()[0]["item"] == [1.5]


def test_tuples_of_different_things_and_dicts_are_structs() -> None:
    torch = pytest.importorskip("torch")
    pair = table_of_items([(torch.ones(2, 2), 3), (torch.zeros(2, 2), 4)]).column("item")
    assert pair.to_pylist()[0] == {"0": [[1.0, 1.0], [1.0, 1.0]], "1": 3}
    Point = namedtuple("Point", "x y")
    assert table_of_items([Point(1, 2), None]).to_pylist() == [{"item": {"x": 1, "y": 2}}, {"item": None}]
    assert table_of_items([(1, 2)]).to_pylist() == [{"item": [1, 2]}]
    nested = table_of_items([{"d": {"a": np.ones(2), "b": {"c": 1}}}, {"d": {"a": np.ones(2)}}])
    assert nested.to_pylist()[1] == {"d": {"a": [1.0, 1.0], "b": None}}


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([{"a": 1}, {"a": "x"}], ["column 'a'", "int (item 0), str (item 1)"]),
        ([{"a": 1}, 2], ["Item 1 is a int", "dicts"]),
        ([{1: 2}], ["key 1", "strings"]),
        ([object()], ["no common type", "object (item 0)"]),
        ([2**70], ["The value 1180591620717411303424 of column 'item' in item 0", "64 bits", "numpy.uint64"]),
        ([1, 2**63, 2**64], ["The value 9223372036854775808", "item 1"]),
        ([np.ones(2), np.ones(2, np.int8)], ["differ", "float64", "int8"]),
        ([np.ones(2), np.ones((2, 2))], ["dimensions [1, 2]"]),
        ([("a", np.ones(2)), ("b",)], ["item 1", "tuples of 2"]),
        ([{"d": {"a": 1}}, {"d": 3}], ["column 'd'", "item 1", "int"]),
    ],
)
def test_items_without_a_common_form_are_refused(items: list[Any], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        table_of_items(items)
    assert not [word for word in words if word not in str(caught.value)], caught.value


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u2", "u8", "?"])
def test_numpy_columns_keep_dtype_shape_and_values(dtype: str) -> None:
    values = np.arange(24).reshape(4, 3, 2).astype(dtype)
    column = column_of_numpy(values.transpose(0, 2, 1), "x")
    assert column.to_pylist() == values.transpose(0, 2, 1).reshape(4, -1).tolist()
    assert column.type.shape == [2, 3]
    flat = column_of_numpy(values[:, 0, 0], "x")
    assert (flat.to_pylist(), str(flat.type)) == (
        values[:, 0, 0].tolist(),
        str(pa.from_numpy_dtype(np.dtype(dtype))),
    )


def test_numpy_columns_are_copies_and_other_kinds_are_known_or_refused() -> None:
    values = np.arange(3)
    column = column_of_numpy(values, "x")
    values[0] = 9
    assert column.to_pylist() == [0, 1, 2]
    assert column_of_numpy(np.array(["a", "bc"]), "x").to_pylist() == ["a", "bc"]
    assert column_of_numpy(np.array([["a"], ["b"]]), "x").to_pylist() == [["a"], ["b"]]
    assert column_of_numpy(np.array(["2020-01-01"], "M8[s]"), "x").type == pa.timestamp("s")
    assert column_of_numpy(np.array([None, [1]], object), "x").to_pylist() == [None, [1]]
    assert column_of_numpy(np.ones((2, 0)), "x").to_pylist() == [[], []]
    assert len(column_of_numpy(np.ones((0, 3)), "x")) == 0
    with pytest.raises(DataError, match="single value"):
        column_of_numpy(np.array(1), "x")
    with pytest.raises(DataError, match="complex"):
        column_of_numpy(np.array([1j]), "x")


# --------------------------------------------------------------------------- images


def png(color: int = 0, size: tuple[int, int] = (2, 2)) -> bytes:
    from PIL import Image

    sink = io.BytesIO()
    Image.new("RGB", size, (color, 0, 0)).save(sink, "PNG")
    return sink.getvalue()


def test_image_files_stay_encoded_and_are_marked(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    (tmp_path / "notes.txt").write_text("x")
    paths = file_paths(tmp_path, None, usual=IMAGE_EXTENSIONS)
    found = ImageSource(paths, size=(8, 9), mode="L", include_paths=True, files_per_block=2)
    assert [block.rows for block in found.inspect().blocks] == [2, 2, 1]
    again = cloudpickle.loads(cloudpickle.dumps(found))
    rows = everything(again)
    assert [row["image"] for row in rows] == [png(number) for number in range(5)]
    assert rows[4]["path"] == str(tmp_path / "4.png")
    assert everything(again, ["path"])[0] == {"path": str(tmp_path / "0.png")}
    assert json.loads(again.inspect().schema.field("image").metadata[IMAGES]) == {"size": [8, 9], "mode": "L"}
    assert again.name_row(1, 1) == "3.png"
    assert again.cheap_to_decode
    (tmp_path / "3.png").unlink()
    with pytest.raises(DataError, match=r"3\.png' is gone"):
        everything(again)


# --------------------------------------------------------------------------- torch


class Pairs:
    """As a map-style dataset of torch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if index >= self.n:
            raise IndexError(index)
        return {"x": np.full((2, 2), index, np.float32), "y": index}


def test_items_of_a_torch_dataset_are_asked_for_when_they_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    found = IndexedSource(data, items_per_block=2)
    assert [block.rows for block in found.inspect().blocks] == [2, 2, 1]
    assert everything(found)[4] == {"item": {"0": [8.0, 9.0], "1": 4}}
    published = found.publish(str(tmp_path))
    assert len(cloudpickle.dumps(published)) < 3000
    elsewhere = cloudpickle.loads(cloudpickle.dumps(published))
    assert elsewhere.inspect() == found.inspect()
    assert everything(elsewhere) == everything(found)
    assert elsewhere.name_row(2, 0) == "item 4"
    assert elsewhere.publish(str(tmp_path)) is elsewhere


def test_dict_items_give_columns_and_many_are_asked_for_at_once() -> None:
    found = IndexedSource(Pairs(600))
    assert [block.rows for block in found.inspect().blocks] == [256, 256, 88]
    assert [row["y"] for row in everything(found, ["y"])] == list(range(600))
    assert found.inspect().fingerprint != IndexedSource(Pairs(599)).inspect().fingerprint
    assert everything(IndexedSource(Pairs(0))) == []

    class AtOnce(Pairs):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [{"y": index} for index in indices]

    assert [row["y"] for row in everything(IndexedSource(AtOnce(3)))] == [0, 1, 2]


def test_items_of_another_type_than_the_first_are_named() -> None:
    found = IndexedSource([1, 2, "x", 4], items_per_block=2)
    with pytest.raises(DataError, match=r"column 'item'.*int \(item 3\)|Column 'item'"):
        everything(found)
    assert everything(IndexedSource([1.5, 2], items_per_block=1)) == [{"item": 1.5}, {"item": 2.0}]


def test_a_dataset_that_cannot_be_pickled_is_refused_when_it_is_published(tmp_path: Path) -> None:
    data = Pairs(2)
    data.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="cannot be handed to the workers"):
        IndexedSource(data).publish(str(tmp_path))
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------- Hugging Face


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dataset in files, with images."""
    datasets = pytest.importorskip("datasets")
    place = tmp_path_factory.mktemp("hf")
    images = [{"bytes": png(number), "path": None} for number in range(100)]
    features = datasets.Features(
        {
            "n": datasets.Value("int64"),
            "image": datasets.Image(),
            "kind": datasets.ClassLabel(names=["a", "b"]),
        }
    )
    columns = {"n": list(range(100)), "image": images, "kind": [0, 1] * 50}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(place / "saved"))
    return datasets.load_from_disk(str(place / "saved"))


def test_a_hugging_face_dataset_in_files_is_read_in_its_present_order(saved: Any) -> None:
    shuffled = saved.shuffle(seed=3).select([5, 4, 70, 70])
    for dataset in (saved, shuffled, saved.select(range(10, 20)), saved.with_format("torch")):
        found = HuggingFaceSource(dataset, block_bytes=1000)
        expected = dataset.with_format(None)["n"]
        rows = everything(found)
        assert [row["n"] for row in rows] == list(expected)
        assert rows[1]["image"] == png(rows[1]["n"])
        assert rows[1]["kind"] == rows[1]["n"] % 2
        again = cloudpickle.loads(cloudpickle.dumps(found))
        assert again._facts == found.inspect()
        assert everything(again, ["n"]) == [{"n": n} for n in expected]
    metadata = found.inspect().schema.field("image").metadata
    assert metadata is not None
    assert json.loads(metadata[IMAGES])["size"] is None
    assert found.name_row(0, 3) == "row 3"


def test_the_fingerprint_of_a_hugging_face_dataset_follows_order_and_content(saved: Any) -> None:
    def of(dataset: Any) -> str:
        return HuggingFaceSource(dataset).inspect().fingerprint

    all_of_them = [
        saved,
        saved.shuffle(seed=1),
        saved.shuffle(seed=2),
        saved.select(range(50)),
        saved.select(range(50, 100)),
    ]
    assert len({of(dataset) for dataset in all_of_them}) == 5
    assert of(saved.shuffle(seed=1)) == of(saved.shuffle(seed=1))


class Failing:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        if number == 2:
            raise KeyError("bad item")
        return number


class FailingTogether(Failing):
    def __getitems__(self, numbers: list[int]) -> list[int]:
        return [self[number] for number in numbers]


@pytest.mark.parametrize(("kind", "items"), [(Failing, "Item 2"), (FailingTogether, "Items 0 to 3")])
def test_an_item_that_cannot_be_had_is_named_with_the_users_line(kind: Any, items: str) -> None:
    found = IndexedSource(kind(4))
    with pytest.raises(DataError) as raised:
        list(found.read(0))
    message = str(raised.value)
    assert message.startswith(f"{items} of the dataset ")
    assert 'raise KeyError("bad item")' in message
    assert os.path.basename(__file__) in message
    assert message.endswith("KeyError: 'bad item'")
    assert isinstance(raised.value.__cause__, KeyError)


def test_items_without_a_key_are_refused() -> None:
    with pytest.raises(DataError, match="All 2 items are dicts without a key"):
        table_of_items([{}, {}])
