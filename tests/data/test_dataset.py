"""Dataset: what each method makes of a plan, and what rows come of it."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.numbered import Tables, ids, numbered, tables
from tests.support.examples import scaled

from powertrain.data.dataset import Dataset
from powertrain.data.plan.plan import Block, Part, Plan
from powertrain.errors import ConfigError, DataError

#: Reading starts threads, so that an example takes its time.
few_examples = settings(max_examples=scaled(15), suppress_health_check=[HealthCheck.too_slow])


def even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 == 0)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: np.repeat(values, 2) for name, values in batch.items()}


# --------------------------------------------------------------------------- lazy and immutable


def test_nothing_is_looked_at_or_read_to_transform_a_dataset() -> None:
    source = tables(3, 4)
    dataset = Dataset(Plan((Part(source),)))
    made = dataset.map(lambda row: row).filter(even).select_columns(["id"]).random_shuffle(seed=1)
    made.union(dataset.flat_map(lambda row: [row])).rename_columns({"id": "number"}).drop_columns("half")
    assert source.looks == 0
    assert source.read_blocks == []


def test_a_transformation_leaves_the_dataset_as_it_was() -> None:
    dataset = numbered(3)
    before = dataset.plan
    dataset.map(lambda row: {"id": -1})
    dataset.limit(1)
    dataset.random_shuffle(seed=1)
    assert dataset.plan is before
    assert ids(dataset) == [0, 1, 2]


def test_a_dataset_says_in_short_what_it_is() -> None:
    assert repr(numbered(3)) == "Dataset(tables)"
    named: Any = even  # what it returns is not looked at
    assert repr(numbered(3).map(named).random_shuffle()) == "Dataset(tables, map(even), shuffled)"


def test_len_and_iteration_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(TypeError, match="count"):
        len(numbered(3))
    with pytest.raises(TypeError, match="iter_rows"):
        iter(numbered(3))
    assert numbered(0)


def test_a_dataset_with_a_lambda_travels_by_cloudpickle() -> None:
    dataset = numbered(4).map(lambda row: {"id": row["id"] + 10})
    assert ids(pickle.loads(cloudpickle.dumps(dataset))) == [10, 11, 12, 13]


# --------------------------------------------------------------------------- transforming


def test_a_map_replaces_every_row() -> None:
    def shifted(row: dict[str, Any], by: int, *, sign: int) -> dict[str, Any]:
        return {"id": sign * (row["id"] + by)}

    assert ids(numbered(2, 3).map(shifted, fn_args=(10,), fn_kwargs={"sign": -1})) == [
        -10,
        -11,
        -12,
        -13,
        -14,
    ]


def test_a_class_is_constructed_with_its_own_arguments() -> None:
    class Adder:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return {"id": row["id"] + self.by}

    assert ids(numbered(3).map(Adder, fn_constructor_args=(5,))) == [5, 6, 7]
    with pytest.raises(ConfigError, match="not a class"):
        numbered(3).map(even, fn_constructor_args=(5,))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_format", ["default", "numpy", "pandas", "pyarrow", None])
def test_a_batch_comes_in_the_form_that_was_asked_for(batch_format: str | None) -> None:
    import pandas as pd

    kinds = {"default": dict, "numpy": dict, "pandas": pd.DataFrame, "pyarrow": pa.Table, None: pa.Table}

    def checked(batch: Any) -> Any:
        assert isinstance(batch, kinds[batch_format])
        return batch

    assert ids(numbered(5).map_batches(checked, batch_format=batch_format)) == [0, 1, 2, 3, 4]


def test_batches_have_at_most_the_rows_that_were_asked_for() -> None:
    def sized(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": np.full(len(batch["id"]), len(batch["id"]))}

    assert ids(numbered(5).map_batches(sized, batch_size=2)) == [2, 2, 2, 2, 1]


def test_an_unknown_batch_format_is_refused() -> None:
    with pytest.raises(DataError, match="'polars'"):
        numbered(3).map_batches(lambda batch: batch, batch_format="polars")


def test_a_flat_map_may_give_any_number_of_rows() -> None:
    assert ids(numbered(2, 2).flat_map(lambda row: [row] * row["id"])) == [1, 2, 2, 3, 3, 3]


def test_a_filter_is_a_function_an_expression_or_text() -> None:
    dataset = numbered(3, 4)
    assert ids(dataset.filter(even)) == [0, 2, 4, 6]
    assert ids(dataset.filter(expr=pc.field("id") > 4)) == [5, 6]
    assert ids(dataset.filter(pc.field("id") > 4)) == [5, 6]
    assert ids(dataset.filter("id < 1 or half == 3")) == [0, 6]


def test_a_filter_needs_exactly_one_condition() -> None:
    cases: list[dict[str, Any]] = [{}, {"fn": even, "expr": "id > 1"}]
    for arguments in cases:
        with pytest.raises(DataError, match="either a function or an expression"):
            numbered(3).filter(**arguments)
    with pytest.raises(DataError, match="got a int"):
        numbered(3).filter(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="fn_args"):
        numbered(3).filter(expr="id > 1", fn_args=(1,))


def test_an_expression_is_counted_in_the_source_and_a_function_is_not() -> None:
    exact = numbered(3, 4).filter(expr="id >= 2")
    assert exact.plan.inspected().is_exact
    assert [block.rows for block in exact.plan.inspected().blocks] == [1, 4]
    assert not numbered(3, 4).filter(even).plan.inspected().is_exact
    assert not numbered(3).map(lambda row: row).filter(expr="id >= 2").plan.inspected().is_exact


def test_an_expression_is_exact_after_columns_were_chosen_and_after_a_limit() -> None:
    dataset = numbered(5, 5).rename_columns({"id": "number"}).drop_columns("half").limit(7)
    kept = dataset.filter(expr="number >= 4")
    assert kept.plan.inspected().is_exact
    assert kept.take_all() == [{"number": 4}, {"number": 5}, {"number": 6}]


def test_columns_can_be_chosen_dropped_and_renamed_before_and_after_functions() -> None:
    for dataset in (numbered(2), numbered(2).map(lambda row: row)):
        assert dataset.select_columns("id").take_all() == [{"id": 0}, {"id": 1}]
        assert dataset.select_columns(["half", "id"]).columns() == ["half", "id"]
        assert dataset.drop_columns(["id"]).take_all() == [{"half": 0.0}, {"half": 0.5}]
        assert dataset.rename_columns({"id": "n"}).columns() == ["n", "half"]
        assert dataset.rename_columns(["a", "b"]).take(1) == [{"a": 0, "b": 0.0}]


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    for dataset in (numbered(2), numbered(2).map(lambda row: row)):
        for wrong in (
            lambda d: d.select_columns(["idd"]),
            lambda d: d.drop_columns(["idd"]),
            lambda d: d.rename_columns({"idd": "x"}),
            lambda d: d.filter(expr="idd > 1"),
        ):
            with pytest.raises(DataError, match="idd") as error:
                wrong(dataset).take_all()
            assert "half" in str(error.value)


def test_names_of_columns_are_checked() -> None:
    with pytest.raises(DataError, match="at least one str"):
        numbered(2).select_columns([])
    with pytest.raises(DataError, match="3 names"):
        numbered(2).rename_columns(["a", "b", "c"]).take_all()
    with pytest.raises(DataError, match=r"two columns|several columns"):
        numbered(2).rename_columns({"id": "x", "half": "x"}).take_all()


def test_a_union_gives_the_rows_of_all_one_after_the_other() -> None:
    one, two = numbered(2, 1), numbered(2)
    assert ids(one.union(two, one)) == [0, 1, 2, 0, 1, 0, 1, 2]
    assert ids(one.limit(1).union(two)) == [0, 0, 1]
    with pytest.raises(DataError, match="got a list"):
        one.union([two])  # type: ignore[arg-type]


def test_a_union_has_a_type_that_fits_all_or_says_which_column_does_not() -> None:
    def one(values: list[Any], name: str = "x") -> Dataset:
        return Dataset(Plan((Part(Tables(pa.table({name: values}))),)))

    mixed = one([1, 2]).union(one([1.5]))
    assert mixed.schema().field("x").type == pa.float64()
    assert [row["x"] for row in mixed.materialize().iter_rows()] == [1.0, 2.0, 1.5]
    with pytest.raises(DataError, match="'x' has the type int64 in some rows and string"):
        one([1]).union(one(["text"])).schema()
    with pytest.raises(DataError, match=r"\['x'\] and others \['y'\]"):
        one([1]).union(one([1], "y")).schema()


def test_each_part_of_a_union_keeps_what_is_done_to_it() -> None:
    one = numbered(2).map(lambda row: {"id": row["id"] + 100})
    assert ids(one.union(numbered(2).filter(expr="id > 0").drop_columns("half"))) == [100, 101, 1]


def test_a_shuffle_gives_every_row_once_in_an_order_of_its_seed() -> None:
    dataset = numbered(40, 60)
    one, again, other = (ids(dataset.random_shuffle(seed=seed)) for seed in (1, 1, 2))
    assert sorted(one) == list(range(100))
    assert one == again
    assert one != other
    assert one != sorted(one)


def test_a_bad_seed_is_refused() -> None:
    with pytest.raises(DataError, match="seed='x'"):
        numbered(3).random_shuffle(seed="x")


# --------------------------------------------------------------------------- limits and splits


def test_a_limit_cuts_blocks_and_reads_only_those_it_needs() -> None:
    source = tables(3, 4, 5)
    limited = Dataset(Plan((Part(source),))).limit(5)
    assert limited.plan.blocks == (Block(0, 0, 0, 3), Block(0, 1, 0, 2))
    assert ids(limited) == [0, 1, 2, 3, 4]
    assert set(source.read_blocks) == {0, 1}
    assert limited.limit(100).count() == 5
    assert limited.limit(0).take_all() == []


def test_a_limit_on_computed_rows_computes_only_what_it_needs() -> None:
    source = tables(*[10] * 1000)
    limited = Dataset(Plan((Part(source),))).filter(even).limit(7)
    assert ids(limited) == [0, 2, 4, 6, 8, 10, 12]
    assert limited.plan.inspected().is_exact
    assert len(set(source.read_blocks)) < 500


def test_a_limit_on_shuffled_rows_takes_them_from_everywhere() -> None:
    limited = numbered(500, 500).random_shuffle(seed=3).limit(100)
    found = ids(limited)
    assert limited.count() == len(set(found)) == 100
    assert 30 <= sum(number < 500 for number in found) <= 70
    assert ids(limited) == found


def test_splits_have_every_row_once_and_nearly_equal_sizes() -> None:
    parts = numbered(5, 5, 1).split(3)
    assert [ids(part) for part in parts] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    assert [part.count() for part in numbered(5, 5, 1).split(3, equal=True)] == [3, 3, 3]
    assert [part.count() for part in numbered(2).split(4)] == [0, 1, 0, 1]


def test_splits_at_row_numbers_and_by_proportions() -> None:
    dataset = numbered(4, 6)
    assert [ids(part) for part in dataset.split_at_indices([2, 5])] == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]]
    assert [part.count() for part in dataset.split_proportionately([0.2, 0.5])] == [2, 5, 3]
    for wrong in ([], [3, 2], [-1]):
        with pytest.raises(DataError, match="indices"):
            dataset.split_at_indices(wrong)
    for wrong_proportions in ([], [0.5, 0.5], [-0.1]):
        with pytest.raises(DataError, match="proportions"):
            dataset.split_proportionately(wrong_proportions)


def test_a_split_of_computed_or_shuffled_rows_is_exact() -> None:
    one, two = numbered(6, 6).filter(even).split(2)
    assert (ids(one), ids(two)) == ([0, 2, 4], [6, 8, 10])
    pieces = numbered(20, 20).random_shuffle(seed=1).split(4)
    assert all(piece.plan.shuffled and piece.plan.seed == 1 for piece in pieces)
    parts = [ids(piece) for piece in pieces]
    assert sorted(number for part in parts for number in part) == list(range(40))
    assert parts[0] != list(range(10))


def test_the_test_is_the_end_of_the_rows() -> None:
    train, test = numbered(5, 3).train_test_split(0.25)
    assert (ids(train), ids(test)) == ([0, 1, 2, 3, 4, 5], [6, 7])
    train, test = numbered(5, 3).train_test_split(3)
    assert (train.count(), ids(test)) == (5, [5, 6, 7])


@few_examples
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 5))
def test_a_shuffled_split_parts_the_rows_exactly(counts: list[int], size: int, seed: int) -> None:
    rows = sum(counts)
    if not 0 < size < rows:
        with pytest.raises(DataError, match="nothing"):
            numbered(*counts).train_test_split(size, shuffle=True, seed=seed)
        return
    train, test = numbered(*counts).train_test_split(size, shuffle=True, seed=seed)
    assert test.count() == size
    assert sorted(ids(train) + ids(test)) == list(range(rows))


def test_a_shuffled_split_takes_the_test_from_everywhere_and_shuffles_both() -> None:
    train, test = numbered(500, 500).train_test_split(0.2, shuffle=True, seed=7)
    assert test.count() == 200
    assert 80 <= sum(number < 500 for number in ids(test)) <= 120
    assert ids(train) != sorted(ids(train))
    assert train.plan.shuffled
    union = numbered(500).union(numbered(500)).random_shuffle(seed=1).train_test_split(3)
    assert [part.count() for part in union] == [997, 3]


@pytest.mark.parametrize("size", [0, 8, 0.0, 1.0, 1.5, -1, "half", True])
def test_a_size_that_leaves_nothing_is_refused(size: Any) -> None:
    with pytest.raises(DataError, match="test_size"):
        numbered(8).train_test_split(size)


def test_a_repartition_within_blocks_reads_nothing() -> None:
    source = tables(4, 4)
    cut = Dataset(Plan((Part(source),))).repartition(4)
    assert [block.rows for block in cut.plan.inspected().blocks] == [2, 2, 2, 2]
    assert source.read_blocks == []
    assert ids(cut) == list(range(8))


def test_a_repartition_across_blocks_keeps_rows_and_order() -> None:
    joined = numbered(3, 3, 4).repartition(2)
    assert [block.rows for block in joined.plan.inspected().blocks] == [5, 5]
    assert ids(joined) == list(range(10))
    by_size = numbered(3, 3, 4).repartition(target_num_rows_per_block=4)
    assert [block.rows for block in by_size.plan.inspected().blocks] == [4, 4, 2]
    assert numbered(3).repartition(5).count() == 3
    shuffled = numbered(30, 30).repartition(4, shuffle=True)
    assert sorted(ids(shuffled)) == list(range(60))
    assert ids(shuffled) != list(range(60))
    with pytest.raises(DataError, match="one of num_blocks"):
        numbered(3).repartition()


# --------------------------------------------------------------------------- materialize


def test_materialized_rows_are_computed_once_and_counted_exactly() -> None:
    calls: list[int] = []

    def seen(row: dict[str, Any]) -> bool:
        calls.append(row["id"])
        return even(row)

    kept = numbered(5, 5).filter(seen).materialize()
    assert sorted(calls) == list(range(10))
    assert kept.count() == 5
    assert kept.plan.inspected().is_exact
    assert ids(kept) == ids(kept) == [0, 2, 4, 6, 8]
    assert len(calls) == 10


def test_a_shuffled_dataset_is_shuffled_once_when_materialized() -> None:
    kept = numbered(50).random_shuffle(seed=1).materialize()
    assert not kept.plan.shuffled
    assert ids(kept) == ids(numbered(50).random_shuffle(seed=1))


def test_files_of_materialized_rows_go_with_the_last_dataset_that_needs_them() -> None:
    kept = numbered(5).map(lambda row: row).materialize()
    directory = Path(kept.plan.parts[0].source._directory)  # type: ignore[attr-defined]
    assert len(list(directory.glob("*.arrow"))) == 1
    part = kept.limit(2)
    del kept
    gc.collect()
    assert ids(part) == [0, 1]
    copy = pickle.loads(cloudpickle.dumps(part))
    assert ids(copy) == [0, 1]
    del part
    gc.collect()
    assert not directory.exists()
    with pytest.raises(DataError, match="are not there"):
        ids(copy)


def test_a_forked_child_does_not_take_the_files_away() -> None:
    kept = numbered(5).map(lambda row: row).materialize()
    child = os.fork()
    if child == 0:
        del kept
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert ids(kept) == [0, 1, 2, 3, 4]


def test_equal_rows_have_equal_fingerprints_and_others_do_not() -> None:
    one, again, other = (
        numbered(count).map(lambda row: row).materialize().plan.inspected().fingerprint for count in (5, 5, 6)
    )
    assert one == again != other


@pytest.mark.parametrize(("block_bytes", "blocks"), [(1, 2), (2**20, 1)])
def test_types_that_change_on_the_way_are_widened_when_materialized(
    block_bytes: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.data.output.materialized.BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("powertrain.data.output.tables._MOST_BATCH_ROWS", 2)

    def changing(batch: dict[str, Any]) -> dict[str, Any]:
        first = int(batch["id"][0])
        if first == 0:
            return {"x": np.array([1, 2]), "tokens": np.zeros((2, 3), np.int64), "maybe": [None, None]}
        return {"x": np.array([0.5, 1.5]), "tokens": [[7], [8, 9]], "maybe": ["a", None]}

    kept = numbered(2, 2).map_batches(changing, batch_size=2).materialize()
    assert kept.num_blocks() == blocks
    rows = kept.take_all()
    assert [row["x"] for row in rows] == [1.0, 2.0, 0.5, 1.5]
    assert [list(row["tokens"]) for row in rows] == [[0, 0, 0], [0, 0, 0], [7], [8, 9]]
    assert [row["maybe"] for row in rows] == [None, None, "a", None]
    assert str(kept.schema().field("x").type) == "double"


def test_types_without_a_common_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.data.output.materialized.BLOCK_BYTES", 1)
    monkeypatch.setattr("powertrain.data.output.tables._MOST_BATCH_ROWS", 2)

    def changing(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": ["text"] * 2 if batch["id"][0] else np.array([1, 2])}

    with pytest.raises(DataError, match="'x' has the type"):
        numbered(2, 2).map_batches(changing, batch_size=2).materialize()


def test_materializing_nothing_keeps_the_columns() -> None:
    kept = numbered(5).filter(lambda row: False).materialize()
    assert kept.count() == 0
    assert kept.columns() == ["id", "half"]
    assert kept.take_all() == []


# --------------------------------------------------------------------------- facts and rows


def test_an_exact_count_reads_nothing() -> None:
    source = tables(3, 4)
    dataset = Dataset(Plan((Part(source),)))
    assert dataset.map(lambda row: {"x": 1 / 0}).count() == 7
    assert source.read_blocks == []
    assert dataset.filter(even).count() == 4
    assert dataset.flat_map(lambda row: [row, row]).count() == 14
    assert dataset.map_batches(doubled).count() == 14
    assert dataset.filter(lambda row: False).count() == 0


def test_a_function_that_keeps_the_number_of_rows_need_not_be_run_to_count() -> None:
    def failing(batch: Any) -> Any:
        raise AssertionError("it need not be run")

    assert numbered(3, 4).map_batches(failing, udf_modifying_row_count=False).count() == 7


def test_the_schema_is_that_of_the_result() -> None:
    dataset = numbered(3)
    fields: list[tuple[str, pa.DataType]] = [("id", pa.int64()), ("half", pa.float64())]
    assert dataset.schema() == pa.schema(fields)
    made = dataset.map(
        lambda row: {"text": str(row["id"]), "tokens": [1, 2], "image": np.zeros((2, 3), np.uint8)}
    )
    assert made.columns() == ["text", "tokens", "image"]
    assert made.schema().field("tokens").type == pa.list_(pa.int64())
    assert made.schema().field("image").type == pa.fixed_shape_tensor(pa.uint8(), (2, 3))


def test_the_schema_runs_functions_on_few_rows() -> None:
    calls: list[int] = []

    def seen(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        return row

    numbered(1000).map(seen).schema()
    assert calls == [0]


def test_take_runs_functions_on_no_more_rows_than_it_takes() -> None:
    calls: list[int] = []

    def seen(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        return row

    assert [row["id"] for row in numbered(1000).map(seen).take(5)] == [0, 1, 2, 3, 4]
    assert sorted(calls) == [0, 1, 2, 3, 4]


def test_blocks_and_bytes() -> None:
    dataset = numbered(10, 10)
    assert dataset.num_blocks() == 2
    assert dataset.size_bytes() == 20 * 16
    assert dataset.limit(5).size_bytes() == 5 * 16


def test_taking_rows() -> None:
    dataset = numbered(3, 3)
    assert dataset.take(2) == [{"id": 0, "half": 0.0}, {"id": 1, "half": 0.5}]
    assert len(dataset.take()) == len(dataset.take_all()) == len(dataset.take_all(limit=6)) == 6
    assert dataset.filter(even).take(2)[1]["id"] == 2
    with pytest.raises(DataError, match="more than limit=5"):
        dataset.take_all(limit=5)
    with pytest.raises(DataError, match="limit=-1"):
        dataset.take(-1)


def test_taking_a_batch() -> None:
    import pandas as pd

    dataset = numbered(3, 3)
    assert dataset.take_batch(4)["id"].tolist() == [0, 1, 2, 3]
    assert isinstance(dataset.take_batch(2, batch_format="pandas"), pd.DataFrame)
    assert dataset.take_batch(2, batch_format="pyarrow").num_rows == 2
    assert dataset.filter(even).take_batch(3)["id"].tolist() == [0, 2, 4]
    with pytest.raises(DataError, match="no rows"):
        dataset.limit(0).take_batch()


def test_taking_of_a_shuffled_dataset_gives_its_first_rows() -> None:
    dataset = numbered(3000, 3000).random_shuffle(seed=5)
    assert [row["id"] for row in dataset.take(7)] == ids(dataset)[:7]


def test_showing_prints_a_row_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    numbered(3).show(2)
    assert capsys.readouterr().out.splitlines() == ["{'id': 0, 'half': 0.0}", "{'id': 1, 'half': 0.5}"]


def test_all_rows_as_a_data_frame() -> None:
    frame = numbered(2, 2).to_pandas()
    assert frame["half"].tolist() == [0.0, 0.5, 1.0, 1.5]
    with pytest.raises(DataError, match="more than limit=3"):
        numbered(2, 2).to_pandas(limit=3)
    assert list(numbered(2).limit(0).to_pandas().columns) == ["id", "half"]


def test_batches_of_numpy_and_tensors() -> None:
    import torch

    dataset = numbered(3, 4)
    found = [batch["id"].tolist() for batch in dataset.iter_batches(batch_size=3)]
    assert found == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(list(dataset.iter_batches(batch_size=3, drop_last=True))) == 2
    tensors = list(dataset.iter_torch_batches(batch_size=7, dtypes={"half": torch.float16}))
    assert tensors[0]["id"].tolist() == list(range(7))
    assert tensors[0]["half"].dtype == torch.float16


def test_each_iteration_over_batches_is_a_new_epoch() -> None:
    batches = numbered(50, 50).random_shuffle(seed=1).iter_batches(batch_size=100)
    first, second = ([row for batch in batches for row in batch["id"].tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


def test_leaving_an_iteration_early_leaves_nothing_behind() -> None:
    for row in numbered(1000, 1000).map(lambda row: row).iter_rows():
        assert row["id"] == 0
        break
    gc.collect()


def test_stats_describe_the_newest_reading() -> None:
    dataset = numbered(3, 4).map(even_kept := lambda row: row)
    assert "has not been read" in dataset.stats()
    dataset.take_all()
    text = dataset.stats()
    assert "7 rows" in text
    assert "blocks: 2" in text
    assert "map(lambda" in text
    assert even_kept is not None


# --------------------------------------------------------------------------- errors


def test_a_function_that_raises_is_named_with_its_row_and_line() -> None:
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 // (row["id"] - 4)}

    with pytest.raises(DataError, match="ZeroDivisionError") as error:
        numbered(3, 3).map(broken).take_all()
    assert "map(broken)" in str(error.value)
    assert "table 1, row 1" in str(error.value)
    assert 'return {"x": 1 // (row["id"] - 4)}' in str(error.value)
