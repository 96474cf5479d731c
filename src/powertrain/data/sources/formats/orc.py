"""ORC files: a block is a stripe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from powertrain.data.sources.base import BlockFacts, SourceFacts
from powertrain.data.sources.content_sample import content_samples
from powertrain.data.sources.files.file_columns import file_column, with_file_columns
from powertrain.data.sources.files.files import DataFile, FilePaths, find_files, open_file, unreadable
from powertrain.data.sources.plain import as_type, plain_schema, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError, StorageError


@dataclass(frozen=True)
class _Stripe:
    file: int
    number: int
    first_row: int


class OrcSource(RememberingSource):
    """The rows of ORC files, which all have the columns of the first."""

    def __init__(self, paths: FilePaths, *, include_paths: bool = False) -> None:
        super().__init__()
        self._paths, self._include_paths = paths, include_paths
        self._files: tuple[DataFile, ...] = ()
        self._stripes: tuple[_Stripe, ...] = ()
        self._own: pa.Schema | None = None

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._paths.cache_key}"

    def _inspect_data(self) -> SourceFacts:
        self._files = find_files(self._paths)
        digest = xxhash.xxh3_128()
        stripes: list[_Stripe] = []
        blocks: list[BlockFacts] = []
        self._own = None
        try:
            samples = content_samples(self._files, self._paths.filesystem)
        except OSError as error:
            raise unreadable(self._files[0], error) from error
        for number, (file, sample) in enumerate(zip(self._files, samples, strict=True)):
            digest.update(f"{file.name}\0{file.size}\0{sample}\0".encode())
            first = 0
            for stripe, rows, width in self._counted(number, digest):
                stripes.append(_Stripe(number, stripe, first))
                blocks.append(BlockFacts(rows, rows * width))
                first += rows
        self._stripes = tuple(stripes)
        assert self._own is not None  # there is at least one file
        full = with_file_columns(self._own, self._files, self._include_paths)
        return SourceFacts(tuple(blocks), full, digest.hexdigest())

    def _counted(self, number: int, digest: Any) -> Iterator[tuple[int, int, int]]:
        """Yield (number, rows, estimated bytes of a row) of each stripe of a file."""
        file = self._files[number]
        with self._opened(file) as opened:
            found = plain_schema(opened.schema)
            self._own = self._own or found
            if not found.equals(self._own):
                raise DataError(
                    f"The ORC file {file.shown!r} has the columns {_listed(found)}, and {self._files[0].shown!r} has "
                    f"{_listed(self._own)}. Read them apart and make them alike before union()."
                )
            digest.update(f"{opened.nrows}\0{found}\0".encode())
            width = 8 * max(1, len(found)) if not opened.nrows else max(1, file.size // opened.nrows)
            for stripe in range(opened.nstripes):
                # The reader does not say how many rows a stripe has, so one column of it is read.
                yield stripe, self._stripe(opened, file, stripe, found.names[:1]).num_rows, width

    def _opened(self, file: DataFile) -> _Opened:
        return _Opened(file, self._paths.filesystem)

    def _stripe(self, opened: Any, file: DataFile, stripe: int, columns: Sequence[str]) -> pa.RecordBatch:
        try:
            found: pa.RecordBatch = opened.read_stripe(stripe, columns=list(columns))
        except (OSError, StorageError, pa.ArrowException) as error:
            raise _damaged(file, error) from error
        return found

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        facts = self.inspect()
        names = facts.schema.names if columns is None else list(columns)
        wanted = self._stripes[block]
        file, rows = self._files[wanted.file], facts.blocks[block].rows
        if not names:
            yield with_rows_only(rows)
            return
        assert self._own is not None
        own = [name for name in names if name in self._own.names]
        arrays: dict[str, Any] = {}
        if own:
            with self._opened(file) as opened:
                batch = self._stripe(opened, file, wanted.number, own)
            if batch.num_rows != rows:
                raise DataError(
                    f"The ORC file {file.shown!r} is not the one that was inspected: a stripe had {rows} rows and has "
                    f"{batch.num_rows} now. Keep the data as it is during a run, or start the run again."
                )
            arrays = {name: batch.column(batch.schema.get_field_index(name)) for name in own}
        schema = pa.schema([facts.schema.field(name) for name in names])
        columns_ = [
            as_type(arrays[field.name], field.type)
            if field.name in arrays
            else file_column(file, field.name, rows)
            for field in schema
        ]
        yield pa.RecordBatch.from_arrays(columns_, schema=schema)

    def name_row(self, block: int, row: int) -> str:
        stripe = self._stripes[block]
        return f"{self._files[stripe.file].name}, row {stripe.first_row + row}"


class _Opened:
    """An open ORC file, as a context manager."""

    def __init__(self, file: DataFile, filesystem: Any) -> None:
        self._file, self._filesystem = file, filesystem
        self._stream: Any = None

    def __enter__(self) -> Any:
        from pyarrow import orc

        try:
            self._stream = open_file(self._file, self._filesystem)
        except (OSError, StorageError) as error:
            raise unreadable(self._file, error) from error
        try:
            return orc.ORCFile(self._stream)
        except (OSError, StorageError, pa.ArrowException) as error:
            self._stream.close()
            raise _damaged(self._file, error) from error

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()


def _damaged(file: DataFile, error: BaseException) -> DataError:
    return DataError(
        f"The ORC file {file.shown!r} cannot be read: {str(error).rstrip('.')}. Copy it again or write it anew; or "
        "leave it out."
    )


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
