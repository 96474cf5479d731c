"""The functions that make datasets, as a user calls them."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from powertrain import data
from powertrain.data import reading
from powertrain.data.dataset import Dataset
from powertrain.data.sources.base import PYTHON_FLOATS, Source
from powertrain.errors import DataError


def source(dataset: Dataset) -> Source:
    (part,) = dataset.plan.parts
    return part.source


def rows(dataset: Dataset) -> list[dict[str, Any]]:
    found = source(dataset)
    blocks = range(len(found.inspect().blocks))
    return [row for block in blocks for batch in found.read(block) for row in batch.to_pylist()]


def test_every_function_is_public() -> None:
    names = [name for name, found in vars(reading).items() if inspect.isfunction(found) and name[0] != "_"]
    assert set(names) >= {"read_parquet", "read_csv", "read_json", "read_images", "from_items", "range"}
    for name in set(names) & set(reading.__all__):
        assert getattr(data, name) is getattr(reading, name)
    assert {name for name in names if name.startswith(("read_", "from_"))} <= set(reading.__all__)


def test_parquet_with_columns_and_a_filter(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(10), "b": range(10), "c": range(10)}), tmp_path / "x.parquet")
    (tmp_path / "README.md").write_text("x")
    found = data.read_parquet(tmp_path, columns=["b"], filter=pc.field("a") > 7)
    assert rows(found) == [{"b": 8}, {"b": 9}]
    assert rows(data.read_parquet(str(tmp_path), columns=["c", "a"]))[0] == {"c": 0, "a": 0}
    with pytest.raises(DataError, match=r"columns='b' is one string.*\['b'\]"):
        data.read_parquet(tmp_path, columns="b")
    with pytest.raises(DataError, match="not an Arrow expression"):
        data.read_parquet(tmp_path, filter=lambda row: True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'paralelism'.*'parallelism'"):
        data.read_parquet(tmp_path, paralelism=3)
    with pytest.raises(DataError, match=r"README\.md' is not a Parquet file"):
        rows(data.read_parquet(tmp_path, file_extensions=["parquet", "md"]))


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,x\n")
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": 1}) + "\n")
    assert rows(data.read_csv(tmp_path / "x.csv")) == [{"a": 1, "b": "x"}]
    assert rows(data.read_csv(tmp_path, file_extensions=["csv"])) == [{"a": 1, "b": "x"}]
    assert rows(data.read_json(tmp_path)) == [{"a": 1}]


def test_images(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"png")
    assert rows(data.read_images(tmp_path, include_paths=True)) == [
        {"image": b"png", "path": str(tmp_path / "x.png")}
    ]
    for wrong in ((3,), (0, 4), (1.5, 2)):
        with pytest.raises(DataError, match="height, width"):
            data.read_images(tmp_path, size=wrong)  # type: ignore[arg-type]


def test_items_and_ranges() -> None:
    assert rows(data.from_items([1, 2])) == [{"item": 1}, {"item": 2}]
    assert rows(data.from_items({"x": i} for i in (1, 2))) == [{"x": 1}, {"x": 2}]
    assert source(data.from_items([{"x": 1.5}])).inspect().schema.field("x").metadata == dict([PYTHON_FLOATS])
    assert rows(data.range(3)) == [{"id": 0}, {"id": 1}, {"id": 2}]
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(DataError, match="must be a whole number"):
            data.range(wrong)  # type: ignore[arg-type]


def test_pandas() -> None:
    frame = pd.DataFrame(
        {
            "n": [1, 2],
            "s": ["x", None],
            "c": pd.Categorical(["a", "b"]),
            "l": [np.ones(2), np.zeros(3)],
            "t": [np.ones((2, 2)), np.zeros((2, 2))],
        },
        index=[5, 7],
    )
    found = rows(data.from_pandas(frame))
    assert found[0]["n"] == 1
    assert found[1] == {"n": 2, "s": None, "c": "b", "l": [0.0, 0.0, 0.0], "t": [0.0] * 4}
    schema = source(data.from_pandas(frame)).inspect().schema
    assert schema.names == ["n", "s", "c", "l", "t"]
    assert schema.metadata is None
    assert [row["n"] for row in rows(data.from_pandas([frame[["n"]], frame[["n"]]]))] == [1, 2, 1, 2]
    assert rows(data.from_pandas(pd.DataFrame({0: [1]}))) == [{"0": 1}]
    with pytest.raises(DataError, match="only one of them has 's'"):
        data.from_pandas([frame[["n"]], frame[["n", "s"]]])
    with pytest.raises(DataError, match="given a dict"):
        data.from_pandas([{"a": 1}])
    with pytest.raises(DataError, match="No DataFrames"):
        data.from_pandas([])
    with pytest.raises(DataError, match="several columns 'a'"):
        data.from_pandas(pd.DataFrame([[1, 2]], columns=["a", "a"]))


def test_numpy() -> None:
    assert rows(data.from_numpy(np.arange(2))) == [{"data": 0}, {"data": 1}]
    assert rows(data.from_numpy([np.ones((1, 2)), np.zeros((1, 2))])) == [
        {"data": [1.0, 1.0]},
        {"data": [0.0, 0.0]},
    ]
    found = data.from_numpy({"x": np.ones((2, 3, 4), np.float32), "y": np.arange(2)})
    assert source(found).inspect().schema.field("x").type.shape == [3, 4]
    with pytest.raises(DataError, match=r"different numbers of rows: \{'x': 2, 'y': 3\}"):
        data.from_numpy({"x": np.ones(2), "y": np.ones(3)})
    with pytest.raises(DataError, match="do not fit together"):
        data.from_numpy([np.ones((2, 3)), np.ones((2, 4))])


def test_arrow() -> None:
    table = pa.table({"a": [1], "d": pa.array(["x"]).dictionary_encode()})
    assert rows(data.from_arrow([table, table.to_batches()[0]])) == [{"a": 1, "d": "x"}] * 2
    assert rows(data.from_arrow([table.select(["a"]), pa.table({"a": pa.nulls(1)})])) == [
        {"a": 1},
        {"a": None},
    ]
    with pytest.raises(DataError, match="given a int"):
        data.from_arrow(3)
    with pytest.raises(DataError, match="several columns named 'a'"):
        data.from_arrow(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]))


def test_a_torch_dataset_must_be_map_style() -> None:
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[name-defined]
        def __iter__(self) -> Any:
            return iter([1])

    class Squares(torch.utils.data.Dataset):  # type: ignore[name-defined]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index * index

    assert [row["item"] for row in rows(data.from_torch(Squares()))] == [0, 1, 4]
    with pytest.raises(DataError, match=r"Stream has no item access by index.*from_items"):
        data.from_torch(Stream())


def test_hugging_face_datasets_in_memory_and_what_is_none() -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_dict({"n": list(range(5)), "x": [0.5] * 5})
    assert [row["n"] for row in rows(data.from_huggingface(found.shuffle(seed=1)))] == found.shuffle(seed=1)[
        "n"
    ][:]
    assert [row["n"] for row in rows(data.from_huggingface(found.select([3, 1])))] == [3, 1]
    schema = source(data.from_huggingface(found)).inspect().schema
    assert schema.field("x").metadata is None, "typed floats keep their type"
    assert source(data.from_huggingface(found)).in_memory
    assert rows(data.from_huggingface(found.select([]))) == []
    with pytest.raises(DataError, match=r"splits 'train'.*dataset\['train'\]"):
        data.from_huggingface(datasets.DatasetDict({"train": found}))
    with pytest.raises(DataError, match="streaming"):
        data.from_huggingface(found.to_iterable_dataset())


_COUNTS_THREADS = """
import sys
import numpy, pyarrow, pyarrow.compute as pc
from powertrain import data
from powertrain.engine.forking import why_fork_is_unsafe

here = sys.argv[1]
assert why_fork_is_unsafe() == ""
made = [
    data.read_parquet(here),
    data.read_parquet(here, columns=["s"], filter=pc.field("a") > 3),
    data.read_json(here),
    data.from_items([{"a": 1.5, "t": numpy.ones((2, 2))}] * 100),
    data.from_numpy(numpy.ones((100, 3))),
    data.range(100),
]
for number, dataset in enumerate(made):
    source = dataset.plan.parts[0].source
    source.inspect()
    source.publish(here + "/published")
    assert why_fork_is_unsafe() == "", (number, why_fork_is_unsafe())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_looking_at_data_leaves_no_thread_so_that_the_process_can_still_be_forked(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"a": range(1000), "s": ["x"] * 1000}), tmp_path / "x.parquet", row_group_size=100
    )
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n' * 1000)
    command = [sys.executable, "-c", _COUNTS_THREADS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nan_in_a_column_of_floats_is_a_number_and_none_among_objects_a_null() -> None:
    days: Any = ["2020-01-01", None]
    frame = pd.DataFrame({"f": [1.0, float("nan")], "s": ["x", None], "t": pd.to_datetime(days)})
    found = data.from_pandas(frame)
    other = found.take()[1]
    assert math.isnan(other["f"])
    assert (other["s"], other["t"]) == (None, None)
    [batch] = found.select_columns(["f"]).iter_torch_batches()
    assert batch["f"].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("make", "words"),
    [  # types are ignored: the arguments are wrong on purpose
        (lambda: data.read_parquet(None), "paths=None cannot be read through"),  # type: ignore[arg-type]
        (lambda: data.read_csv(5), "paths=5 cannot be read through"),  # type: ignore[arg-type]
        (lambda: data.from_items(5), "from_items was given 5, a int"),  # type: ignore[arg-type]
        (lambda: data.from_items({"a": [1]}), "for a dict of columns use from_numpy"),
        (lambda: data.from_items("abc"), "from_items was given 'abc'"),
        (lambda: data.read_images("x", size=224), r"size=224 is not an image size. Give \(height, width\)"),  # type: ignore[arg-type]
        (lambda: data.read_images("x", size=(0, 2)), "not an image size"),
        (lambda: data.read_images("x", mode="FOO"), "mode='FOO' is not an image mode.*'RGB'"),
        (lambda: data.range(1).decode_images("id", mode="FOO"), "mode='FOO' is not an image mode"),
        (lambda: data.range(2.5), "n=2.5 must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_at_once(make: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make()


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    assert data.range(np.int64(3)).count() == 3  # type: ignore[arg-type]
    data.read_images("x", size=(np.int64(2), 2))  # type: ignore[arg-type]
