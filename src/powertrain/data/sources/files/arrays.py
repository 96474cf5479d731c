"""Files of numpy arrays: a row is an entry of the first dimension."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from powertrain.data.sources.base import BlockFacts, SourceFacts
from powertrain.data.sources.content_sample import content_samples
from powertrain.data.sources.files.file_columns import file_column, with_file_columns
from powertrain.data.sources.files.files import (
    DataFile,
    FilePaths,
    find_files,
    is_object,
    open_file,
    read_range,
    unreadable,
)
from powertrain.data.sources.items import table_of_arrays
from powertrain.data.sources.plain import one_batch, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError, StorageError

#: Approximate bytes of a block.
BLOCK_BYTES = 16 << 20
#: The header of a file is within so many bytes.
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class _Stretch:
    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Header:
    """The header of a file, and the offset of the first row."""

    shape: tuple[int, ...]
    kind: Any
    offset: int

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * int(self.kind.itemsize)


class NumpySource(RememberingSource):
    """Arrays of ``.npy`` files in the column "data"; all have the type and the shape of a row of the first."""

    def __init__(
        self, paths: FilePaths, *, include_paths: bool = False, block_bytes: int = BLOCK_BYTES
    ) -> None:
        super().__init__()
        self._paths, self._include_paths, self._block_bytes = paths, include_paths, block_bytes
        self._files: tuple[DataFile, ...] = ()
        self._headers: tuple[_Header, ...] = ()
        self._stretches: tuple[_Stretch, ...] = ()
        self.cheap_to_decode = paths.is_local

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._paths.cache_key}"

    def _inspect_data(self) -> SourceFacts:
        self._files = find_files(self._paths)
        digest = xxhash.xxh3_128()
        stretches: list[_Stretch] = []
        blocks: list[BlockFacts] = []
        headers: list[_Header] = []
        known: tuple[tuple[int, ...], Any] | None = None
        try:
            samples = content_samples(self._files, self._paths.filesystem)
        except OSError as error:
            raise unreadable(self._files[0], error) from error
        for number, (file, sample) in enumerate(zip(self._files, samples, strict=True)):
            headers.append(self._header(file))
            shape, kind = headers[-1].shape, headers[-1].kind
            known = known or (shape[1:], kind)
            if (shape[1:], kind) != known:
                raise DataError(
                    f"The array in {file.shown!r} has rows of {kind}{list(shape[1:])}, and that in "
                    f"{self._files[0].shown!r} rows of {known[1]}{list(known[0])}. Read them apart."
                )
            digest.update(f"{file.name}\0{file.size}\0{shape}\0{kind}\0{sample}\0".encode())
            width = max(1, headers[-1].row_bytes)
            step = max(1, self._block_bytes // width)
            for start in range(0, shape[0], step):
                stop = min(start + step, shape[0])
                stretches.append(_Stretch(number, start, stop))
                blocks.append(BlockFacts(stop - start, (stop - start) * width))
        self._stretches, self._headers = tuple(stretches), tuple(headers)
        assert known is not None  # there is at least one file
        schema = table_of_arrays({"data": np.zeros((1, *known[0]), known[1])}).schema
        full = with_file_columns(schema, self._files, self._include_paths)
        return SourceFacts(tuple(blocks), full, digest.hexdigest())

    def _header(self, file: DataFile) -> _Header:
        try:
            with open_file(file, self._paths.filesystem) as opened:
                head = io.BytesIO(opened.read(min(_HEAD_BYTES, file.size)))
        except (OSError, StorageError) as error:
            raise unreadable(file, error) from error
        try:
            version = np.lib.format.read_magic(head)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, in_columns, kind = read(head)
        except ValueError as error:
            raise DataError(
                f"The file {file.shown!r} is not a numpy array ({error}). Give files that numpy.save() has written."
            ) from error
        if kind.hasobject or kind.kind not in "biufcMmSU" or not shape or in_columns:
            raise DataError(
                f"The array in {file.shown!r} has the type {kind} and the shape {shape}"
                f"{', stored by columns' if in_columns else ''}. Give arrays of numbers with at least one dimension, "
                "stored by rows, without Python objects."
            )
        return _Header(shape, kind, head.tell())

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        names = schema.names if columns is None else list(columns)
        stretch = self._stretches[block]
        file = self._files[stretch.file]
        if not names:
            yield with_rows_only(stretch.stop - stretch.start)
            return
        arrays = []
        for name in names:
            if name == "data":
                table = table_of_arrays({"data": self._rows(file, stretch)})
                arrays.append(one_batch(table.to_batches()).column(0))
            else:
                arrays.append(file_column(file, name, stretch.stop - stretch.start))
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([schema.field(name) for name in names]))

    def _rows(self, file: DataFile, stretch: _Stretch) -> Any:
        try:
            if self._paths.filesystem is None and not is_object(file.path):
                whole = np.load(file.path, mmap_mode="r", allow_pickle=False)
                return np.array(whole[stretch.start : stretch.stop])
            header = self._headers[stretch.file]
            start, stop = (header.offset + row * header.row_bytes for row in (stretch.start, stretch.stop))
            stored = read_range(file, start, stop, self._paths.filesystem)
        except (OSError, StorageError, ValueError) as error:
            raise unreadable(file, error) from error
        return np.frombuffer(stored, header.kind).reshape(stretch.stop - stretch.start, *header.shape[1:])

    def name_row(self, block: int, row: int) -> str:
        stretch = self._stretches[block]
        return f"{self._files[stretch.file].name}, row {stretch.start + row}"
