"""DuckDB, within a memory budget and with a directory of its own to spill to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import pyarrow as pa

from powertrain.data.loading.loader import MEMORY_ALONE
from powertrain.data.loading.scratch import Scratch
from powertrain.data.options.context import memory_limit
from powertrain.errors import DataError

#: Rows of a batch of results: a multiple of DuckDB's own vectors.
BATCH_ROWS = 60 * 2048
#: Memory that DuckDB needs for each of its threads to sort, group and join while it spills.
_BYTES_OF_A_THREAD = 64 * 2**20
#: Name of the column that numbers the rows of an input.
ROW = "__powertrain_row"


class Database:
    """A database in memory, for one query. ``with`` closes it and removes its spilled files."""

    def __init__(self, what: str) -> None:
        """``what`` names the operation in errors: "sort()"."""
        self._duckdb = _imported(what)
        self._what = what
        self._scratch = Scratch()
        self._failure: BaseException | None = None
        budget = max(memory_limit(MEMORY_ALONE), _BYTES_OF_A_THREAD)
        threads = max(1, min(len(os.sched_getaffinity(0)), budget // _BYTES_OF_A_THREAD))
        settings = {
            "memory_limit": f"{budget // 2**20}MiB",
            "temp_directory": self._scratch.path,
            "threads": threads,
            # Every query says its order.
            "preserve_insertion_order": False,
            # Neither the user's own settings nor their extensions take part.
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        }
        try:
            self._connection = self._duckdb.connect(":memory:", config=settings)
            self._connection.execute("SET TimeZone = 'UTC'")
            self._connection.execute("SET enable_progress_bar = false")
        except BaseException:
            self._scratch.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(self._duckdb.Error):
            self._connection.close()
        self._scratch.close()

    def add(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Let queries read these rows, once, as the table ``name``."""
        reader = pa.RecordBatchReader.from_batches(schema, self._watched(batches))
        self._connection.register(name, reader)

    def query(self, query: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Return the types of a query's result, and its rows."""
        with self._explained():
            relation: Any = self._connection.sql(query)
            # Renamed in version 1.5 of DuckDB.
            reader_of = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
            reader = reader_of(BATCH_ROWS)
        return reader.schema, self._batches(reader)

    def _batches(self, reader: Any) -> Iterator[pa.RecordBatch]:
        while True:
            with self._explained():
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    return
            if batch.num_rows:
                yield batch

    def _watched(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the same batches, and keep an error: of one raised inside of Arrow only the text would be left."""
        try:
            yield from batches
        except BaseException as error:
            self._failure = error
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (self._duckdb.Error, pa.ArrowException, OSError) as error:
            if self._failure is not None:
                raise self._failure from None
            raise DataError(self._sentence(error)) from error

    def _sentence(self, error: BaseException) -> str:
        reason = str(error).partition("\n")[0].rstrip(".")[:300]
        if isinstance(error, self._duckdb.OutOfMemoryException) or "Out of Memory" in reason:
            return (
                f"{self._what} needs more memory than it may use ({reason}). Raise "
                "DataContext.get_current().execution_options.resource_limits.object_store_memory, in bytes."
            )
        return f"{self._what} failed in DuckDB: {reason}. Check the types and values of the columns that it uses."


def _imported(what: str) -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise DataError(
            f"{what} needs DuckDB, which is not installed. Run: pip install 'powertrain[duckdb]'."
        ) from error
    return duckdb
