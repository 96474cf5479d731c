"""Reads a dataset of numbered images through a loader, in this process or as one of its own.

Run as ``python -m tests.data.pixel_reader SETTINGS`` with the JSON of :class:`Reading`; prints one line of JSON.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from powertrain.data.dataset import Dataset
from powertrain.data.loading.loader import Cut, Loader
from powertrain.data.plan.prepared import prepare_alone
from powertrain.data.reading import read_parquet

#: (height, width) of the images.
SIZE = (6, 5)


def pixels_of(number: int, size: tuple[int, int] = SIZE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The image of a number, which differs from that of every other."""
    return np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)


def encoded(pixels: np.ndarray[Any, Any], form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def write_images(directory: Path, images: Sequence[bytes | None], row_group_size: int = 8) -> str:
    """A Parquet file of the columns "id" and "image"."""
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(images)), "image": pa.array(images, pa.binary())})
    pq.write_table(table, directory / "images.parquet", row_group_size=row_group_size)
    return str(directory)


def numbered_images(directory: Path, count: int) -> Dataset:
    """Images of the numbers from 0 to ``count``, still encoded, shuffled."""
    path = write_images(directory, [encoded(pixels_of(number)) for number in range(count)])
    return read_parquet(path).random_shuffle(seed=1)


@contextmanager
def loading(dataset: Dataset, cache: Path, **options: Any) -> Iterator[Loader]:
    settings: dict[str, Any] = {"disk_bytes": 1 << 28, "memory_bytes": 1 << 26}
    loader = Loader(prepare_alone(dataset.plan), cache_directory=str(cache), **(settings | options))
    try:
        yield loader
    finally:
        loader.close()


def read_epoch(loader: Loader, epoch: int, column: str = "image") -> dict[int, Any]:
    """The images of one epoch by their id; None for a null."""
    cut: Cut[Any] = Cut(7, "partial", lambda rows: rows, in_step=False)
    found: dict[int, Any] = {}
    for group in loader.epoch(epoch, 0, cut):
        for ready in group:
            ids = np.asarray(ready.batch.columns["id"]).tolist()
            assert not found.keys() & set(ids)
            found |= dict(zip(ids, ready.batch.columns[column], strict=True))
    return found


def are_right(found: dict[int, Any]) -> bool:
    return all(np.array_equal(image, pixels_of(number)) for number, image in found.items())


@dataclass(frozen=True)
class Reading:
    """What one process does: reads the images of a directory for so many epochs."""

    directory: str
    cache: str
    epochs: int
    rank: int = 0
    world_size: int = 1
    #: It dies when it has done for so many rows what it is about to do; 0 for never.
    dies_at: int = 0
    about_to: str = "write pixels"


def main() -> None:
    reading = Reading(**json.loads(sys.argv[1]))
    if reading.dies_at:
        _die_when(reading.about_to, reading.dies_at)
    dataset = read_parquet(reading.directory).random_shuffle(seed=1).decode_images("image")
    seat = {"rank": reading.rank, "world_size": reading.world_size}
    with loading(dataset, Path(reading.cache), **seat) as loader:
        found = [read_epoch(loader, epoch) for epoch in range(reading.epochs)]
        told = {
            "right": all(map(are_right, found)),
            "rows": [len(images) for images in found],
            "decoded": loader.images_decoded,
            "found": loader.images_found,
        }
    print(json.dumps(told), flush=True)


def _die_when(about_to: str, rows: int) -> None:
    pwrite, size = os.pwrite, pixels_of(0).nbytes if about_to == "write pixels" else 1
    done: list[int] = []

    def fatal(descriptor: int, data: Any, offset: int) -> int:
        if memoryview(data).nbytes == size:
            done.append(offset)
            if len(done) > rows:
                os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(descriptor, data, offset)

    os.pwrite = fatal


def as_arguments(reading: Reading) -> list[str]:
    return [sys.executable, "-m", "tests.data.pixel_reader", json.dumps(asdict(reading))]


if __name__ == "__main__":
    main()
