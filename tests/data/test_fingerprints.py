"""The fingerprint of Parquet files: it sees rows in another order, and older positions stay valid."""

from __future__ import annotations

import base64
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from tests.data.test_shard import MEMORY

from powertrain import DataConfig, data
from powertrain.data.plan.prepare import prepare
from powertrain.data.plan.prepared import Prepared
from powertrain.data.shard import DataShard
from powertrain.data.sources import content_sample
from powertrain.data.sources.content_sample import sample_ranges
from powertrain.errors import DataChangedError


def write(directory: Path, ids: Any, name: str = "0.parquet", **options: Any) -> str:
    directory.mkdir(exist_ok=True)
    table = pa.table({"id": pa.array(np.asarray(ids, np.int64))})
    options = {"compression": "NONE", "use_dictionary": False, "row_group_size": 10_000, **options}
    pq.write_table(table, directory / name, **options)
    return str(directory)


def of(paths: str) -> str:
    return data.read_parquet(paths).plan.inspected().fingerprint


def reordered(ids: Any) -> Any:
    """The same rows with the same smallest and largest in each row group."""
    shuffled = np.array(ids)
    for start in range(0, len(shuffled), 10_000):
        group = shuffled[start : start + 10_000]
        group[1:-1] = np.random.default_rng(1).permutation(group[1:-1])
    return shuffled


@pytest.mark.parametrize("whole_bytes", [16 << 20, 0])
def test_rows_in_another_order_in_an_uncompressed_file_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    """Whether the data is hashed whole or by windows."""
    monkeypatch.setattr(content_sample, "_WHOLE_BYTES", whole_bytes)
    ids = np.arange(200_000)
    one = write(tmp_path / "one", ids)
    other = write(tmp_path / "other", reordered(ids))
    assert (tmp_path / "one/0.parquet").stat().st_size == (tmp_path / "other/0.parquet").stat().st_size
    facts = [data.read_parquet(path).plan.parts[0].source.inspect() for path in (one, other)]
    assert facts[0].earlier == facts[1].earlier, "the footers are the same"
    assert of(one) != of(other)


def test_rows_in_another_order_are_seen_in_more_files_than_there_are_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_sample, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(content_sample, "_WINDOWS", 3)
    ids = np.arange(30_000)
    shuffled_early = np.concatenate([reordered(ids[:20_000]), ids[20_000:]])
    for place, last in (("one", ids), ("other", shuffled_early)):
        for number in range(4):
            write(tmp_path / place, last if number == 3 else ids, name=f"{number}.parquet")
    one, other = (str(tmp_path / place) for place in ("one", "other"))
    facts = [data.read_parquet(path).plan.parts[0].source.inspect() for path in (one, other)]
    assert facts[0].earlier == facts[1].earlier, "the footers are the same"
    assert of(one) != of(other)


def test_two_files_that_have_changed_places_are_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    ids = [np.concatenate([[0], rng.permutation(np.arange(1, 999)), [999]]) for _ in range(2)]
    for place, order in (("one", (0, 1)), ("other", (1, 0))):
        (tmp_path / place).mkdir()
        for number, which in enumerate(order):
            path = tmp_path / place / f"{number}.parquet"
            table = pa.table({"id": pa.array(ids[which])})
            pq.write_table(table, path, compression="none", use_dictionary=False)
    assert of(str(tmp_path / "one")) != of(str(tmp_path / "other"))


def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    one = write(tmp_path / "one", range(1000))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert of(one) == of(str(tmp_path / "copy"))


def test_windows_lie_all_over_large_files_and_are_few() -> None:
    large = 10**10
    [ranges] = sample_ranges([large])
    assert ranges[0][0] == 0
    assert ranges[-1][1] == large
    assert len(ranges) == 64
    assert sum(len(windows) for windows in sample_ranges([large] * 100)) <= 512
    for windows in sample_ranges([large] * 1000):
        assert windows == [((large - (64 << 10)) // 2, (large + (64 << 10)) // 2)]
    assert sample_ranges([50_000, 0] * 1000) == [[(0, 50_000)], []] * 1000
    assert sample_ranges([5, 0, 7]) == [[(0, 5)], [], [(0, 7)]]


# --------------------------------------------------------------------------- positions of older versions


PLANS = {
    "files": lambda whole: whole,
    "a filter": lambda whole: whole.filter(pc.field("id") >= 10),
    "columns": lambda whole: whole.select_columns(["id"]).rename_columns({"id": "number"}),
    "a piece": lambda whole: whole.split(3)[1],
    "a piece, filtered": lambda whole: whole.split(3)[1].filter("id >= 10"),
    "a sample": lambda whole: whole.train_test_split(0.5, shuffle=True, seed=3)[0],
    "two of them": lambda whole: whole.union(whole.limit(7)),
}
#: As the version before this one made them of :func:`numbered_files`.
FINGERPRINTS_BEFORE = {
    "files": "eea2854e133e533e82ebb1675e539c89",
    "a filter": "470f00492f47cf9c21fe3e9fc65b0376",
    "columns": "eea2854e133e533e82ebb1675e539c89",
    "a piece": "037285ae066733ccb4e59a07a3fb35e9",
    "a piece, filtered": "18ca127a485281d2bf6636a1456a29b4",
    "a sample": "6a19e78262244e23fa8c71ec8159b2c5",
    "two of them": "eb9bbb5ec59d6d262a3369c99264ef24",
}


#: A file of 40 rows in row groups of 9, as one version of Arrow wrote it: its footer names that version.
NUMBERED = (
    "c-"
    "n>2%SyyB6b9hai!t7{n%HR7dTCYY433~HH!g))6xVLbSa3j{n(^`?vvlFpxSR)=r!mEU6opPh$`_LJbD(X~%j=dP@ot%!2+u5;U;"
    "z=?=J71T7%yz-Ko?Fy2B#s16I#rmWERfBdAI-"
    "<;SyYiEA=frl&r$FpUC%+a2@(k!HxPBn<xq37TktAFoe5s5AOfAXp43t_}>QHIzT}LV|X|Yx+*y%pY=O;`9mgbvk}?8-"
    "MuB5sv8x=6qu5Tkt#O@Nl$)SX2$#~5M^7NE{>UsseD=Gkr#6VO-K%{%IMIl$qt;#?7*qXj@-"
    ")Z$gRk7silrT*uP}?f0`3+PNb%zu*me&Oa9#G6h$M`y7v~o=DOeQJ%*>}&68$J1?3mHH`gIG7v~EN=1P_"
)


def numbered_files(directory: Path) -> str:
    directory.mkdir()
    (directory / "0.parquet").write_bytes(zlib.decompress(base64.b85decode(NUMBERED)))
    return str(directory)


def prepared(dataset: Any, directory: Path) -> Prepared:
    return prepare({"train": dataset}, DataConfig(), 0, str(directory / "rows"))["train"]


def shard_of(ready: Prepared, directory: Path, state: Any) -> DataShard:
    return DataShard(
        ready,
        cache_directory=str(directory / "cache"),
        disk_bytes=MEMORY,
        memory_bytes=MEMORY,
        resume=lambda: state,
    )


@pytest.mark.parametrize("plan", PLANS)
def test_a_position_of_an_older_version_goes_on_in_unchanged_data(tmp_path: Path, plan: str) -> None:
    ready = prepared(PLANS[plan](data.read_parquet(numbered_files(tmp_path / "files"))), tmp_path)
    assert ready.earlier_fingerprint == FINGERPRINTS_BEFORE[plan] != ready.fingerprint
    shard = shard_of(ready, tmp_path, None)
    iterator = iter(shard.iter_batches(batch_size=5))
    next(iterator), next(iterator)
    state = {**shard.state_dict(), "fingerprint": FINGERPRINTS_BEFORE[plan]}
    shard.close()
    resumed = shard_of(ready, tmp_path, state)
    rows = sum(len(next(iter(batch.values()))) for batch in resumed.iter_batches(batch_size=5))
    assert rows == ready.rows - 10
    assert resumed.state_dict()["fingerprint"] == ready.fingerprint
    resumed.close()


def test_a_position_of_this_version_is_refused_where_rows_have_changed_places(tmp_path: Path) -> None:
    ids = np.arange(50_000)
    ready = prepared(data.read_parquet(write(tmp_path / "files", ids)), tmp_path)
    shard = shard_of(ready, tmp_path, None)
    state = shard.state_dict()
    shard.close()
    now = prepared(data.read_parquet(write(tmp_path / "files", reordered(ids))), tmp_path)
    other = shard_of(now, tmp_path, state)
    with pytest.raises(DataChangedError, match="not the same ones"):
        iter(other.iter_batches())
    other.close()
