"""Results of operations on all rows: computed when needed, once, and read like any other data."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.test_mixing import committed_rows
from tests.data.test_shard import shards
from tests.support.examples import scaled

from powertrain import data
from powertrain.config.data import DataConfig
from powertrain.data.aggregate import AggregateFn, Mean, Sum
from powertrain.data.loading.scratch import scratch_root
from powertrain.data.plan.prepare import prepare
from powertrain.data.whole import blocks
from powertrain.data.whole.blocks import changes, cut_at_changes, cut_evenly
from powertrain.errors import DataError


def numbered(count: int) -> data.Dataset:
    generator = np.random.default_rng(count)
    keys = generator.integers(0, max(count // 3, 1), count)
    return data.from_numpy({"id": generator.permutation(count), "k": keys})


def sorted_rows(count: int) -> data.Dataset:
    return numbered(count).sort("k")


def groups(count: int) -> data.Dataset:
    return numbered(count).rename_columns({"id": "n", "k": "id"}).groupby("id").sum("n")


def joined(count: int) -> data.Dataset:
    right = numbered(count + 2).drop_columns(["k"]).map(lambda row: {**row, "square": row["id"] ** 2})
    return numbered(count).join(right, "left_outer", on="id")


def mapped_groups(count: int) -> data.Dataset:
    return numbered(count).groupby("k").map_groups(lambda rows: {"id": rows["id"][:2]})


MADE = {"sort": sorted_rows, "groupby": groups, "join": joined, "map_groups": mapped_groups}


@pytest.mark.smoke
@settings(deadline=None, max_examples=scaled(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(MADE)), count=st.integers(1, 60), shuffled=st.booleans(), chances=st.data()
)
def test_each_row_of_a_result_comes_once_per_epoch_over_any_restarts(
    tmp_path: Path, name: str, count: int, shuffled: bool, chances: st.DataObject
) -> None:
    dataset = MADE[name](count)
    everything = sorted(row["id"] for row in dataset.take_all())
    # Made anew for the run, as by a program that is started again.
    plan = MADE[name](count).plan
    if shuffled:
        plan = data.Dataset(plan).random_shuffle(seed=7).plan
    found = committed_rows(plan, tmp_path, chances)
    total = len(everything)
    assert sorted(found[:total]) == everything
    assert sorted(found[total:]) == everything


@pytest.mark.parametrize("name", sorted(MADE))
def test_a_result_has_one_order_and_a_small_position_at_any_world_size(name: str, tmp_path: Path) -> None:
    in_order = [row["id"] for row in MADE[name](40).take_all()]
    assert [row["id"] for row in MADE[name](40).take_all()] == in_order
    for world in (1, 3):
        with shards(MADE[name](40).plan, world, tmp_path) as ranks:
            steps = zip(*(iter(rank.iter_batches(global_batch_size=6)) for rank in ranks), strict=True)
            rows = [int(row) for step in steps for batch in step for row in batch["id"]]
            assert sorted(rows) == sorted(in_order)
            if world == 1:
                assert rows == in_order
            assert len(json.dumps(ranks[0].state_dict())) <= 400


def test_nothing_is_computed_before_it_is_needed_and_then_once() -> None:
    calls: list[int] = []

    def seen(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        return row

    made = data.range(5).map(seen).sort("id", descending=True)
    more = made.filter("id > 1").groupby("id").count()
    assert calls == []
    assert [row["id"] for row in more.take_all()] == [2, 3, 4]
    assert more.count() == 3
    assert [row["id"] for row in made.take_all()] == [4, 3, 2, 1, 0]
    assert sorted(calls) == [0, 1, 2, 3, 4]


def test_a_run_computes_a_result_once_and_links_it_for_its_ranks(tmp_path: Path) -> None:
    calls: list[int] = []

    def seen(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        return row

    made = data.range(50).map(seen).sort("id", descending=True)
    prepared = prepare({"train": made}, DataConfig(), 1, str(tmp_path / "rows"))["train"]
    assert len(calls) == 50
    files = sorted(path for path in (tmp_path / "rows").rglob("*") if path.is_file())
    assert [path.suffix for path in files] == [".arrow"]
    travelling = cloudpickle.dumps(prepared)
    del made, prepared
    assert b"seen" not in travelling, "ranks need neither the function nor the inputs"
    # The files of the process that computed it are gone now; its ranks read those of the run.
    read = cloudpickle.loads(travelling).inspected.plan
    assert [row["id"] for row in data.Dataset(read).take_all()] == list(range(49, -1, -1))
    again = data.range(50).map(seen).sort("id", descending=True)
    prepare({"train": again}, DataConfig(), 1, str(tmp_path / "rows"))
    assert sorted(path for path in (tmp_path / "rows").rglob("*") if path.is_file()) == files


def test_the_files_of_a_result_travel_to_other_machines(tmp_path: Path) -> None:
    """By the way that the Ray engine takes: an archive of the run's rows, unpacked at the same path."""
    from powertrain.engine.ray.node.files import pack, unpack_at

    rows = tmp_path / "rows"
    made = data.range(30).sort("id", descending=True).random_shuffle(seed=2)
    prepared = prepare({"train": made}, DataConfig(), 1, str(rows))["train"]
    archive, travelling = pack(str(rows)), cloudpickle.dumps(prepared)
    del made, prepared
    shutil.rmtree(rows)
    unpack_at(rows, archive)
    read = cloudpickle.loads(travelling).inspected.plan
    assert sorted(row["id"] for row in data.Dataset(read).take_all()) == list(range(30))


def test_copies_of_a_result_are_computed_where_they_are_read_or_read_what_was_computed() -> None:
    before = pickle.loads(pickle.dumps(data.from_items([{"x": 2}, {"x": 1}]).sort("x")))
    assert [row["x"] for row in before.take_all()] == [1, 2]
    made = data.from_items([{"x": 2}, {"x": 1}]).sort("x")
    made.count()
    after = pickle.loads(pickle.dumps(made))
    assert [row["x"] for row in after.take_all()] == [1, 2]


def fingerprint(dataset: data.Dataset) -> str:
    return dataset.plan.inspected().fingerprint


def test_a_changed_aggregation_of_the_user_changes_the_fingerprint() -> None:
    def largest_and(bonus: int) -> data.Dataset:
        aggregation = AggregateFn(
            init=lambda key: 0,
            accumulate_row=lambda found, row: max(found, row["value"] + bonus),
            merge=max,
            name="largest",
        )
        rows = data.from_items([{"key": number % 3, "value": number} for number in range(30)])
        return rows.groupby("key").aggregate(aggregation, Sum("value"))

    assert fingerprint(largest_and(1)) == fingerprint(largest_and(1)) != fingerprint(largest_and(2))


def test_fingerprints_follow_from_the_rows_and_the_operation(tmp_path: Path) -> None:
    def read(values: list[float]) -> data.Dataset:
        return data.from_arrow(pa.table({"k": [1, 1, 2], "x": values}))

    rows = read([0.1, 0.2, 0.3])
    made: list[Callable[[data.Dataset], data.Dataset]] = [
        lambda dataset: dataset.sort("x"),
        lambda dataset: dataset.sort("x", descending=True),
        lambda dataset: dataset.sort("k"),
        lambda dataset: dataset.groupby("k").mean("x"),
        lambda dataset: dataset.groupby("k").std("x"),
        lambda dataset: dataset.groupby("k").std("x", ddof=0),
        lambda dataset: dataset.groupby("k").aggregate(Mean("x"), Sum("x")),
        lambda dataset: dataset.join(dataset, "inner", on="k", right_suffix="_"),
        lambda dataset: dataset.join(dataset, "left_semi", on="k"),
        lambda dataset: dataset.repartition(2, keys=["k"]),
    ]
    found = [fingerprint(each(rows)) for each in made]
    assert len(set(found)) == len(made)
    assert [fingerprint(each(read([0.1, 0.2, 0.3]))) for each in made] == found
    others = [fingerprint(each(read([0.1, 0.2, 0.4]))) for each in made]
    assert not set(others) & set(found)


def test_another_function_before_or_in_an_operation_is_another_result() -> None:
    def mapped(sign: int) -> data.Dataset:
        return data.range(10).map(lambda row: {"id": row["id"], "key": sign * row["id"]})

    def first(place: int) -> data.Dataset:
        return mapped(1).groupby("id").map_groups(lambda rows: {"x": rows["key"][:1] + place})

    assert fingerprint(mapped(1).sort("key")) == fingerprint(mapped(1).sort("key"))
    assert fingerprint(mapped(1).sort("key")) != fingerprint(mapped(-1).sort("key"))
    assert fingerprint(first(0)) == fingerprint(first(0))
    assert fingerprint(first(0)) != fingerprint(first(1))


def own_scratch() -> set[str]:
    """The scratch directories of this process: those of other test processes come and go."""
    return {path.name for path in scratch_root().glob(f"{os.getpid()}-*")}


def test_nothing_is_left_of_what_was_spilled_or_failed() -> None:
    before = own_scratch()
    made = data.range(1000).sort("id", descending=True)
    made.count()
    assert len(own_scratch() - before) == 1, "the result, until the dataset is gone"
    with pytest.raises(DataError):
        data.range(10).map(lambda row: {"x": 1 / (row["id"] - 5)}).sort("x").count()
    with pytest.raises(DataError):
        data.range(10).groupby("nothing").count().count()
    del made
    gc.collect()
    assert own_scratch() <= before


def test_an_error_while_rows_are_read_is_raised_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"x": range(1000)}).to_parquet(path)
    dataset = data.read_parquet(str(path)).sort("x")
    dataset.plan.parts[0].source._inners[0].inspect()  # type: ignore[attr-defined]
    path.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        dataset.count()


def test_the_missing_package_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "duckdb", None)
        with pytest.raises(DataError, match=r"sort\(\) needs DuckDB.*pip install 'powertrain\[duckdb\]'"):
            data.range(3).sort("id").count()


def test_too_little_memory_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    script = """
import duckdb, powertrain.data as data
from powertrain.data.whole import database
from powertrain.errors import DataError
database._BYTES_OF_A_THREAD = 2**20
data.DataContext.get_current().execution_options.resource_limits.object_store_memory = 2**20
try:
    data.range(3_000_000).groupby("id").count().count()
except DataError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "needs more memory than it may use" in done.stdout
    assert "object_store_memory" in done.stdout


def test_a_process_killed_within_a_sort_leaves_nothing_once_another_computes() -> None:
    script = """
import os, signal
from powertrain import data

rows = 0

def ends_its_process(batch):
    global rows
    rows += len(batch["id"])
    if rows > 20000:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch

data.range(100000).map_batches(ends_its_process, batch_size=1000).sort("id").materialize()
"""
    killed = subprocess.Popen([sys.executable, "-c", script])
    assert killed.wait(60) == -signal.SIGKILL
    assert list(scratch_root().glob(f"{killed.pid}-*")), "its rows so far"
    assert data.range(10).sort("id", descending=True).take(1) == [{"id": 9}]
    assert not list(scratch_root().glob(f"{killed.pid}-*"))


def test_columns_whose_names_differ_in_capital_letters_or_look_like_sql_are_distinguished() -> None:
    rows = data.from_arrow(
        pa.table({"x": [1, 2, 2], "X": [30, 20, 10], 'a "b" --': ["p", "q", "r"], "c0": [7, 8, 9]})
    )
    assert [row["X"] for row in rows.sort(["x", "X"]).take_all()] == [30, 10, 20]
    assert rows.groupby("x").sum(["X", "c0"]).take_all() == [
        {"x": 1, "sum(X)": 30, "sum(c0)": 7},
        {"x": 2, "sum(X)": 30, "sum(c0)": 17},
    ]
    assert rows.groupby('a "b" --').count().take(1) == [{'a "b" --': "p", "count()": 1}]
    joined = rows.join(
        rows.rename_columns({"x": "Y", "c0": "C0"}), "inner", on="X", right_suffix="_r"
    ).take_all()
    assert [(row["x"], row["Y"], row["C0"]) for row in joined] == [(1, 1, 7), (2, 2, 8), (2, 2, 9)]


def test_a_filter_after_a_result_reads_the_files_of_the_run(tmp_path: Path) -> None:
    made = data.range(20).sort("id", descending=True).filter("id < 5").rename_columns({"id": "number"})
    prepared = prepare({"train": made}, DataConfig(), 1, str(tmp_path / "rows"))["train"]
    travelling = cloudpickle.dumps(prepared)
    del made, prepared
    read = cloudpickle.loads(travelling).inspected.plan
    assert [row["number"] for row in data.Dataset(read).take_all()] == [4, 3, 2, 1, 0]


# --------------------------------------------------------------------------- blocks


@settings(deadline=None, max_examples=scaled(30))
@given(cuts=st.lists(st.integers(0, 200), max_size=8), total=st.integers(0, 200), size=st.integers(1, 50))
def test_blocks_do_not_depend_on_how_the_rows_arrive(cuts: list[int], total: int, size: int) -> None:
    table = pa.table({"id": range(total), "text": [f"text {number}" for number in range(total)]})
    ends = [0, *sorted(min(cut, total) for cut in cuts), total]
    pieces = [table.slice(start, end - start) for start, end in itertools.pairwise(ends)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", size * 20)
        patch.setattr(blocks, "_SAMPLED_ROWS", 10)
        found = [block.num_rows for block in cut_evenly(pieces)]
        expected = [block.num_rows for block in cut_evenly([table])]
    assert found == expected
    assert sum(found) == total
    assert len(set(found[:-1])) <= 1


@settings(deadline=None, max_examples=scaled(30))
@given(
    values=st.lists(st.one_of(st.none(), st.just(float("nan")), st.sampled_from([1.0, 2.0])), max_size=40),
    cut=st.integers(0, 40),
    each=st.booleans(),
)
def test_blocks_end_where_keys_change(values: list[float | None], cut: int, each: bool) -> None:
    table = pa.table({"k": pa.array(values, pa.float64()), "row": pa.array(range(len(values)), pa.int64())})
    keys = [str(value) for value in values]
    starts = [number for number in range(1, len(keys)) if keys[number] != keys[number - 1]]
    assert changes(table, ["k"]).tolist() == starts
    pieces = [table.slice(0, cut), table.slice(cut)]
    found = [block["row"].to_pylist() for block in cut_at_changes(pieces, ["k"], each=each)]
    assert [row for block in found for row in block] == list(range(len(values)))
    firsts = [block[0] for block in found[1:]]
    assert set(firsts) <= set(starts)
    if each:
        assert firsts == starts
