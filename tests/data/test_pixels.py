"""Images are decoded once per node, and what comes is what decoding would have given, whatever happens."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.pixel_reader import (
    Reading,
    are_right,
    as_arguments,
    encoded,
    loading,
    numbered_images,
    pixels_of,
    read_epoch,
    write_images,
)

from powertrain.data import from_items, read_images, read_parquet
from powertrain.data.dataset import Dataset
from powertrain.data.loading.cache_files import CacheDirectory, NoRoom, sweep
from powertrain.data.loading.pixels import RowsOfPart
from powertrain.data.operations.columns import DropColumns, FilterExpression, RenameColumns, SelectColumns
from powertrain.data.operations.decode import DecodeImages
from powertrain.data.operations.functions import FilterRows, FlatMap, MapBatches, MapRows
from powertrain.data.operations.operation import Operation
from powertrain.data.plan.plan import Block
from powertrain.errors import DataError

ROOT = Path(__file__).parents[2]
COUNT = 40
#: Bytes of one image, and of a file of all of them.
IMAGE = 6 * 5 * 3
FILE = 2 * 4096 + COUNT * IMAGE


@pytest.fixture
def images(tmp_path: Path) -> Dataset:
    return numbered_images(tmp_path / "data", COUNT)


def kept_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.pixels"))


def two_epochs(dataset: Dataset, cache: Path, column: str = "image", **options: Any) -> tuple[int, int]:
    """Reads two epochs, which have to be right; returns how many images were decoded and how many found."""
    with loading(dataset, cache, **options) as loader:
        for epoch in range(2):
            found = read_epoch(loader, epoch, column)
            assert len(found) == COUNT
            assert are_right(found)
        return loader.images_decoded, loader.images_found


# --------------------------------------------------------------------------- once


def test_every_image_is_decoded_once_and_later_loaders_find_it_too(images: Dataset, tmp_path: Path) -> None:
    decoded = images.decode_images("image")
    assert two_epochs(decoded, tmp_path / "cache") == (COUNT, COUNT)
    assert two_epochs(decoded, tmp_path / "cache") == (0, 2 * COUNT)
    assert len(kept_files(tmp_path / "cache")) == 1


def test_pixels_from_the_cache_are_the_reader_s_own(images: Dataset, tmp_path: Path) -> None:
    with loading(images.decode_images("image"), tmp_path / "cache") as loader:
        for epoch in range(3):
            found = read_epoch(loader, epoch)
            assert are_right(found)
            for image in found.values():
                image[:] = 0
    assert all(image.dtype == np.uint8 for image in found.values())


def test_batches_of_a_dataset_use_the_cache_and_stats_say_so(images: Dataset) -> None:
    decoded = images.decode_images("image")
    batches = decoded.iter_torch_batches(batch_size=16)
    for _ in range(3):
        for batch in batches:
            for number, image in zip(batch["id"].tolist(), batch["image"].numpy(), strict=True):
                assert np.array_equal(image, pixels_of(number))
    assert f"images: decoded {COUNT}, from the cache {2 * COUNT}" in decoded.stats()


def test_reading_a_dataset_through_once_keeps_no_pixels(images: Dataset) -> None:
    decoded = images.decode_images("image")
    assert len(decoded.take_all()) == COUNT
    assert f"images: decoded {COUNT}, from the cache 0" in decoded.stats()


def test_columns_that_a_source_has_marked_are_kept(tmp_path: Path) -> None:
    for number in range(COUNT):
        (tmp_path / f"{number:02d}.png").write_bytes(encoded(pixels_of(number)))
    with loading(read_images(str(tmp_path)).random_shuffle(seed=2), tmp_path / "cache") as loader:
        for _ in range(2):
            assert len(list(loader.epoch(0, 0, _cut()))) > 1
        assert (loader.images_decoded, loader.images_found) == (COUNT, COUNT)


def _cut() -> Any:
    from powertrain.data.loading.loader import Cut

    return Cut(7, "partial", lambda rows: rows, in_step=False)


def test_each_size_and_mode_has_pixels_of_its_own(images: Dataset, tmp_path: Path) -> None:
    wishes = [
        images.decode_images("image"),
        images.decode_images("image", mode="L"),
        images.decode_images("image", size=(3, 4)),
    ]
    shapes = []
    for _ in range(2):
        for wish in wishes:
            with loading(wish, tmp_path / "cache") as loader:
                shapes.append(read_epoch(loader, 0)[0].shape)
    assert shapes == [(6, 5, 3), (6, 5), (3, 4, 3)] * 2
    assert len(kept_files(tmp_path / "cache")) == 3


def test_another_pillow_decodes_anew(
    images: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = images.decode_images("image")
    assert two_epochs(decoded, tmp_path / "cache") == (COUNT, COUNT)
    monkeypatch.setattr("PIL.__version__", "0.0")
    assert two_epochs(decoded, tmp_path / "cache") == (COUNT, COUNT)


# --------------------------------------------------------------------------- the right rows


@pytest.mark.parametrize(
    "prepare",
    [
        lambda data: data.decode_images("image"),
        lambda data: data.filter(lambda row: True).rename_columns({"image": "x"}).decode_images("x"),
        lambda data: data.filter(lambda row: True).rename_columns(["id", "x"]).decode_images("x"),
        lambda data: data.filter(lambda row: True).select_columns(["image", "id"]).decode_images("image"),
        lambda data: data.filter(pc.field("id") >= 0).decode_images("image"),
        lambda data: data.decode_images("image").map(lambda row: row),
        lambda data: data.decode_images("image").map_batches(lambda batch: batch, batch_size=4),
    ],
    ids=["alone", "renamed", "relabeled", "selected", "by expression", "then map", "then map_batches"],
)
def test_images_that_are_as_the_source_has_them_are_kept(
    images: Dataset, tmp_path: Path, prepare: Callable[[Dataset], Dataset]
) -> None:
    column = "x" if "x" in prepare(images).columns() else "image"
    assert two_epochs(prepare(images), tmp_path / "cache", column) == (COUNT, COUNT)


@pytest.mark.parametrize("method", ["map", "map_batches", "flat_map"])
def test_images_that_a_function_has_made_are_not_kept(images: Dataset, tmp_path: Path, method: str) -> None:
    functions: dict[str, Any] = {"flat_map": lambda row: [row]}
    made = getattr(images, method)(functions.get(method, lambda same: same)).decode_images("image")
    assert two_epochs(made, tmp_path / "cache") == (0, 0)
    assert not kept_files(tmp_path / "cache")


_STORED = {"id": "id", "picture": "image"}


@pytest.mark.parametrize(
    ("operation", "stored"),
    [
        (FilterRows(lambda row: True), _STORED),
        (FilterExpression(pc.field("id") > 0), _STORED),
        (SelectColumns(("picture", "other")), {"picture": "image"}),
        (DropColumns(("picture",)), {"id": "id"}),
        (RenameColumns({"picture": "p"}), {"id": "id", "p": "image"}),
        (RenameColumns(["number", "p"]), {"number": "id", "p": "image"}),
        (RenameColumns(["number", "p", "of another"]), {}),
        (DecodeImages(("picture",)), {"id": "id"}),
        (MapRows(lambda row: row), {}),
        (MapBatches(lambda batch: batch), {}),
        (FlatMap(lambda row: [row]), {}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_operation_says_which_columns_it_leaves_as_they_are_stored(
    operation: Operation, stored: dict[str, str]
) -> None:
    assert dict(operation.stored(_STORED)) == stored


def test_parts_of_a_union_and_of_a_dataset_have_their_own_rows(images: Dataset, tmp_path: Path) -> None:
    others = [encoded(pixels_of(number)) for number in range(COUNT, COUNT + 30)]
    table = pa.table({"id": range(COUNT, COUNT + 30), "image": pa.array(others, pa.binary())})
    path = tmp_path / "others"
    path.mkdir()
    pq.write_table(table, path / "images.parquet", row_group_size=4)
    both = images.union(read_parquet(str(path))).decode_images("image")
    some = images.limit(25).decode_images("image")
    for dataset, count in ((both, COUNT + 30), (some, 25)):
        with loading(dataset, tmp_path / "cache") as loader:
            for epoch in range(2):
                found = read_epoch(loader, epoch)
                assert len(found) == count
                assert are_right(found)
            assert (loader.images_decoded, loader.images_found) == (count, count)


def test_data_that_differs_only_in_what_is_in_its_files_is_distinguished(tmp_path: Path) -> None:
    for number in range(20):  # of one size and one name in both directories
        for name, offset in (("a", 0), ("b", 100)):
            (tmp_path / name).mkdir(exist_ok=True)
            data = encoded(pixels_of(number + offset), "BMP")
            (tmp_path / name / f"{number}.bmp").write_bytes(data)
    both = read_images(str(tmp_path / "a")).union(read_images(str(tmp_path / "b"))).random_shuffle(seed=1)
    with loading(both, tmp_path / "cache") as loader:
        for epoch in range(2):
            groups = itertools.chain.from_iterable(loader.epoch(epoch, 0, _cut()))
            found = {image.tobytes() for ready in groups for image in ready.batch.columns["image"]}
            assert found == {pixels_of(n + offset).tobytes() for n in range(20) for offset in (0, 100)}


def test_a_file_that_was_written_anew_gives_its_new_pixels(tmp_path: Path) -> None:
    for first in (0, 100):
        path = write_images(
            tmp_path / "data", [encoded(pixels_of(first + number)) for number in range(COUNT)]
        )
        with loading(read_parquet(path).decode_images("image"), tmp_path / "cache") as loader:
            for epoch in range(2):
                found = read_epoch(loader, epoch)
                assert are_right({first + number: image for number, image in found.items()})


blocks = st.lists(
    st.builds(Block, part=st.integers(0, 2), index=st.just(0), start=st.just(0), rows=st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


@given(blocks, st.integers(0, 2))
def test_rows_of_a_part_are_counted_in_their_order(blocks: list[Block], part: int) -> None:
    parts = [block.part for block in blocks for _ in range(block.rows)]
    numbers = np.array([number for number, of in enumerate(parts) if of == part], np.int64)
    rows = RowsOfPart(blocks, part)
    assert rows.count == len(numbers)
    assert rows.places(numbers).tolist() == list(range(len(numbers)))


# --------------------------------------------------------------------------- rows that cannot be kept


def test_images_of_other_shapes_and_nulls_come_as_without_a_cache(tmp_path: Path) -> None:
    grey = encoded(pixels_of(1)[:, :, 0])
    values = [
        encoded(pixels_of(number, (6, 5 + (number % 5 == 0)))) if number % 7 else grey
        for number in range(COUNT)
    ]
    path = write_images(
        tmp_path / "data", [None if number % 11 == 3 else values[number] for number in range(COUNT)]
    )
    dataset = read_parquet(path).random_shuffle(seed=4).decode_images("image")
    with loading(dataset, tmp_path / "none", disk_bytes=0) as loader:
        expected = [read_epoch(loader, epoch) for epoch in range(3)]
    with loading(dataset, tmp_path / "cache") as loader:
        for epoch in range(3):
            found = read_epoch(loader, epoch)
            assert found.keys() == expected[epoch].keys()
            for number, image in found.items():
                other = expected[epoch][number]
                assert (image is None) == (other is None)
                assert image is None or (image.dtype == other.dtype and np.array_equal(image, other))
        assert 0 < loader.images_found < 2 * COUNT
        assert loader.images_found + loader.images_decoded == 3 * sum(
            image is not None for image in expected[0].values()
        )


def test_a_broken_image_is_reported_in_every_epoch(tmp_path: Path) -> None:
    values = [encoded(pixels_of(number)) for number in range(16)]
    values[11] = b"no image"
    dataset = read_parquet(write_images(tmp_path / "data", values)).decode_images("image")
    with loading(dataset, tmp_path / "cache") as loader:
        for epoch in range(2):
            with pytest.raises(DataError, match=r"row group 1, row 3.*no image format"):
                read_epoch(loader, epoch)


def test_an_image_whose_file_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "there.png").write_bytes(encoded(pixels_of(0)))
    rows = [{"image": {"bytes": None, "path": str(tmp_path / name)}} for name in ("there.png", "gone.png")]
    with pytest.raises(DataError, match=r"item 1.*gone\.png.*No such file"):
        from_items(rows).decode_images("image").take_all()


# --------------------------------------------------------------------------- room


@pytest.mark.parametrize("disk_bytes", [0, 2 * FILE - 1])
def test_without_room_for_all_of_them_no_pixels_are_kept(
    images: Dataset, tmp_path: Path, disk_bytes: int
) -> None:
    decoded = images.decode_images("image")
    assert two_epochs(decoded, tmp_path / "cache", disk_bytes=disk_bytes) == (2 * COUNT, 0)
    assert not kept_files(tmp_path / "cache")


def test_pixels_have_half_of_the_budget_and_blocks_the_rest(tmp_path: Path) -> None:
    cache = CacheDirectory(str(tmp_path / "cache"), 10_000)
    first = cache.make_pixels("a-1", b"first", 100, 3000)
    with pytest.raises(NoRoom, match="pixels need"):
        cache.make_pixels("b-1", b"", 100, 3000)
    os.close(cache.make_pixels("b-2", b"", 100, 2000))
    assert _in_books(tmp_path / "cache") == 5000
    third = cache.make_pixels("c-1", b"", 100, 2000)  # for which the one that is not used any more goes
    assert [path.name for path in kept_files(tmp_path / "cache")] == ["a-1.pixels", "c-1.pixels"]
    assert _in_books(tmp_path / "cache") == 5000
    assert os.pread(first, 5, 0) == b"first"
    os.close(first)
    os.close(third)


def _in_books(cache: Path) -> int:
    return int((cache / "total").read_bytes())


def test_room_for_blocks_is_made_of_unused_pixels_and_of_no_others(tmp_path: Path) -> None:
    cache = CacheDirectory(str(tmp_path / "cache"), 10_000)
    used = cache.make_pixels("a-1", b"", 100, 2500)
    os.close(cache.make_pixels("b-1", b"", 100, 2500))
    block = os.open(tmp_path / "cache" / "c-1.part", os.O_RDWR | os.O_CREAT)
    fcntl.flock(block, fcntl.LOCK_EX)
    cache.claim(block, 0, 7000)
    assert [path.name for path in kept_files(tmp_path / "cache")] == ["a-1.pixels"]
    with pytest.raises(NoRoom, match="a block needs"):
        cache.claim(block, 7000, 8000)
    os.close(block)
    os.close(used)


def test_a_loader_keeps_its_pixels_while_blocks_have_to_go(images: Dataset, tmp_path: Path) -> None:
    budget = 2 * FILE + 100  # pixels and a few blocks of about 3 KB
    decoded = images.decode_images("image")
    assert two_epochs(decoded, tmp_path / "cache", disk_bytes=budget) == (COUNT, COUNT)
    files = [path.stat().st_size for path in (tmp_path / "cache").iterdir() if path.suffix != ""]
    assert sum(files) == _in_books(tmp_path / "cache") <= budget


def test_sweeping_removes_pixels_and_processes_that_have_them_open_go_on(
    images: Dataset, tmp_path: Path
) -> None:
    with loading(images.decode_images("image"), tmp_path / "cache") as loader:
        read_epoch(loader, 0)
        sweep(str(tmp_path / "cache"))
        assert are_right(read_epoch(loader, 1))
        assert (loader.images_decoded, loader.images_found) == (COUNT, COUNT)
    assert not kept_files(tmp_path / "cache")


def test_a_file_that_is_none_of_pixels_is_left_alone(images: Dataset, tmp_path: Path) -> None:
    decoded = images.decode_images("image")
    assert two_epochs(decoded, tmp_path / "cache") == (COUNT, COUNT)
    file = kept_files(tmp_path / "cache")[0]
    file.write_bytes(b"something else")
    assert two_epochs(decoded, tmp_path / "cache") == (2 * COUNT, 0)
    assert file.read_bytes() == b"something else"


@pytest.fixture
def small_disk(mount_small_disk: Callable[[str], Path]) -> Path:
    return mount_small_disk("256k")


def test_on_a_disk_without_room_no_pixels_are_kept(images: Dataset, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(248 << 10))
    assert two_epochs(images.decode_images("image"), small_disk / "cache") == (2 * COUNT, 0)
    assert not kept_files(small_disk / "cache")


def test_a_disk_that_fills_up_loses_nothing(small_disk: Path, tmp_path: Path) -> None:
    large = [pixels_of(number, (40, 30)) for number in range(10)]  # 3.6 KB each, 43 KB together
    path = write_images(tmp_path / "data", [encoded(image) for image in large], row_group_size=1)
    dataset = read_parquet(path).decode_images("image")
    with loading(dataset, small_disk / "cache", disk_bytes=100_000) as loader:
        for epoch in range(3):
            found: dict[int, Any] = {}
            for (ready,) in loader.epoch(epoch, 0, replace(_cut(), prefetch=0)):
                columns = ready.batch.columns
                found |= dict(zip(columns["id"].tolist(), columns["image"], strict=True))
                if len(found) == 7 and epoch == 0:
                    _fill(small_disk)
            assert all(np.array_equal(found[number], image) for number, image in enumerate(large))
        assert loader.images_found == 2 * 7  # those before the disk was full


def _fill(disk: Path) -> None:
    with (disk / "ballast").open("wb") as file, pytest.raises(OSError, match="No space left"):
        file.write(bytes(1 << 20))


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


def test_ranks_of_a_node_share_what_they_decode(images: Dataset, tmp_path: Path) -> None:
    decoded = images.decode_images("image")
    with loading(decoded, tmp_path / "cache", rank=0, world_size=2) as loader:
        mine = read_epoch(loader, 0)
        reading = Reading(str(tmp_path / "data"), str(tmp_path / "cache"), 2, rank=1, world_size=2)
        theirs = result_of(start(reading))
        assert are_right(mine | read_epoch(loader, 1))
        assert loader.images_decoded + theirs["decoded"] == COUNT
        assert loader.images_found + theirs["found"] == COUNT


def test_processes_that_read_the_same_at_the_same_time_get_what_is_right(
    images: Dataset, tmp_path: Path
) -> None:
    reading = Reading(str(tmp_path / "data"), str(tmp_path / "cache"), 3)
    for told in [result_of(process) for process in [start(reading), start(reading)]]:
        assert told["rows"] == [COUNT] * 3
        assert told["found"] >= 2 * COUNT
    assert len(kept_files(tmp_path / "cache")) == 1


@pytest.mark.parametrize("about_to", ["write pixels", "say that they are there"])
def test_a_row_whose_writer_died_is_decoded_again(images: Dataset, tmp_path: Path, about_to: str) -> None:
    reading = Reading(str(tmp_path / "data"), str(tmp_path / "cache"), 1, dies_at=12, about_to=about_to)
    assert start(reading).wait(timeout=60) == -9
    with loading(images.decode_images("image"), tmp_path / "cache") as loader:
        assert are_right(read_epoch(loader, 0))
        assert 0 < loader.images_found <= 12
        assert loader.images_decoded + loader.images_found == COUNT
