"""Decoded blocks: once per node, within budgets of disk and memory, whatever happens to processes and files."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.block_reader import CountingSource, Reading, as_arguments, matches, wait_until

from powertrain.data import from_torch, read_parquet
from powertrain.data.loading.cache import BlockStore, sweep
from powertrain.data.loading.cache_files import KeptFile, eviction_order
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.errors import DataError

ROOT = Path(__file__).parents[2]
BLOCK = 64 * 1024


@pytest.fixture
def source(tmp_path: Path) -> CountingSource:
    return CountingSource(str(tmp_path / "reads"), blocks=100)


@contextmanager
def opened(source: Source, directory: Path, **options: Any) -> Iterator[BlockStore]:
    settings: dict[str, Any] = {"disk_bytes": 1 << 30, "memory_bytes": 1 << 26, "threads": 1}
    store = BlockStore([source], [None], directory=str(directory / "cache"), **(settings | options))
    try:
        yield store
    finally:
        store.close()


def files_in(directory: Path, suffix: str = ".arrow") -> list[Path]:
    return sorted((directory / "cache").glob(f"*{suffix}"))


def allow_writing(path: Path) -> None:
    """As the cache's own files are while they are in use."""
    path.chmod(0o600)


# --------------------------------------------------------------------------- one process


def test_a_block_is_decoded_once_and_then_read_from_its_file(source: CountingSource, tmp_path: Path) -> None:
    with opened(source, tmp_path) as first:
        assert matches(first.open(0, 3), source.values(3))
        first.release(0, 3)
        assert matches(first.open(0, 3), source.values(3))
        assert (dict(first.counters.decoded), first.counters.hits) == ({(0, 3): 1}, 1)
        assert first.counters.bytes == BLOCK
    with opened(source, tmp_path) as second:
        assert matches(second.open(0, 3), source.values(3))
        assert (dict(second.counters.decoded), second.counters.hits) == ({}, 1)
    assert source.reads() == [3]
    assert len(files_in(tmp_path)) == 1
    assert not files_in(tmp_path, ".part")


def test_batches_of_an_open_block_outlive_release_eviction_sweep_and_close(
    source: CountingSource, tmp_path: Path
) -> None:
    with opened(source, tmp_path) as store:
        batches = store.open(0, 1)
        store.release(0, 1)
        sweep(str(tmp_path / "cache"))
        assert matches(batches, source.values(1))
        assert matches(store.open(0, 2), source.values(2))  # the directory is made again
    assert matches(batches, source.values(1))


def test_a_block_of_many_batches_keeps_their_order(tmp_path: Path) -> None:
    source = CountingSource(str(tmp_path / "reads"), batches=8)
    with opened(source, tmp_path) as store:
        batches = store.open(0, 0)
        assert len(batches) == 8
        assert matches(batches, source.values(0))


def test_columns_and_data_have_files_of_their_own(tmp_path: Path) -> None:
    table = pa.table({"a": range(10), "b": range(10, 20)})
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=5)
    source = ParquetFile(str(tmp_path / "f.parquet"))
    store = BlockStore(
        [source, source, source],
        [None, ["b"], ["b", "a"]],
        directory=str(tmp_path / "cache"),
        disk_bytes=1 << 20,
        memory_bytes=1 << 20,
        threads=1,
    )
    assert [store.open(part, 1)[0].schema.names for part in range(3)] == [["a", "b"], ["b"], ["b", "a"]]
    assert store.open(1, 1)[0].to_pydict() == {"b": [15, 16, 17, 18, 19]}
    store.close()
    assert len(files_in(tmp_path)) == 3


class ParquetFile(Source):
    """Row groups of one file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def inspect(self) -> SourceFacts:
        footer = pq.read_metadata(self.path)
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        facts = tuple(BlockFacts(group.num_rows, group.total_byte_size) for group in groups)
        return SourceFacts(facts, pq.read_schema(self.path), "parquet")

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        table = pq.ParquetFile(self.path).read_row_group(
            block, list(columns) if columns else None, use_threads=False
        )
        yield from (table.select(columns) if columns else table).combine_chunks().to_batches()

    def name_row(self, block: int, row: int) -> str:
        return f"{self.path}, row group {block}, row {row}"


class GivenBatches(Source):
    """One block of these batches."""

    def __init__(self, *batches: pa.RecordBatch, rows: int | None = None) -> None:
        self.batches = batches
        self.rows = sum(batch.num_rows for batch in batches) if rows is None else rows
        self.reads = 0

    def inspect(self) -> SourceFacts:
        schema = self.batches[0].schema if self.batches else pa.schema({})
        return SourceFacts((BlockFacts(self.rows, 1),), schema, "given")

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        self.reads += 1
        yield from self.batches

    def name_row(self, block: int, row: int) -> str:
        return f"given row {row}"


class Counting:
    """A map-style dataset as torch has them, of the numbers from ``first`` on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 300

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"number": self.first + number}


def test_two_datasets_of_one_class_and_length_have_files_of_their_own() -> None:
    both = from_torch(Counting(0)).union(from_torch(Counting(1000))).random_shuffle(seed=1)
    numbers = [number for batch in both.iter_batches() for number in batch["number"].tolist()]
    assert sorted(numbers) == [*range(300), *range(1000, 1300)]


def test_copies_of_data_have_files_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"n": [1, 2]}), tmp_path / name / "f.parquet")
    parts = [read_parquet(str(tmp_path / name), include_paths=True) for name in ("a", "b")]
    both = parts[0].union(parts[1]).random_shuffle(seed=1)
    paths = {path for batch in both.iter_batches() for path in batch["path"].tolist()}
    assert paths == {str(tmp_path / name / "f.parquet") for name in ("a", "b")}


def test_batches_with_different_dictionaries_come_back_as_they_were(tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"k": pa.array(keys).dictionary_encode()}) for keys in (["a", "b"], ["c", "b"])
    ]
    for _ in range(2):
        with opened(GivenBatches(*batches), tmp_path) as store:
            assert [batch.to_pydict() for batch in store.open(0, 0)] == [{"k": ["a", "b"]}, {"k": ["c", "b"]}]


def test_a_block_without_rows_is_opened_and_leaves_no_file(tmp_path: Path) -> None:
    with opened(GivenBatches(), tmp_path) as store:
        assert store.open(0, 0) == ()
    assert not files_in(tmp_path)


def test_a_block_with_another_number_of_rows_than_was_inspected_is_refused(tmp_path: Path) -> None:
    source = GivenBatches(pa.record_batch({"a": [1, 2, 3]}), rows=5)
    with opened(source, tmp_path) as store, pytest.raises(DataError, match=r"3 rows .*given row 0.* 5 when"):
        store.open(0, 0)
    assert not files_in(tmp_path)
    assert not files_in(tmp_path, ".part")


@pytest.mark.parametrize("harm", ["cut", "emptied", "end lost", "other rows"])
def test_a_broken_file_is_decoded_anew(source: CountingSource, tmp_path: Path, harm: str) -> None:
    with opened(source, tmp_path) as store:
        store.open(0, 0)
        store.open(0, 1)
    file, other = files_in(tmp_path)
    allow_writing(file)
    size = file.stat().st_size
    if harm == "other rows":
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, pa.schema({"x": pa.int8()})):
            pass
    else:
        os.truncate(file, {"cut": size - 100, "emptied": 0, "end lost": size - 4096}[harm])
        os.truncate(file, size if harm == "end lost" else file.stat().st_size)  # its end then reads as zeros
    with opened(source, tmp_path) as store:
        assert matches(store.open(0, 0), source.values(0))
        assert matches(store.open(0, 1), source.values(1))
    assert len(source.reads()) == 3
    assert other.exists()


# --------------------------------------------------------------------------- in memory


def test_without_disk_blocks_stay_in_memory_and_those_used_last_are_kept(
    source: CountingSource, tmp_path: Path
) -> None:
    with opened(source, tmp_path, disk_bytes=0, memory_bytes=3 * BLOCK) as store:
        for block in (0, 1, 2, 0, 3):  # 1 was used longest ago when 3 comes
            assert matches(store.open(0, block), source.values(block))
        assert source.reads() == [0, 1, 2, 3]
        for block in (0, 2, 3):
            store.open(0, block)
        assert source.reads() == [0, 1, 2, 3]
        store.open(0, 1)
        assert source.reads() == [0, 1, 2, 3, 1]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("disk_bytes", [0, 1 << 30])
def test_a_released_block_has_no_holder(source: CountingSource, tmp_path: Path, disk_bytes: int) -> None:
    with opened(source, tmp_path, disk_bytes=disk_bytes) as store:
        store.prefetch([(0, 1)])
        wait_until(lambda: store.counters.bytes)
        for block in (0, 1):
            batches = store.open(0, block)
            batch = weakref.ref(batches[0])
            del batches
            assert batch() is not None
            store.release(0, block)
            wait_until(lambda batch=batch: batch() is None)


@pytest.mark.parametrize("mark", ["in_memory", "cheap_to_decode"])
def test_what_is_cheap_to_decode_is_not_put_into_files(
    source: CountingSource, tmp_path: Path, mark: str
) -> None:
    setattr(source, mark, True)
    with opened(source, tmp_path) as store:
        assert matches(store.open(0, 0), source.values(0))
        store.open(0, 0)
    assert source.reads() == [0]
    assert not (tmp_path / "cache").exists()


# --------------------------------------------------------------------------- ahead


def bar(source: CountingSource) -> None:
    Path(source.barred_by).touch()


def unbar(source: CountingSource) -> None:
    Path(source.barred_by).unlink()


def test_blocks_are_decoded_ahead_nearest_first_and_later_wishes_replace_those_not_begun(
    source: CountingSource, tmp_path: Path
) -> None:
    with opened(source, tmp_path) as store:
        bar(source)
        store.prefetch([(0, 5), (0, 6), (0, 7)])
        wait_until(lambda: source.reads() == [5])
        store.prefetch([(0, 9), (0, 5), (0, 8)])
        unbar(source)
        wait_until(lambda: store.counters.bytes == 3 * BLOCK)
        for block in (5, 9, 8):
            assert matches(store.open(0, block), source.values(block))
    assert source.reads() == [5, 9, 8]


def test_a_block_that_waits_for_its_turn_is_decoded_by_the_rank_that_opens_it(
    source: CountingSource, tmp_path: Path
) -> None:
    with opened(source, tmp_path) as store:
        bar(source)
        store.prefetch([(0, 1), (0, 2)])
        wait_until(lambda: source.reads() == [1])
        got: list[Any] = []
        reader = threading.Thread(target=lambda: got.append(store.open(0, 2)))
        reader.start()
        wait_until(lambda: source.reads() == [1, 2])  # while the store's one thread is still at 1
        unbar(source)
        reader.join()
        assert matches(got[0], source.values(2))
        assert matches(store.open(0, 1), source.values(1))
    assert source.reads() == [1, 2]


def test_two_threads_that_open_one_block_decode_it_once(source: CountingSource, tmp_path: Path) -> None:
    with opened(source, tmp_path) as store:
        bar(source)
        got: list[Any] = []
        readers = [threading.Thread(target=lambda: got.append(store.open(0, 4))) for _ in range(3)]
        for reader in readers:
            reader.start()
        wait_until(lambda: source.reads() == [4])
        unbar(source)
        for reader in readers:
            reader.join()
        assert all(matches(batches, source.values(4)) for batches in got)
    assert source.reads() == [4]


def test_no_thread_is_started_before_the_first_wish_and_none_is_left(
    source: CountingSource, tmp_path: Path
) -> None:
    before = threading.active_count()
    with opened(source, tmp_path, threads=3) as store:
        store.open(0, 0)
        assert threading.active_count() == before
        store.prefetch([(0, block) for block in range(1, 9)])
        assert threading.active_count() == before + 3
    assert threading.active_count() == before


def test_what_fails_ahead_is_raised_when_the_block_is_opened(tmp_path: Path) -> None:
    source = GivenBatches(pa.record_batch({"a": [1]}), rows=2)
    with opened(source, tmp_path) as store:
        store.prefetch([(0, 0)])
        wait_until(lambda: source.reads)
        with pytest.raises(DataError, match="has changed"):
            store.open(0, 0)
        source.batches *= 2
        assert len(store.open(0, 0)) == 2  # and it can be tried again


def test_blocks_decoded_ahead_in_memory_stop_at_half_of_it_and_are_not_pushed_out(
    source: CountingSource, tmp_path: Path
) -> None:
    wanted = [(0, block) for block in range(20)]
    with opened(source, tmp_path, disk_bytes=0, memory_bytes=4 * BLOCK) as store:
        store.prefetch(wanted)
        wait_until(lambda: store.counters.bytes == 3 * BLOCK)
        for number in range(20):
            assert matches(store.open(*wanted[number]), source.values(number))
            store.release(*wanted[number])
    assert sorted(source.reads()) == list(range(20))


def test_only_so_many_blocks_are_decoded_at_once_as_memory_allows_and_urgent_ones_come_first(
    source: CountingSource, tmp_path: Path
) -> None:
    room_for_one = 2 * 4 * BLOCK  # half of the memory, at 4 times the size of a block
    with opened(source, tmp_path, memory_bytes=room_for_one, threads=3) as store:
        bar(source)
        store.prefetch([(0, 0), (0, 1), (0, 2)])
        wait_until(lambda: len(source.reads()) == 1 and len(store._waiting) == 2)
        urgent = threading.Thread(target=lambda: store.open(0, 9))
        urgent.start()
        wait_until(lambda: (0, 9) in store._waiting)
        first = source.reads()
        assert len(first) == 1
        unbar(source)
        urgent.join()
        assert source.reads()[1] == 9
        wait_until(lambda: store.counters.bytes == 4 * BLOCK)
    assert sorted(source.reads()) == [0, 1, 2, 9]


@pytest.mark.parametrize(("room", "at_once"), [(1, 1), (2, 2), (3, 3), (0, 1)])
def test_as_many_blocks_are_decoded_at_once_as_fit(
    source: CountingSource, tmp_path: Path, room: int, at_once: int
) -> None:
    with opened(source, tmp_path, memory_bytes=room * 2 * 4 * BLOCK, threads=4) as store:
        bar(source)
        store.prefetch([(0, block) for block in range(4)])
        wait_until(lambda: times_opened(".part") == 4 and len(source.reads()) == at_once)
        unbar(source)
        wait_until(lambda: store.counters.bytes == 4 * BLOCK)


def test_blocks_that_no_rank_has_opened_yet_stay_when_others_have_to_go(
    source: CountingSource, tmp_path: Path
) -> None:
    with opened(source, tmp_path, disk_bytes=0, memory_bytes=4 * BLOCK) as store:
        store.prefetch([(0, 9)])
        wait_until(lambda: store.counters.bytes == BLOCK)
        for block in range(8):
            store.open(0, block)
        store.open(0, 9)
    assert source.reads() == [9, *range(8)]


def test_closing_ends_a_wait_for_another_process(source: CountingSource, tmp_path: Path) -> None:
    with opened(source, tmp_path) as other, opened(source, tmp_path) as store:
        bar(source)
        other.prefetch([(0, 0)])
        wait_until(lambda: source.reads() == [0])
        store.prefetch([(0, 0)])
        wait_until(lambda: times_opened(".part") == 2)
        store.close()  # while the other is at it
        with pytest.raises(RuntimeError, match="closed"):
            store.open(0, 0)
        unbar(source)
    assert source.reads() == [0]


def times_opened(suffix: str) -> int:
    """How many descriptors this process has for files whose names end so."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the directory
            found += os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix)
    return found


# --------------------------------------------------------------------------- many processes


def start(reading: Reading) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen(
        as_arguments(reading), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert told["right"]
    return told


def reading_of(source: CountingSource, tmp_path: Path, blocks: Sequence[int], **options: Any) -> Reading:
    return Reading(source.log, str(tmp_path / "cache"), tuple(blocks), {"blocks": source.blocks}, **options)


def is_opening(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "opening\n"


def test_two_processes_that_need_one_block_decode_it_once_between_them(
    source: CountingSource, tmp_path: Path
) -> None:
    bar(source)
    processes = [start(reading_of(source, tmp_path, [7])) for _ in range(2)]
    for process in processes:
        assert is_opening(process)
    wait_until(lambda: source.reads() == [7])
    unbar(source)
    told = [result_of(process) for process in processes]
    assert sorted(one["decoded"] for one in told) == [[], [7]]
    assert sorted(one["hits"] for one in told) == [0, 1]
    assert source.reads() == [7]


def test_a_process_that_is_killed_while_it_decodes_holds_nothing_up(
    source: CountingSource, tmp_path: Path
) -> None:
    bar(source)
    killed = start(reading_of(source, tmp_path, [7]))
    wait_until(lambda: source.reads() == [7])
    other = start(reading_of(source, tmp_path, [7]))
    assert is_opening(other)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    unbar(source)
    assert result_of(other)["decoded"] == [7]
    assert source.reads() == [7, 7]
    assert not files_in(tmp_path, ".part")


def taken(directory: Path) -> tuple[int, int]:
    """Bytes of all files of the cache, and what its books say, at one moment."""
    with (directory / "cache" / "total").open("rb") as books:
        fcntl.flock(books, fcntl.LOCK_EX)
        files = [*files_in(directory), *files_in(directory, ".part")]
        return sum(file.stat().st_size for file in files if file.exists()), int(books.read())


def test_the_disk_budget_holds_over_all_processes(source: CountingSource, tmp_path: Path) -> None:
    budget = 10 * BLOCK
    processes = []
    for number in range(3):  # one of them never lets go of a block
        blocks = random.Random(number).sample(range(100), 60)
        reading = reading_of(source, tmp_path, blocks, disk_bytes=budget, release=number > 0)
        processes.append(start(reading))
    wait_until((tmp_path / "cache" / "total").exists)
    most = 0
    while any(process.poll() is None for process in processes):
        if (tmp_path / "cache" / "total").stat().st_size:
            most = max(most, taken(tmp_path)[0])
    told = [result_of(process) for process in processes]
    assert most <= budget
    assert all(not one["warnings"] for one in told)
    there, in_books = taken(tmp_path)
    assert 0.7 * budget <= there == in_books <= budget


def test_memory_of_the_process_does_not_grow_with_the_blocks_it_has_open(tmp_path: Path) -> None:
    megabyte = 1 << 20
    shape = {"blocks": 64, "rows": 1024, "width": 4096}
    reading = Reading(str(tmp_path / "reads"), str(tmp_path / "cache"), tuple(range(64)), shape)
    told = result_of(start(reading))  # 64 blocks of 4 MB, all open, all looked at
    assert told["grown"] < 40 * megabyte, f"{told['grown'] / megabyte:.0f} MB for 256 MB of blocks"
    assert told["descriptors"] < 32
    assert sum(file.stat().st_size for file in files_in(tmp_path)) > 256 * megabyte


# --------------------------------------------------------------------------- little room


def test_a_block_larger_than_the_budget_is_kept_in_memory_and_said_so_once(
    source: CountingSource, tmp_path: Path
) -> None:
    warnings: list[str] = []
    with opened(source, tmp_path, disk_bytes=BLOCK // 2, warn=warnings.append) as store:
        for block in range(3):
            assert matches(store.open(0, block), source.values(block))
        assert store.open(0, 1) is store.open(0, 1)
    assert source.reads() == [0, 1, 2]  # what was decoded to be written is kept
    assert len(warnings) == 1
    assert "a block needs 0.1 MB" in warnings[0]
    assert "cache_bytes" in warnings[0]
    assert not files_in(tmp_path, ".part")


def test_a_directory_that_cannot_be_written_is_said_once_and_memory_is_used(
    source: CountingSource, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    warnings: list[str] = []
    with opened(source, tmp_path, warn=warnings.append) as store:
        for block in range(3):
            assert matches(store.open(0, block), source.values(block))
    assert len(warnings) == 1
    assert str(tmp_path / "cache") in warnings[0]


@pytest.fixture
def small_disk(mount_small_disk: Callable[[str], Path]) -> Path:
    return mount_small_disk("1m")


def test_on_a_full_disk_blocks_stay_in_memory(source: CountingSource, small_disk: Path) -> None:
    warnings: list[str] = []
    with opened(source, small_disk, warn=warnings.append) as store:
        for block in range(20):
            assert matches(store.open(0, block), source.values(block))
    assert len(warnings) == 1
    assert "the disk has no 0.1 MB left" in warnings[0]
    assert source.reads() == list(range(20))
    assert 8 <= len(files_in(small_disk)) < 16
    with opened(source, small_disk) as store:  # what is there is whole
        for block in range(8):
            assert matches(store.open(0, block), source.values(block))
        assert store.counters.hits == 8


class FillsTheDisk(CountingSource):
    """Somebody else takes all that is left while a block is being written."""

    ballast = ""

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(super().read(block, columns)):
            if number == 1:
                with open(self.ballast, "wb") as file, pytest.raises(OSError, match="No space left"):
                    file.write(bytes(2 << 20))
            yield batch


def test_a_disk_that_fills_up_while_a_block_is_written_loses_nothing(
    small_disk: Path, tmp_path: Path
) -> None:
    source = FillsTheDisk(str(tmp_path / "reads"), batches=4)
    source.ballast = str(small_disk / "ballast")
    warnings: list[str] = []
    with opened(source, small_disk, warn=warnings.append) as store:
        assert matches(store.open(0, 0), source.values(0))
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert not files_in(small_disk)
    assert not files_in(small_disk, ".part")


def test_a_block_that_a_dead_process_has_half_written_is_made_anew(
    source: CountingSource, tmp_path: Path
) -> None:
    with opened(source, tmp_path) as store:
        store.open(0, 0)
        store.open(0, 1)
    whole = files_in(tmp_path)[0]
    whole.rename(whole.with_suffix(".part"))
    with opened(source, tmp_path) as store:
        assert matches(store.open(0, 0), source.values(0))
        assert matches(store.open(0, 1), source.values(1))
    assert not files_in(tmp_path, ".part")
    there, in_books = taken(tmp_path)
    assert there == in_books


def test_what_a_dead_process_has_claimed_is_used_again(source: CountingSource, tmp_path: Path) -> None:
    with opened(source, tmp_path, disk_bytes=4 * BLOCK) as store:
        store.open(0, 0)
        left = files_in(tmp_path)[0].with_name("of-somebody.part")
        left.touch()
        os.truncate(left, 3 * BLOCK)
        (tmp_path / "cache" / "total").write_bytes(b"")  # so that it counts anew
        store.open(0, 1)
    assert not left.exists()
    there, in_books = taken(tmp_path)
    assert there == in_books


def test_a_cache_of_half_of_the_data_has_nearly_half_of_what_an_epoch_needs(
    source: CountingSource, tmp_path: Path
) -> None:
    with opened(source, tmp_path, disk_bytes=51 * (BLOCK + 4096)) as store:
        for epoch in range(4):
            if epoch == 1:
                store.counters.hits = 0
            for block in random.Random(epoch).sample(range(100), 100):
                store.open(0, block)
                store.release(0, block)
    assert store.counters.hits >= 0.4 * 300


kept_files = st.lists(
    st.builds(
        KeptFile,
        name=st.builds("{}-{}".format, st.sampled_from("abc"), st.integers(0, 99)),
        nbytes=st.just(1),
        used=st.integers(0, 20),
        is_released=st.booleans(),
    ),
    unique_by=lambda file: file.name,
)


@given(kept_files)
def test_files_in_use_go_last_and_of_one_source_the_latest_first(files: list[KeptFile]) -> None:
    order = eviction_order(files)
    assert sorted(order, key=lambda file: file.name) == sorted(files, key=lambda file: file.name)
    assert [file.is_released for file in order] == sorted((file.is_released for file in files), reverse=True)
    for source in "abc":
        released = [file.used for file in order if file.is_released and file.source == source]
        assert released == sorted(released, reverse=True)
    in_use = [file.used for file in order if not file.is_released]
    assert in_use == sorted(in_use)


@given(kept_files)
def test_sources_that_are_not_used_any_more_go_first(files: list[KeptFile]) -> None:
    newest = {file.source: max(f.used for f in files if f.source == file.source) for file in files}
    order = [newest[file.source] for file in eviction_order(files) if file.is_released]
    assert order == sorted(order)


def test_values_do_not_depend_on_where_a_block_comes_from(tmp_path: Path) -> None:
    rows = range(1000)
    words = [f"word {i}" if i % 7 else None for i in rows]
    table = pa.table({"n": rows, "text": words, "list": [[i] * (i % 5) for i in rows]})
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=300)
    source = ParquetFile(str(tmp_path / "f.parquet"))
    for disk_bytes in (0, 1 << 20, 1 << 20):
        with opened(source, tmp_path, disk_bytes=disk_bytes) as store:
            batches = [batch for block in range(4) for batch in store.open(0, block)]
            assert pa.Table.from_batches(batches).equals(table)
            assert store.counters.hits + sum(store.counters.decoded.values()) == 4
