"""A hash of bytes from all over some files: it changes when rows are put into another order, which the footers of
uncompressed Parquet files do not show.

Small data is hashed whole. Of large data, evenly spaced windows are hashed, with a fixed number for all files together,
so that the cost stays constant. Of more files than that one larger window in the middle of each is hashed. Changes
outside the windows of a large file are not noticed; shuffled rows change everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from powertrain.data.sources.files.files import DataFile, is_object

#: Files of up to this many bytes together are hashed whole.
_WHOLE_BYTES = 16 << 20
#: Of larger data so many windows are hashed, of this many bytes each; at most so many of one file.
_WINDOWS = 512
_WINDOW_BYTES = 16 << 10
_MOST_WINDOWS_OF_A_FILE = 64
#: The only window of each file where there are more files than windows: it costs one read, as the footer does.
_ONLY_WINDOW_BYTES = 64 << 10


def sample_ranges(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the byte ranges to hash of files of these sizes. Pure."""
    if sum(sizes) <= _WHOLE_BYTES:
        return [[(0, size)] if size else [] for size in sizes]
    if len(sizes) > _WINDOWS:
        return [_in_the_middle(size) for size in sizes]
    windows = min(_WINDOWS // len(sizes), _MOST_WINDOWS_OF_A_FILE)
    return [_evenly(size, windows) for size in sizes]


def _evenly(size: int, windows: int) -> list[tuple[int, int]]:
    if size <= windows * _WINDOW_BYTES:
        return [(0, size)] if size else []
    starts = [number * (size - _WINDOW_BYTES) // max(windows - 1, 1) for number in range(windows)]
    return [(start, start + _WINDOW_BYTES) for start in starts]


def _in_the_middle(size: int) -> list[tuple[int, int]]:
    length = min(size, _ONLY_WINDOW_BYTES)
    start = (size - length) // 2
    return [(start, start + length)] if size else []


def content_samples(files: Sequence[DataFile], filesystem: object) -> list[str]:
    """Return the hash of each file's sampled bytes; "" for files that are not on a disk of this machine.

    Raises:
        OSError: A file cannot be read.
    """
    if filesystem is not None or any(is_object(file.path) for file in files):
        return [""] * len(files)  # each window would be a request across the network
    ranges = sample_ranges([file.size for file in files])
    return [_hashed(file.path, wanted) for file, wanted in zip(files, ranges, strict=True)]


def _hashed(path: str, ranges: Sequence[tuple[int, int]]) -> str:
    if not ranges:
        return ""
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            left = stop - start
            while left > 0 and (read := file.read(min(left, 1 << 20))):
                digest.update(read)
                left -= len(read)
    return digest.hexdigest()
