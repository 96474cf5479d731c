"""Lists of different lengths, filled up or kept ragged."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.collate_fn import ArrowBatchCollateFn, Ragged, pad, ragged
from powertrain.data.rows import collate, formats
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError


def _rows(**columns: Any) -> Rows:
    count = len(next(iter(columns.values())))
    return formats.from_numpy(columns, np.arange(count) + 100)


def _images(*shapes: tuple[int, ...]) -> Any:
    array = np.empty(len(shapes), object)
    array[:] = [np.ones(shape, np.uint8) for shape in shapes]
    return array


_LISTS = st.lists(st.lists(st.integers(-5, 5), max_size=5), min_size=1, max_size=6)


@given(_LISTS, st.integers(-9, 9), st.sampled_from(["left", "right"]), st.none() | st.integers(5, 7))
def test_lists_are_filled_up_to_the_longest_or_to_a_length(
    lists: list[list[int]], value: int, side: str, length: int | None
) -> None:
    rows = _rows(x=pa.array(lists, pa.list_(pa.int64())))
    made = collate.collate(rows, pad(value, length=length, side=side))["x"]
    longest = max(map(len, lists)) if length is None else length
    fill = [[value] * (longest - len(row)) for row in lists]
    assert made.tolist() == [
        more + row if side == "left" else row + more for row, more in zip(lists, fill, strict=True)
    ]


@given(_LISTS)
def test_ragged_lists_are_found_again_by_their_offsets(lists: list[list[int]]) -> None:
    array = pa.array([[9], *lists], pa.list_(pa.int64())).slice(1)
    made = collate.collate(_rows(x=array), ragged())["x"]
    assert isinstance(made, Ragged)
    offsets = made.offsets.tolist()
    assert [made.values[offsets[i] : offsets[i + 1]].tolist() for i in range(len(lists))] == lists


def test_lists_of_lists_and_images_are_filled_up_in_every_dimension() -> None:
    made = pad(7)({"x": pa.array([[[1], [2, 3]], [], [[4]]]), "image": _images((1, 2), (2, 1), (0, 0))})
    assert made["x"].tolist() == [[[1, 7], [2, 3]], [[7, 7], [7, 7]], [[4, 7], [7, 7]]]
    assert made["image"].tolist() == [[[1, 1], [7, 7]], [[1, 7], [1, 7]], [[7, 7], [7, 7]]]
    left = pad(7, side="left")({"image": _images((1, 2), (2, 1))})
    assert left["image"].tolist() == [[[7, 7], [1, 1]], [[7, 1], [7, 1]]]


def test_lists_that_happen_to_have_one_length_are_treated_like_others() -> None:
    batch = {"x": np.array([[1, 2], [3, 4]])}
    assert pad(length=3)(batch)["x"].tolist() == [[1, 2, 0], [3, 4, 0]]
    assert pad(length=3, side="left")(batch)["x"].tolist() == [[0, 1, 2], [0, 3, 4]]
    assert pad()(batch)["x"].tolist() == [[1, 2], [3, 4]]
    made = ragged()(batch)["x"]
    assert (made.values.tolist(), made.offsets.tolist()) == ([1, 2, 3, 4], [0, 2, 4])


def test_each_column_may_have_its_own_filling_and_others_stay_as_they_are() -> None:
    table = pa.table(
        {"ids": [[1], [2, 3]], "labels": [[4], [5, 6]], "text": ["a", "b"], "words": [["a"], []], "n": [1, 2]}
    )
    made = pad({"labels": -100})(table)
    assert made["ids"].tolist() == [[1, 0], [2, 3]]
    assert made["labels"].tolist() == [[4, -100], [5, 6]]
    assert (made["text"], made["words"], made["n"].tolist()) == (["a", "b"], [["a"], []], [1, 2])


def test_only_named_columns_are_handled_and_the_rest_must_be_uniform() -> None:
    batch = {"x": pa.array([[1], [2, 3]]), "y": pa.array([[1], [2, 3]])}
    with pytest.raises(DataError, match="Column 'y' has values of different lengths"):
        pad(columns=["x"])(batch)
    assert isinstance(ragged(columns=["x", "y"])(batch)["y"], Ragged)
    with pytest.raises(DataError, match="was given column 'z', and there are 'x', 'y'"):
        pad(columns="z")(batch)


def test_types_are_kept_and_pythons_floats_get_torchs_default() -> None:
    rows = _rows(x=[[1.5], [2.5, 3.5]], y=pa.array([[1], [2, 3]], pa.list_(pa.int16())))
    padded, kept = collate.collate(rows, pad()), collate.collate(rows, ragged())
    assert (padded["x"].dtype, padded["y"].dtype) == (torch.float32, torch.int16)
    assert (kept["x"].values.dtype, kept["y"].values.dtype) == (torch.float32, torch.int16)
    assert kept["y"].offsets.dtype == torch.int64


def test_ragged_rows_of_several_dimensions_keep_the_inner_ones() -> None:
    made = ragged()({"x": pa.array([[[1, 2]], [[3, 4], [5, 6]]]), "image": _images((1, 2), (3, 2))})
    assert made["x"].values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert made["x"].offsets.tolist() == [0, 1, 3]
    assert tuple(made["image"].values.shape) == (4, 2)
    with pytest.raises(DataError, match=r"1 in row 100, 2 in row 101"):
        collate.collate(_rows(x=pa.array([[[1]], [[3, 4]]])), ragged())


@pytest.mark.parametrize(
    ("column", "make", "said"),
    [
        (
            [[1], [2, 3]],
            lambda: pad(length=1),
            "Column 'x' has 2 values in row 101, and pad.. was given length=1",
        ),
        (np.zeros((2, 3)), lambda: pad(length=1), "Column 'x' has 3 values in row 100"),
        (
            pa.array([[1], [2, 3]], pa.list_(pa.uint8())),
            lambda: pad(-1),
            "Column 'x' cannot be padded with -1",
        ),
        ([[1], None], lambda: pad(), "Column 'x' is null in row 101"),
        ([[1], [None]], lambda: ragged(), "Column 'x' has a null in the list of row 101"),
        (["a", "b"], lambda: pad(columns=["x"]), "Column 'x' holds string, and only lists of numbers"),
        ([1, 2], lambda: ragged(columns=["x"]), "Column 'x' holds int64, and only lists of numbers"),
        (_images((1,), (1, 2)), lambda: pad(), r"\(1,\) in row 100, \(1, 2\) in row 101"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_row(column: Any, make: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        collate.collate(_rows(x=column), make())


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(DataError, match="side='top' is unknown"):
        pad(side="top")
    with pytest.raises(DataError, match="length=-1"):
        pad(length=-1)


def test_ready_made_functions_travel_to_other_processes() -> None:
    for made in (pad(1, ["x"], 3, "left"), ragged(["x"])):
        assert pickle.loads(pickle.dumps(made)) == made


def test_a_class_without_a_call_cannot_be_made() -> None:
    class Nothing(ArrowBatchCollateFn):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ([[1], [1, 2]], float("nan")),
        ([[1], [1, 2]], 0.5),
        (pa.array([[1], [1, 2]], pa.list_(pa.uint8())), 300),
        (pa.array([[1], [1, 2]], pa.list_(pa.float16())), 1e9),
        ([[True], []], 2),
        ([[1], []], "x"),
        (_images((1, 2), (2, 1)), -1),
    ],
)
def test_a_value_that_the_type_cannot_hold_is_refused(column: Any, value: Any) -> None:
    with pytest.raises(DataError, match=f"Column 'x' cannot be padded with {value!r}: "):
        collate.collate(_rows(x=column), pad(value))


def test_values_of_other_types_that_mean_the_same_are_taken() -> None:
    rows = _rows(x=pa.array([[1], []], pa.list_(pa.uint8())), y=pa.array([[1.5], []]), z=[[True], []])
    made = collate.collate(rows, pad({"x": 7.0, "y": float("nan"), "z": 1}))
    assert (made["x"].tolist(), made["z"].tolist()) == ([[1], [7]], [[True], [True]])
    assert made["y"].isnan().tolist() == [[False], [True]]
