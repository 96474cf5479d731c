"""The public API of the data package with hostile values: a small run of the fuzzer, and what it has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.fuzz import data_api
from tests.fuzz.data_api_cases import targets, verdict

from powertrain import data
from powertrain.data import collate_fn, expressions
from powertrain.errors import ConfigError, DataError


def test_hostile_values_give_clear_errors_and_never_a_hang_or_a_crash() -> None:
    report = data_api.run(seed=7, budget=150)
    assert report.findings == []
    assert report.outcomes["works"] > 10
    assert report.outcomes["raises DataError"] > 50


def test_every_public_callable_is_called() -> None:
    names = {target.name for target in targets()}
    assert {"read_parquet", "from_items", "Dataset.split", "DataShard.peek", "collate_fn.pad"} <= names
    assert len(names) > 70
    assert {name for name in data.__all__ if name.startswith(("read", "from"))} <= names


@pytest.mark.parametrize(
    ("error", "is_allowed"),
    [
        (DataError("a sentence"), True),
        (ConfigError("a sentence"), True),
        (DataError(""), False),
        (ValueError("a raw error"), False),
        (TypeError("'int' object is not iterable"), False),
        (TypeError("f() got an unexpected keyword argument 'x'"), True),
        (SystemExit(3), False),
    ],
)
def test_what_counts_as_a_finding(error: BaseException, is_allowed: bool) -> None:
    assert (verdict(error, targets()[0]) == "") == is_allowed


def test_a_hang_and_a_crash_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Faulty:
        def __init__(self, seed: int, place: str) -> None:
            open(f"{place}/{data_api._STACKS}", "w").close()

        def do(self, number: int) -> dict[str, Any]:
            if number == 1:
                raise TimeoutError
            if number == 2:
                raise EOFError("ended by SIGSEGV")
            return {"done": "", "outcome": "works", "finding": ""}

        def close(self) -> None:
            pass

    monkeypatch.setattr(data_api, "Worker", Faulty)
    report = data_api.run(seed=1, budget=4)
    assert [(number, finding.split("\n")[0]) for number, _, finding in report.findings] == [
        (1, "hangs"),
        (2, "crashes: ended by SIGSEGV"),
    ]
    assert report.outcomes == {"works": 2, "hangs": 1, "crashes": 1}


# --------------------------------------------------------------------------- what it has found


def contains_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def dict_in_itself() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["b"] = made
    return made


class NegativeLength:
    def __len__(self) -> int:
        return -1

    def __getitem__(self, index: int) -> int:
        return index


#: Types are ignored where an argument is wrong by its type already.
FOUND: dict[str, tuple[Callable[[], Any], str]] = {
    "a list that contains itself": (lambda: data.from_items([contains_itself()]), "contains itself"),
    "a dict that contains itself": (
        lambda: data.from_items([{"a": dict_in_itself()}]),
        "contains itself",
    ),
    "a series that contains itself": (
        lambda: data.from_pandas(pd.DataFrame({"a": pd.Series([contains_itself()])})),
        "contains itself",
    ),
    "a function that returns such": (
        lambda: data.range(3).map(lambda row: {"x": contains_itself()}).take_all(),
        "contains itself",
    ),
    "pieces without number": (lambda: data.range(10).split(2**31), "n=2147483648 is too large"),
    "blocks without number": (
        lambda: data.range(2**30).repartition(2**31),
        r"would make 1073741824 blocks. Ask for at most",
    ),
    "a range without end": (lambda: data.range(2**63), "is too large"),
    "processes without number": (lambda: data.range(3).map(str, concurrency=2**31), "concurrency=2147483648"),
    "arguments that are none": (lambda: data.range(3).map(str, fn_args=5), "fn_args=5 cannot be read through"),  # type: ignore[arg-type]
    "keywords that are none": (lambda: data.range(3).map(str, fn_kwargs=[1]), r"fn_kwargs=\[1\] must be a dict"),  # type: ignore[arg-type]
    "columns that are none": (lambda: data.range(3).select_columns(3), "select_columns"),  # type: ignore[arg-type]
    "columns of a file that are none": (lambda: data.read_parquet("x", columns=3), "read_parquet"),  # type: ignore[arg-type]
    "indices that are none": (lambda: data.range(3).split_at_indices(1.5), "indices=1.5 cannot be read"),  # type: ignore[arg-type]
    "proportions of text": (lambda: data.range(3).split_proportionately("ab"), "is one str"),  # type: ignore[arg-type]
    "a limit of text": (lambda: data.range(3).take_all(limit="many"), "limit='many' must be a whole number"),  # type: ignore[arg-type]
    "a limit of text for pandas": (lambda: data.range(3).to_pandas(limit="many"), "limit='many'"),  # type: ignore[arg-type]
    "a form that cannot be compared": (
        lambda: data.range(3).iter_batches(batch_format=[]),  # type: ignore[arg-type]
        r"batch_format=\[\] is unknown",
    ),
    "a path that is a number": (lambda: data.range(3).write_parquet(5), "path=5 is not a path"),  # type: ignore[arg-type]
    "a path with NUL": (lambda: data.read_csv("a\0b"), "NUL character"),
    "a path without end": (lambda: data.read_parquet("x" * 10_000), "has 10000 characters"),
    "half a character": (lambda: data.range(3).rename_columns({"id": "\udc80"}), "half a character"),
    "options of another kind": (lambda: data.read_csv("x", read_options={}), "read_options={} is a dict"),  # type: ignore[arg-type]
    "a batch that is none": (lambda: collate_fn.pad()("text"), "A collate_fn is called with a dict of arrays"),  # type: ignore[arg-type]
    "an expression that is none": (lambda: expressions.parse(3), "A filter is text"),  # type: ignore[arg-type]
    "a column that is none": (lambda: expressions.col(3), "Give the name of a column"),  # type: ignore[arg-type]
    "a length that fails": (lambda: data.from_torch(NegativeLength()), "__len__ failed"),
    "an epoch count of text": (lambda: next(data.range(3)._reader.epochs().epochs("two")), "total='two' must be"),  # type: ignore[arg-type]
    "a seed of 100 bits": (lambda: data.range(3).random_shuffle(seed=2**100), "is too large"),
}  # fmt: skip


@pytest.mark.parametrize("found", FOUND)
def test_what_the_fuzzer_has_found_is_one_sentence_now(found: str) -> None:
    call, words = FOUND[found]
    with pytest.raises(DataError, match=words):
        call()


@pytest.mark.parametrize("two", [2, np.int8(2), np.array(2), torch.tensor(2)])
def test_numbers_of_numpy_and_torch_are_taken(two: Any) -> None:
    numbers = data.range(6)
    assert len(numbers.take(two)) == 2
    assert numbers.limit(two).count() == 2
    assert [part.count() for part in numbers.split(two)] == [3, 3]
    assert [part.count() for part in numbers.split_at_indices([two])] == [2, 4]
    assert [part.count() for part in numbers.train_test_split(two)] == [4, 2]
    assert len(list(numbers.iter_batches(batch_size=two, prefetch_batches=two, seed=two))) == 3
    assert numbers.map_batches(lambda batch: batch, batch_size=two).repartition(two).num_blocks() == 2
    half: Any = torch.tensor(0.5) if isinstance(two, torch.Tensor) else np.float64(0.5)
    assert [part.count() for part in numbers.train_test_split(half)] == [3, 3]
