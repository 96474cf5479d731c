"""What is done to rows: outcomes, counts, random numbers, and whom a message blames."""

from __future__ import annotations

import functools
import importlib.machinery
import io
import os
import random
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import powertrain.data.operations.pool as pool_module
from powertrain.data.operations.columns import DropColumns, FilterExpression, RenameColumns, SelectColumns
from powertrain.data.operations.decode import DecodeImages
from powertrain.data.operations.functions import FilterRows, FlatMap, MapBatches, MapRows
from powertrain.data.operations.operation import Applied, Operation
from powertrain.data.operations.runner import Runner
from powertrain.data.rows.formats import row_dicts, to_numpy
from powertrain.data.rows.gather import concat_rows, take_rows
from powertrain.data.rows.rows import Rows
from powertrain.errors import ConfigError, DataError


@pytest.fixture(scope="module", autouse=True)
def _light_processes() -> Iterator[None]:
    """Processes load neither this file nor what other tests have loaded: they start in a moment."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_PRELOADED", ("numpy", "pyarrow"))
        yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


#: Row numbers begin here, so that they cannot be taken for places.
FIRST = 1000


def numbered(count: int, **columns: Any) -> Rows:
    """Rows with a column "x" of 0, 1, 2, … and those given."""
    numbers = np.arange(FIRST, FIRST + count, dtype=np.int64)
    return Rows({"x": np.arange(count), **columns}, numbers)


def name_row(number: int) -> str:
    return f"data.parquet, row {number - FIRST}"


def run(rows: Rows, *operations: Operation, epoch: int = 0, seed: int = 5, **options: Any) -> Applied:
    runner = Runner(operations, seed=seed, name_row=name_row, **options)
    try:
        return runner.run(rows, epoch)
    finally:
        runner.close()


def column(applied: Applied, name: str) -> list[Any]:
    return list(to_numpy(applied.rows)[name].tolist())


def failure(rows: Rows, *operations: Operation, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        run(rows, *operations, **options)
    return caught.value


# -- rows


def test_map_replaces_each_row_by_what_the_function_returns() -> None:
    text = pa.array(["a", "b", "c"])
    done = run(numbered(3, text=text), MapRows(lambda row: {"y": row["x"] * 10, "text": row["text"] + "!"}))
    assert row_dicts(done.rows) == [{"y": 0, "text": "a!"}, {"y": 10, "text": "b!"}, {"y": 20, "text": "c!"}]
    assert done.counts is None
    assert done.rows.numbers.tolist() == [1000, 1001, 1002]


def test_functions_get_their_arguments() -> None:
    def scaled(row: dict[str, Any], factor: int, *, plus: int) -> dict[str, Any]:
        return {"x": row["x"] * factor + plus}

    done = run(numbered(3), MapRows(scaled, fn_args=(2,), fn_kwargs={"plus": 1}))
    assert column(done, "x") == [1, 3, 5]


def test_a_float64_column_is_still_one_after_a_map_and_new_python_floats_are_not() -> None:
    rows = numbered(2, typed=np.array([0.5, 1.5]))
    done = run(rows, MapRows(lambda row: {"typed": row["typed"] * 2, "new": 0.25}))
    assert done.rows.python_floats == {"new"}
    assert column(done, "typed") == [1.0, 3.0]


def test_flat_map_says_what_each_row_has_become() -> None:
    done = run(numbered(4), FlatMap(lambda row: [{"y": row["x"]}] * row["x"]))
    assert column(done, "y") == [1, 2, 2, 3, 3, 3]
    assert done.counts is not None
    assert done.counts.tolist() == [0, 1, 2, 3]
    assert done.rows.numbers.tolist() == [1001, 1002, 1002, 1003, 1003, 1003]


def test_flat_map_takes_a_generator() -> None:
    def twice(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield row
        yield row

    assert column(run(numbered(2), FlatMap(twice)), "x") == [0, 0, 1, 1]


def test_filter_leaves_out_rows_and_counts_them() -> None:
    done = run(numbered(5), FilterRows(lambda row: row["x"] % 2))
    assert column(done, "x") == [1, 3]
    assert done.counts is not None
    assert done.counts.tolist() == [0, 1, 0, 1, 0]
    assert run(numbered(3), FilterRows(lambda row: True)).counts is None


def test_an_arrow_expression_filters_and_null_is_false() -> None:
    rows = numbered(4, word=pa.array(["a", None, "b", "a"]))
    done = run(rows, FilterExpression((pc.field("word") == "a") & (pc.field("x") < 3)))
    assert column(done, "x") == [0]
    assert done.counts is not None
    assert done.counts.tolist() == [1, 0, 0, 0]


def test_what_follows_is_not_done_where_no_row_is_left() -> None:
    seen: list[Any] = []
    done = run(numbered(3), FilterRows(lambda row: False), MapRows(lambda row: seen.append(row) or row))
    assert (len(done.rows), seen) == (0, [])
    assert done.counts is not None
    assert done.counts.tolist() == [0, 0, 0]
    assert len(run(numbered(0), MapRows(lambda row: row)).rows) == 0


def _model(kind: str, size: int, items: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What an operation of the property test does to (number, value) pairs, said as plainly as can be."""
    if kind == "map":
        return [(number, value + 1) for number, value in items]
    if kind == "filter":
        return [(number, value) for number, value in items if value % 3]
    if kind == "flat_map":
        return [(number, value + i) for number, value in items for i in range(value % 3)]
    made: list[tuple[int, int]] = []
    for start in range(0, len(items), size):  # each batch loses its last row
        batch = items[start : start + size]
        n, m = len(batch), len(batch) - 1
        owners = [batch[i][0] for i in range(n) for _ in range((i + 1) * m // n - i * m // n)]
        made += list(zip(owners, [value for _, value in batch[:-1]], strict=True))
    return made


def _operation(kind: str, size: int) -> Operation:
    if kind == "map":
        return MapRows(lambda row: {"x": row["x"] + 1})
    if kind == "filter":
        return FilterRows(lambda row: row["x"] % 3)
    if kind == "flat_map":
        return FlatMap(lambda row: [{"x": row["x"] + i} for i in range(row["x"] % 3)])
    return MapBatches(lambda batch: {"x": batch["x"][:-1]}, batch_size=size)


@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.sampled_from(["map", "filter", "flat_map", "batches"]), st.integers(1, 9)), max_size=4
    ),
)
def test_rows_numbers_and_counts_are_those_of_the_plain_model(
    count: int, kinds: list[tuple[str, int]]
) -> None:
    done = run(numbered(count), *[_operation(kind, size) for kind, size in kinds])
    expected = [(FIRST + i, i) for i in range(count)]
    for kind, size in kinds:
        expected = _model(kind, size, expected)
    assert done.rows.numbers.tolist() == [number for number, _ in expected]
    assert (column(done, "x") if expected else []) == [value for _, value in expected]
    counts = [1] * count if done.counts is None else done.counts.tolist()
    assert counts == [sum(number == FIRST + i for number, _ in expected) for i in range(count)]


# -- batches


def test_batches_have_the_size_that_was_asked_for_and_the_rest() -> None:
    def with_size(batch: dict[str, Any]) -> dict[str, Any]:
        return {"size": np.full(len(batch["x"]), len(batch["x"]))}

    operation = MapBatches(with_size, batch_size=4)
    assert column(run(numbered(10), operation), "size") == [4] * 8 + [2] * 2
    runner = Runner([operation, MapBatches(with_size, batch_size=7)], seed=0, name_row=name_row)
    assert runner.batch_size == 7
    assert Runner([MapRows(with_size)], seed=0, name_row=name_row).batch_size is None


@pytest.mark.parametrize("given_as", ["numpy", "pandas", "pyarrow"])
@pytest.mark.parametrize("returned_as", ["numpy", "pandas", "pyarrow"])
def test_functions_on_batches_get_one_form_and_may_return_any(given_as: str, returned_as: str) -> None:
    import pandas as pd

    kinds: dict[str, type[Any]] = {"numpy": dict, "pandas": pd.DataFrame, "pyarrow": pa.Table}

    def double(batch: Any) -> Any:
        assert isinstance(batch, kinds[given_as])
        doubled = np.asarray(batch["x"]) * 2
        return {
            "numpy": lambda: {"x": doubled},
            "pandas": lambda: pd.DataFrame({"x": doubled}),
            "pyarrow": lambda: pa.table({"x": pa.array(doubled)}),
        }[returned_as]()

    done = run(numbered(5), MapBatches(double, batch_format=given_as))
    assert column(done, "x") == [0, 2, 4, 6, 8]


def test_a_function_on_batches_may_yield_several() -> None:
    def halves(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"x": batch["x"][::2]}
        yield {"x": batch["x"][1::2]}

    done = run(numbered(6), MapBatches(halves, batch_size=4))
    assert column(done, "x") == [0, 2, 1, 3, 4, 5]
    assert done.counts is None


def test_a_promise_to_keep_the_number_of_rows_is_held_against_the_function() -> None:
    operation = MapBatches(lambda batch: {"x": batch["x"][:1]}, changes_count=False)
    assert operation.keeps_count
    assert "returned 1 rows for 3" in str(failure(numbered(3), operation))
    assert not MapBatches(lambda batch: batch).keeps_count


def test_batches_of_different_columns_are_refused_with_the_row_they_begin_with() -> None:
    def changing(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"]} if batch["x"][0] == 0 else {"y": batch["x"]}

    text = str(failure(numbered(4), MapBatches(changing, batch_size=2)))
    assert "data.parquet, row 2" in text
    assert "the columns 'y', but 'x'" in text


# -- classes


class Adder:
    """Adds a number, and remembers in which thread and how often it is at it."""

    made = 0

    def __init__(self, number: int = 1, *, fail: bool = False) -> None:
        Adder.made += 1
        self.number = number
        self.busy = False
        if fail:
            raise OSError("no model here")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        assert not self.busy
        self.busy = True
        time.sleep(0.001)
        self.busy = False
        return {"x": row["x"] + self.number}


def test_a_class_is_made_once_with_its_arguments_and_called_by_one_thread_at_a_time() -> None:
    Adder.made = 0
    runner = Runner([MapRows(Adder, fn_constructor_args=(7,))], seed=0, name_row=name_row)
    outcomes: list[Any] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(column(runner.run(numbered(10), 0), "x")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    runner.close()
    assert outcomes == [list(range(7, 17))] * 4
    assert Adder.made == 1


def test_a_constructor_that_raises_is_named_with_its_line() -> None:
    error = failure(numbered(2), MapRows(Adder, fn_constructor_kwargs={"fail": True}))
    assert str(error).startswith("map(Adder) failed at ")
    assert 'raise OSError("no model here")' in str(error)
    assert isinstance(error.__cause__, OSError)


# -- random numbers


def drawing(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": row["x"], "draw": int(rng.integers(2**40))}


def test_random_numbers_belong_to_the_row_however_rows_are_put_together() -> None:
    whole = column(run(numbered(12), MapRows(drawing)), "draw")
    assert len(set(whole)) == 12
    backwards = take_rows(numbered(12), np.arange(11, -1, -1))
    assert column(run(backwards, MapRows(drawing)), "draw") == whole[::-1]
    parts = [
        run(take_rows(numbered(12), np.arange(a, b)), MapRows(drawing)).rows for a, b in [(0, 5), (5, 12)]
    ]
    assert column(Applied(concat_rows(parts)), "draw") == whole


def test_random_numbers_differ_between_epochs_seeds_and_operations() -> None:
    twice = run(
        numbered(3),
        MapRows(drawing),
        RenameColumns({"draw": "first"}),
        MapRows(lambda row, rng: {**row, "second": int(rng.integers(2**40))}),
    )
    draws = [
        column(twice, "first"),
        column(twice, "second"),
        column(run(numbered(3), MapRows(drawing), epoch=1), "draw"),
        column(run(numbered(3), MapRows(drawing), seed=6), "draw"),
    ]
    assert len({number for one in draws for number in one}) == 12


def test_rows_made_from_one_row_draw_different_numbers() -> None:
    done = run(numbered(2), FlatMap(lambda row: [row] * 3), MapRows(drawing))
    assert len(set(column(done, "draw"))) == 6
    batched = run(
        numbered(1),
        FlatMap(lambda row: [row] * 4),
        MapBatches(lambda batch, rng: {"draw": rng.integers(2**40, size=len(batch["x"]))}, batch_size=2),
    )
    assert len(set(column(batched, "draw"))) == 4


def test_random_numbers_are_golden() -> None:
    assert column(run(numbered(2), MapRows(drawing)), "draw") == [517489550846, 802926507214]


def test_a_generator_of_the_users_own_is_left_alone() -> None:
    own = np.random.default_rng(3)
    expected = int(np.random.default_rng(3).integers(2**40))
    by_argument = MapRows(drawing, fn_kwargs={"rng": own})
    assert column(run(numbered(1), by_argument), "draw") == [expected]
    bound = MapRows(functools.partial(drawing, rng=np.random.default_rng(3)))
    assert column(run(numbered(1), bound), "draw") == [expected]


# -- processes


def test_processes_draw_what_threads_draw() -> None:
    there = run(numbered(8), MapRows(drawing, concurrency=2))
    assert column(there, "draw") == column(run(numbered(8), MapRows(drawing)), "draw")


def test_global_generators_of_processes_belong_to_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_PRELOADED", ("numpy", "pyarrow", "torch"))

    def from_globals(row: dict[str, Any]) -> dict[str, Any]:
        import torch

        return {
            "pid": os.getpid(),
            "python": random.random(),
            "numpy": float(np.random.random()),
            "torch": float(torch.rand(())),
        }

    runner = Runner([MapRows(from_globals, concurrency=2)], seed=5, name_row=name_row)
    try:
        whole = runner.run(numbered(8), 0)
        parts = [runner.run(take_rows(numbered(8), np.arange(a, b)), 0).rows for a, b in [(0, 3), (3, 8)]]
    finally:
        runner.close()
    pids = set(column(whole, "pid"))
    assert len(pids) == 2
    assert os.getpid() not in pids
    for name in ("python", "numpy", "torch"):
        assert len(set(column(whole, name))) == 8
        assert column(Applied(concat_rows(parts)), name) == column(whole, name)


def test_processes_change_counts_and_columns_as_threads_do() -> None:
    operations: list[Callable[[int], Operation]] = [
        lambda n: FlatMap(lambda row: [{**row, "copy": i} for i in range(row["x"] % 3)], concurrency=n),
        lambda n: MapBatches(
            lambda batch: {"x": batch["x"][1:], "text": [f"{x}" for x in batch["x"][1:]]},
            batch_size=3,
            concurrency=n,
        ),
    ]
    rows = numbered(11, text=pa.array([f"row {i}" for i in range(11)]))
    here = run(rows, *[make(0) for make in operations])
    there = run(rows, *[make(2) for make in operations])
    assert row_dicts(there.rows) == row_dicts(here.rows)
    assert here.counts is not None
    assert there.counts is not None
    assert there.counts.tolist() == here.counts.tolist()
    assert there.rows.numbers.tolist() == here.rows.numbers.tolist()


def test_ranks_of_a_machine_share_its_processes() -> None:
    def with_pid(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.005)
        return {"pid": os.getpid()}

    done = run(numbered(4), MapRows(with_pid, concurrency=2), local_world_size=2)
    assert len(set(column(done, "pid"))) == 1


def test_a_process_that_is_killed_is_reported_with_the_rows_it_had() -> None:
    def deadly(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    text = str(failure(numbered(4), MapRows(deadly, concurrency=1)))
    assert text.startswith("map(deadly) failed on the batch of 4 rows that begins with data.parquet, row 0: ")
    assert "SIGKILL" in text
    assert "memory" in text


def test_what_cannot_be_sent_to_a_process_is_named() -> None:
    lock = threading.Lock()

    def locked(row: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return row

    text = str(failure(numbered(1), MapRows(locked, concurrency=1)))
    assert "locked() cannot be sent to processes of its own" in text
    assert "'lock'" in text


def test_a_function_that_cannot_be_loaded_in_a_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    only_here = types.ModuleType("only_here")
    only_here.__spec__ = importlib.machinery.ModuleSpec("only_here", None)
    monkeypatch.setitem(sys.modules, "only_here", only_here)

    def uses_it(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": len(vars(module))}

    module = only_here
    text = str(failure(numbered(1), MapRows(uses_it, concurrency=1)))
    assert text.startswith("map(uses_it) failed: it cannot be loaded in a process of its own: ModuleNotFound")


def test_a_class_that_cannot_be_made_in_a_process_is_named_with_its_line() -> None:
    error = failure(numbered(2), MapRows(Adder, fn_constructor_kwargs={"fail": True}, concurrency=1))
    assert 'raise OSError("no model here")' in str(error)
    assert isinstance(error.__cause__, OSError)


def test_an_exception_that_cannot_travel_is_still_reported_with_row_and_line() -> None:
    class Picky(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("needs two")

    def fail(row: dict[str, Any]) -> dict[str, Any]:
        raise Picky(1, 2)

    text = str(failure(numbered(1), MapRows(fail, concurrency=1)))
    assert text.startswith("map(fail) failed on data.parquet, row 0 at ")
    assert text.endswith("Picky: needs two")


@pytest.mark.parametrize("used_before", [False, True])
def test_after_closing_nothing_is_done_in_processes(used_before: bool) -> None:
    runner = Runner([MapRows(lambda row: row, concurrency=1)], seed=0, name_row=name_row)
    if used_before:
        runner.run(numbered(1), 0)
    runner.close()
    with pytest.raises(DataError, match="was closed"):
        runner.run(numbered(1), 0)


# -- blame


def helper(value: int) -> float:
    return 1 / (value - 2)


def failing(row: dict[str, Any]) -> dict[str, Any]:
    return {"y": helper(row["x"])}


@pytest.mark.parametrize("concurrency", [0, 1])
def test_a_function_that_raises_is_reported_in_one_sentence(concurrency: int) -> None:
    error = failure(numbered(5), MapRows(failing, concurrency=concurrency))
    line = helper.__code__.co_firstlineno + 1
    assert str(error) == (
        f"map(failing) failed on data.parquet, row 2 at {__file__}, line {line} (return 1 / (value - 2)): "
        "ZeroDivisionError: division by zero"
    )
    assert isinstance(error.__cause__, ZeroDivisionError)
    told = "".join(traceback.format_exception(error))
    assert "in helper" in told


def test_the_line_is_the_users_even_where_a_library_raised() -> None:
    def in_numpy(row: dict[str, Any]) -> dict[str, Any]:
        return {"y": np.concatenate([np.zeros(2), np.zeros((2, 2))])}

    text = str(failure(numbered(1), MapRows(in_numpy)))
    assert f"line {in_numpy.__code__.co_firstlineno + 1} (return " in text


def test_a_failing_batch_is_named_by_its_first_row() -> None:
    def fail(batch: dict[str, Any]) -> dict[str, Any]:
        assert batch["x"][0] < 4, "too large"
        return batch

    text = str(failure(numbered(8), MapBatches(fail, batch_size=4)))
    assert "map_batches(fail) failed on the batch of 4 rows that begins with data.parquet, row 4 at" in text
    assert "AssertionError: too large" in text


def test_a_generator_that_raises_later_is_blamed_too() -> None:
    def late(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield row
        raise KeyError("gone")

    text = str(failure(numbered(2), FlatMap(late)))
    assert text.startswith("flat_map(late) failed on data.parquet, row 0 at")
    assert 'raise KeyError("gone")' in text


def test_leaving_the_interpreter_in_a_function_is_a_failure_of_that_function() -> None:
    assert "SystemExit: 3" in str(failure(numbered(1), MapRows(lambda row: exit(3))))


def test_a_lambda_is_named_by_its_line() -> None:
    line = failing.__code__.co_firstlineno  # any line of this file will do to see the form
    operation = MapRows(lambda row: None)
    assert operation.name == f"map(lambda of test_operations.py:{operation.fn.__code__.co_firstlineno})"
    assert operation.fn.__code__.co_firstlineno > line


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (MapRows(lambda row: None), "returned None, and must return a dict of columns: does every way"),
        (MapRows(lambda row: [1]), "returned a value of type list, and must return a dict"),
        (MapRows(lambda row: {5: 1}), "returned 5 as the name of a column"),
        (MapBatches(lambda batch: {}), "returned a dict without columns"),
        (MapRows(lambda row: {"a": 1} if row["x"] else {"b": 1}), "a dict without 'b' and with 'a'"),
        (FlatMap(lambda row: row), "returned a value of type dict, and must return a list of dicts"),
        (FlatMap(lambda row: 3), "returned a value of type int, and must return a list of dicts"),
        (FlatMap(lambda row: [3]), "returned a value of type int, and must return a dict"),
        (FilterRows(lambda row: np.zeros(2)), "returned a value of type ndarray, which is neither true nor"),
        (MapBatches(lambda batch: None), "returned None, and must return a dict of arrays"),
        (MapBatches(lambda batch: {"a": [1], "b": [1, 2]}), "different lengths: 'a' has 1, 'b' has 2"),
        (MapBatches(lambda batch: {"a": 3}), "a value of type int for column 'a'"),
        (MapBatches(lambda batch: {3: [1]}), "returned 3 as the name of a column"),
    ],
)
def test_what_cannot_be_used_is_refused_with_row_function_and_line(operation: Operation, said: str) -> None:
    text = str(failure(numbered(2), operation))
    assert said in text
    row = 1 if "without 'b'" in said else 0
    assert f"data.parquet, row {row}" in text
    assert f"{__file__}, line " in text


# -- columns


def test_columns_are_selected_dropped_and_renamed() -> None:
    rows = Rows(
        {"a": np.arange(2), "b": np.arange(2.0), "c": pa.array(["x", "y"])}, np.arange(2), frozenset({"b"})
    )
    assert list(run(rows, SelectColumns(("c", "a"))).rows.columns) == ["c", "a"]
    assert list(run(rows, DropColumns(("a",))).rows.columns) == ["b", "c"]
    renamed = run(rows, RenameColumns({"b": "z"})).rows
    assert list(renamed.columns) == ["a", "z", "c"]
    assert renamed.python_floats == {"z"}
    assert list(run(rows, RenameColumns(["p", "q", "r"])).rows.columns) == ["p", "q", "r"]


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (SelectColumns(("lable",)), "no column 'lable'; the columns are 'x', 'label'. Did you mean 'label'?"),
        (DropColumns(("q",)), "drop_columns('q'): there is no column 'q'"),
        (RenameColumns({"q": "r"}), "rename_columns: there is no column 'q'"),
        (RenameColumns({"x": "label"}), "two columns the name 'label'"),
        (RenameColumns(["only"]), "1 names ('only') for 2 columns ('x', 'label')"),
        (FilterExpression(pc.field("q") > 1), "The columns are 'x', 'label'."),
        (FilterExpression(pc.field("x") + 1), "cannot be computed"),
        (DecodeImages(("q",)), "no column 'q'"),
    ],
)
def test_a_column_that_does_not_exist_is_named_with_those_that_do(operation: Operation, said: str) -> None:
    assert said in str(failure(numbered(2, label=np.zeros(2)), operation))


# -- bad arguments


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MapRows(3), "map needs a function"),  # type: ignore[arg-type]
        (lambda: MapRows(Rows), "whose instances can be called"),
        (lambda: MapRows(abs, fn_constructor_args=(1,)), "abs is not a class"),
        (lambda: MapRows(abs, concurrency=-1), "concurrency is -1"),
        (lambda: MapBatches(abs, batch_size=0), "batch_size is 0"),
        (lambda: MapBatches(abs, batch_format="torch"), "one of 'numpy', 'pandas', 'pyarrow'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Callable[[], Operation], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


# -- images


def encoded(size: tuple[int, int], colour: Any = 0, mode: str = "RGB", kind: str = "PNG") -> bytes:
    """An image of (height, width) in one colour."""
    file = io.BytesIO()
    Image.new(mode, (size[1], size[0]), colour).save(file, kind)
    return file.getvalue()


def images(*values: Any, **options: Any) -> Rows:
    return Rows({"image": pa.array(values, **options)}, np.arange(FIRST, FIRST + len(values)))


def decoded(rows: Rows, *arguments: Any, threads: int = 1) -> Any:
    return run(rows, DecodeImages(("image",), *arguments), threads=threads).rows.columns["image"]


def test_images_of_one_shape_become_one_writable_array() -> None:
    pixels = decoded(images(encoded((2, 3), (255, 0, 0)), encoded((2, 3), (0, 0, 255), kind="BMP")))
    assert (pixels.shape, pixels.dtype) == ((2, 2, 3, 3), np.uint8)
    assert pixels[0, 0, 0].tolist() == [255, 0, 0]
    assert pixels[1, 1, 2].tolist() == [0, 0, 255]
    pixels[0] = 0


def test_images_are_scaled_and_converted() -> None:
    rows = images(encoded((8, 4), (255, 255, 255), kind="JPEG"), encoded((3, 5), 255, mode="L"))
    assert decoded(rows, (2, 6), "RGB").shape == (2, 2, 6, 3)
    grey = decoded(rows, (2, 6), "L")
    assert grey.shape == (2, 2, 6)
    assert (grey == 255).all()


@pytest.mark.parametrize(
    ("mode", "colour", "pixel"), [("1", 1, 255), ("P", 0, [0, 0, 0]), ("RGBA", (1, 2, 3, 4), [1, 2, 3, 4])]
)
def test_pixels_mean_what_they_show(mode: str, colour: Any, pixel: Any) -> None:
    pixels = decoded(images(encoded((1, 1), colour, mode)))
    assert pixels.dtype == np.uint8
    assert pixels[0, 0, 0].tolist() == pixel


def test_images_of_different_shapes_and_nulls_stay_apart() -> None:
    pixels = decoded(images(encoded((2, 3)), None, encoded((4, 1))))
    assert pixels.dtype == object
    assert [None if p is None else p.shape for p in pixels] == [(2, 3, 3), None, (4, 1, 3)]


def test_images_as_hugging_face_keeps_them_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "there.png"
    path.write_bytes(encoded((1, 2), (9, 9, 9)))
    kind = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
    pixels = decoded(
        images({"bytes": encoded((1, 2)), "path": None}, {"bytes": None, "path": str(path)}, type=kind)
    )
    assert pixels[:, 0, 0, 0].tolist() == [0, 9]


def test_images_decoded_on_several_threads_keep_their_order() -> None:
    rows = images(*[encoded((4, 4), value, "L") for value in range(50)])
    assert decoded(rows, threads=3)[:, 0, 0].tolist() == list(range(50))


@pytest.mark.parametrize("data", [b"no image at all", encoded((64, 64), kind="JPEG")[:-60], b""])
def test_a_broken_image_is_named_with_its_row_and_column(data: bytes) -> None:
    text = str(failure(images(encoded((64, 64)), data), DecodeImages(("image",)), threads=2))
    assert "failed on data.parquet, row 1: the image in column 'image' cannot be decoded" in text


def test_a_column_without_images_is_refused() -> None:
    assert "an encoded image is bytes" in str(failure(images(3, 4), DecodeImages(("image",))))


# -- time


def test_the_time_of_each_operation_is_known() -> None:
    runner = Runner(
        [MapRows(Adder), MapRows(failing, concurrency=0), SelectColumns(("y",))], seed=0, name_row=name_row
    )
    rows = take_rows(numbered(9), np.arange(3, 9))
    runner.run(rows, 0)
    (slow, slow_seconds), (_, fast_seconds), (last, _) = runner.seconds
    assert (slow, last) == ("map(Adder)", "select_columns('y')")
    assert slow_seconds >= 0.006 > fast_seconds


def test_images_of_16_bits_are_scaled_and_of_unknown_range_refused() -> None:
    deep = Image.fromarray(np.full((1, 1), 700, np.uint16))
    files = {kind: io.BytesIO() for kind in ("PNG", "TIFF")}
    for kind, file in files.items():
        deep.save(file, kind)
        assert decoded(images(file.getvalue()), None, "L").tolist() == [[[700 >> 8]]]
        assert decoded(images(file.getvalue()), None, "RGB").tolist() == [[[[700 >> 8] * 3]]]
        assert decoded(images(file.getvalue())).tolist() == [[[700]]]
    floats = io.BytesIO()
    Image.fromarray(np.full((1, 1), 0.5, np.float32)).save(floats, "TIFF")
    error = failure(images(floats.getvalue()), DecodeImages(("image",), None, "L"))
    assert "how large these can be is not known" in str(error)
