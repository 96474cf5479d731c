"""Rows in memory: an Arrow table, its copy in a file for other processes, and ranges of numbers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.content_hash import content_hash
from powertrain.data.sources.plain import moderate, plain_table, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError

#: Chunks of a table are joined up to about this many bytes: taking single rows is fastest from few large batches.
_BATCH_BYTES = 256 << 20
#: Numbers of a range in one block, which are in memory together.
RANGE_BLOCK_ROWS = 1 << 22


class TableSource(RememberingSource):
    """A table as one block. ``unit`` names a row in errors: "item 17"."""

    in_memory = True
    cheap_to_decode = True

    def __init__(self, table: pa.Table, unit: str = "row") -> None:
        super().__init__()
        self._table, self._unit = plain_table(table), unit

    def __getstate__(self) -> dict[str, Any]:
        # As a stream, because Arrow pickles the whole array of a slice.
        return {**self.__dict__, "_table": _as_stream(self._table)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._table = pa.ipc.open_stream(state["_table"]).read_all()

    def _inspect_data(self) -> SourceFacts:
        block = BlockFacts(self._table.num_rows, self._table.nbytes)
        return SourceFacts((block,), self._table.schema, content_hash(self._table))

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        table = self._table if columns is None else self._table.select(list(columns))
        yield from _batches(table)

    def name_row(self, block: int, row: int) -> str:
        return f"{self._unit} {row}"

    def publish(self, directory: str) -> Source:
        """Write the table to a file named after its content, so that publishing it again finds the file."""
        facts = self.inspect()
        path = os.path.join(directory, f"{facts.fingerprint}.arrow")
        if not os.path.exists(path):
            _write_table(self._table, path)
        return MappedSource(path, facts, self._unit)


class MappedSource(Source):
    """A table in an Arrow file of this machine, mapped into memory: one block."""

    in_memory = True
    cheap_to_decode = True

    def __init__(self, path: str, facts: SourceFacts, unit: str = "row") -> None:
        self._path, self._facts, self._unit = path, facts, unit

    def inspect(self) -> SourceFacts:
        return self._facts

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        try:
            with pa.memory_map(self._path) as mapped, pa.ipc.open_file(mapped) as file:
                table = file.read_all()
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"The rows that were in memory when training began cannot be read from {self._path!r}: {error}. Start "
                "the run again, which writes them anew."
            ) from error
        yield from _batches(table if columns is None else table.select(list(columns)))

    def name_row(self, block: int, row: int) -> str:
        return f"{self._unit} {row}"


class RangeSource(RememberingSource):
    """The numbers from 0 to ``n - 1`` in the column "id", made when they are read."""

    cheap_to_decode = True

    def __init__(self, n: int, block_rows: int = RANGE_BLOCK_ROWS) -> None:
        super().__init__()
        self._n, self._block_rows = n, block_rows
        self.in_memory = n <= block_rows

    def _inspect_data(self) -> SourceFacts:
        blocks = []
        for first in range(0, max(self._n, 1), self._block_rows):
            rows = min(self._block_rows, self._n - first)
            blocks.append(BlockFacts(rows, 8 * rows))
        return SourceFacts(tuple(blocks), pa.schema([("id", pa.int64())]), f"range-{self._n}")

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        first = block * self._block_rows
        numbers = np.arange(first, min(first + self._block_rows, self._n), dtype=np.int64)
        if columns is not None and not columns:
            yield with_rows_only(len(numbers))
        elif len(numbers):
            yield pa.RecordBatch.from_arrays([pa.array(numbers)], schema=self.inspect().schema)

    def name_row(self, block: int, row: int) -> str:
        return f"number {block * self._block_rows + row}"


# --------------------------------------------------------------------------- tables and batches


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    if table.num_columns == 0:
        yield with_rows_only(table.num_rows)
    else:
        yield from moderate(table.to_batches(), most=_BATCH_BYTES, each=_BATCH_BYTES)


def _as_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _write_table(table: pa.Table, path: str) -> None:
    """Write a file atomically, also when several processes or threads write it."""
    temporary = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with pa.OSFile(temporary, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            for batch in _batches(table):
                writer.write_batch(batch)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(
            f"The rows in memory ({table.nbytes} bytes) could not be written to {path!r} for the workers: "
            f"{error.strerror or error}. Free space there, or choose another storage path."
        ) from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
