"""Packing: every token once per epoch, in windows of one length, over restarts at any world sizes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.formats.reading_all import everything, source_of
from tests.data.numbered import Tables
from tests.data.test_mixing import committed_rows
from tests.data.test_shard import shards
from tests.support.examples import scaled

from powertrain import data
from powertrain.data.dataset import Dataset
from powertrain.data.plan.plan import Part, Plan
from powertrain.data.sources.packing import windows
from powertrain.errors import DataError

#: Blocks of documents of these lengths; None for a row without a document.
BLOCKS = st.lists(
    st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=6), min_size=1, max_size=5
).filter(lambda blocks: any(length for block in blocks for length in block))
SEPARATOR, PADDING = -1, -2


def documents(blocks: list[list[int | None]], kind: Any = None) -> Dataset:
    """Tokens are numbered through all documents, so that each is known again."""
    numbers = itertools.count()
    kind = kind or pa.list_(pa.int64())
    tables = []
    for block in blocks:
        rows = [None if length is None else list(itertools.islice(numbers, length)) for length in block]
        tables.append(pa.table({"id": pa.array(rows, kind), "other": ["x"] * len(rows)}))
    return Dataset(Plan((Part(Tables(*tables)),)))


def expected(
    blocks: list[list[int | None]], length: int, separator: int | None, drop_last: bool
) -> list[list[tuple[int, int, int]]]:
    """The windows, each as (token, document, position), the plain way."""
    numbers = itertools.count()
    stream: list[tuple[int, int, int]] = []
    for document, size in enumerate(size for block in blocks for size in block):
        if size is not None:
            tokens = [*itertools.islice(numbers, size), *([] if separator is None else [separator])]
            stream += [(token, document, position) for position, token in enumerate(tokens)]
    found = [stream[start : start + length] for start in range(0, len(stream), length)]
    if found and len(found[-1]) < length:
        if drop_last:
            found.pop()
        else:
            found[-1] += [(PADDING, -1, 0)] * (length - len(found[-1]))
    return found


@settings(deadline=None, max_examples=scaled(60))
@given(
    blocks=BLOCKS,
    length=st.integers(1, 15),
    separator=st.sampled_from([None, SEPARATOR]),
    drop_last=st.booleans(),
    large=st.booleans(),
    at_a_time=st.integers(1, 40),
)
def test_windows_are_the_stream_of_tokens_cut_into_pieces(
    blocks: list[list[int | None]],
    length: int,
    separator: int | None,
    drop_last: bool,
    large: bool,
    at_a_time: int,
) -> None:
    kind = pa.large_list(pa.int32()) if large else pa.list_(pa.int64())
    packed = documents(blocks, kind).pack(
        length, column="id", separator=separator, drop_last=drop_last, padding=PADDING, documents=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_TOKENS_AT_A_TIME", at_a_time)
        rows = everything(source_of(packed))
    found = [list(zip(row["id"], row["document_ids"], row["positions"], strict=True)) for row in rows]
    assert found == expected(blocks, length, separator, drop_last)
    assert everything(source_of(packed), ["positions"]) == [{"positions": row["positions"]} for row in rows]
    assert len(everything(source_of(packed), [])) == len(rows)


@pytest.mark.smoke
@settings(deadline=None, max_examples=scaled(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=BLOCKS, length=st.integers(1, 9), shuffled=st.booleans(), chances=st.data())
def test_every_token_comes_once_per_epoch_over_any_restarts(
    tmp_path: Path, blocks: list[list[int | None]], length: int, shuffled: bool, chances: st.DataObject
) -> None:
    packed = documents(blocks).pack(length, column="id", padding=PADDING)
    plan = (packed.random_shuffle(seed=1) if shuffled else packed).plan
    whole = [[token for token, _, _ in window] for window in expected(blocks, length, None, False)]
    rows: list[Any] = committed_rows(plan, tmp_path, chances)
    assert len(rows) == 2 * len(whole)
    epochs = [rows[: len(whole)], rows[len(whole) :]]
    if shuffled:
        assert [sorted(epoch) for epoch in epochs] == [sorted(whole)] * 2
    else:
        assert sorted(epochs[0]) == sorted(epochs[1]) == whole


def test_a_position_in_packed_documents_is_small_and_resumes_at_the_next_window(tmp_path: Path) -> None:
    plan = documents([[7] * 20] * 10).pack(16, separator=SEPARATOR).random_shuffle(seed=3).plan
    with shards(plan, 1, tmp_path) as (rank,):
        whole = [batch["id"].tolist() for batch in rank.iter_batches(batch_size=3)]
    with shards(plan, 1, tmp_path) as (rank,):
        batches = iter(rank.iter_batches(batch_size=3))
        first = [next(batches)["id"].tolist() for _ in range(5)]
        state = rank.state_dict()
    assert len(json.dumps(state)) <= 400
    with shards(plan, 1, tmp_path, state) as (rank,):
        rest = [batch["id"].tolist() for batch in rank.iter_batches(batch_size=3)]
    assert first + rest == whole


def test_files_of_tokens_are_packed_and_only_their_column_is_read(tmp_path: Path) -> None:
    rows = [{"tokens": list(range(number % 7)), "text": "x"} for number in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=9)
    packed = data.read_parquet(str(tmp_path)).pack(10)
    batch = next(iter(packed.iter_torch_batches(batch_size=4)))
    assert list(batch) == ["tokens"]
    assert tuple(batch["tokens"].shape) == (4, 10)
    stream = [token for row in rows for token in row["tokens"]]
    assert [token for row in packed.take_all() for token in row["tokens"].tolist()][: len(stream)] == stream


def test_functions_before_are_computed_first_and_other_steps_follow() -> None:
    texts = data.from_items([{"text": "ab" * number} for number in range(6)])
    packed = texts.map(lambda row: {"tokens": [ord(letter) for letter in row["text"]]}).pack(4)
    assert packed.count() == 8
    assert packed.map(lambda row: {"sum": int(row["tokens"].sum())}).take(1) == [{"sum": 2 * (97 + 98)}]
    limited = data.from_items([{"t": [number] * 3} for number in range(10)]).limit(4).pack(6)
    assert [row["t"].tolist() for row in limited.take_all()] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]
    both = documents([[4]]).union(documents([[4]])).pack(8, column="id")
    assert [row["id"].tolist() for row in both.take_all()] == [[0, 1, 2, 3, 0, 1, 2, 3]]


def test_blocks_in_another_order_are_packed_in_that_order() -> None:
    blocks: list[list[int | None]] = [[2, 3], [4], [1, 5]]
    mixed = documents(blocks).randomize_block_order(seed=2)
    tokens = [token for row in mixed.take_all() for token in row["id"]]
    assert tokens != sorted(tokens)
    packed = mixed.pack(5, column="id")
    assert [token for row in packed.take_all() for token in row["id"].tolist()] == tokens


def test_a_shuffle_before_shuffles_windows_and_mixtures_are_packed_in_their_order() -> None:
    plain = documents([[5] * 30])
    one, other = plain.random_shuffle(seed=1).pack(10), plain.pack(10).random_shuffle(seed=1)
    assert [row["id"].tolist() for row in one.take_all()] == [row["id"].tolist() for row in other.take_all()]
    assert one.plan.shuffled
    mixed = data.from_items([{"t": [1]}] * 4).mix(data.from_items([{"t": [2]}] * 4)).pack(8)
    assert mixed.take_all()[0]["t"].tolist() == [1, 2] * 4


def test_the_fingerprint_changes_with_the_data_and_with_the_packing() -> None:
    def of(dataset: Dataset) -> str:
        return dataset.plan.inspected().fingerprint

    same = {of(documents([[3, 4]]).pack(4)) for _ in range(2)}
    others = {
        of(documents([[4, 3]]).pack(4)),
        of(documents([[3, 4]]).pack(5)),
        of(documents([[3, 4]]).pack(4, separator=0)),
        of(documents([[3, 4]]).pack(4, documents=True)),
        of(documents([[3, 4]]).pack(4, padding=7)),
    }
    assert len(same) == 1
    assert len(same | others) == 6
    source = source_of(documents([[3, 4], [5]]).pack(4))
    assert source.name_row(1, 0) == "window 2 (tokens 8 to 11)"


@pytest.mark.parametrize("kind", [pa.list_(pa.int16(), 3), pa.fixed_shape_tensor(pa.int32(), [3])])
def test_documents_of_one_length_are_documents_too(kind: Any) -> None:
    storage = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(kind.value_type, 3))
    column = storage if kind == storage.type else pa.ExtensionArray.from_storage(kind, storage)
    packed = Dataset(Plan((Part(Tables(pa.table({"t": column}))),))).pack(2)
    assert [row["t"].tolist() for row in packed.take_all()] == [[1, 2], [3, 4], [5, 6]]
    assert packed.take_batch(2)["t"].dtype == np.dtype(kind.value_type.to_pandas_dtype())


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (documents([[3]]), {"length": 0}, "length=0 must be a whole number"),
        (documents([[3]]), {"length": 4, "separator": "x"}, "separator='x'"),
        (documents([[3]]), {"length": 4, "column": "tokens"}, "no column 'tokens'"),
        (documents([[3]]), {"length": 4, "column": "other"}, "needs lists of numbers"),
        (
            documents([[3]], pa.list_(pa.int8())),
            {"length": 4, "separator": 300},
            "separator=300. does not fit",
        ),
        (data.range(3), {"length": 4}, "no column has lists"),
        (data.from_items([{"a": [1], "b": [2]}]), {"length": 4}, "columns with lists are a, b"),
        (data.from_items([{"a": [1, None]}]), {"length": 1}, "null within a document"),
        (documents([[3]]).union(documents([[3]], pa.list_(pa.int32()))), {"length": 4}, "int64.*int32"),
        (data.from_items([{"positions": [1]}]), {"length": 1, "documents": True}, "Rename that first"),
    ],
)
def test_what_cannot_be_packed_is_said(dataset: Dataset, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        dataset.pack(**options).take_all()
