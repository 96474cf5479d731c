"""Output files: complete files under new names, all of them or none."""

from __future__ import annotations

import datetime
import decimal
import enum
import itertools
import json
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from powertrain.data.arguments import ODD, optional_whole, path_text, shortened, shown
from powertrain.data.output.formats.partitions import is_partitioned, partitions
from powertrain.data.output.tables import as_lists, conformed, pieces_by_bytes, schema_to_write
from powertrain.data.plan.plan import Plan
from powertrain.data.sources.files.files import as_arrow_filesystem
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.storage.base import Storage

#: Approximate bytes in memory of the rows of a file.
FILE_BYTES = 128 * 2**20
#: A row group of Parquet is the unit that readers decode and shuffle.
ROW_GROUP_BYTES = 32 * 2**20
MODES = ("append", "overwrite", "ignore", "error")


class SaveMode(str, enum.Enum):
    """Modes of the ``write_...`` methods, as Ray Data names them."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    IGNORE = "ignore"
    ERROR = "error"


#: Writes a table to a local path.
WriteTable = Callable[[pa.Table, str], None]
_MIXED = "Let the function that makes it return one type, or call materialize() first, which finds a type for all rows."


def write_files(
    plan: Plan,
    tables: Iterable[pa.Table],
    columns_if_empty: Callable[[], pa.Schema],
    path: str,
    *,
    suffix: str,
    write: WriteTable,
    mode: str = "append",
    filesystem: Any = None,
    min_rows_per_file: int | None = None,
    max_rows_per_file: int | None = None,
    partition_cols: Sequence[str] = (),
    rows_are_files: bool = False,
    has_schema: bool = True,
) -> None:
    """Write the rows of ``plan`` to files in the directory ``path``, which is made where it is missing.

    With ``partition_cols`` the files are in directories by the values of these columns. ``rows_are_files`` makes a file
    of each row, and none where there are no rows. A format without ``has_schema`` may have rows of different types. The
    files appear under their names when all of them are complete; after a failure none is left. Names follow the
    time, so that files of a later call come after those of an earlier one, and never take an existing name.
    """
    mode = _checked_mode(mode)
    min_rows_per_file = optional_whole("min_rows_per_file", min_rows_per_file, 1)
    max_rows_per_file = optional_whole("max_rows_per_file", max_rows_per_file, 1)
    _check_rows(min_rows_per_file, max_rows_per_file)
    path = path_text("path", path)
    as_arrow_filesystem(filesystem)  # to refuse other objects
    target = _opened(path, filesystem)
    before = target.files(suffix)
    if before and mode == "ignore":
        return
    if before and mode == "error":
        raise DataError(
            f"{path} already has {len(before)} .{suffix} files, such as {before[0]!r}, and mode='error' forbids to add "
            "to them. Choose another directory, or mode='append' or 'overwrite'."
        )
    stamp = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}"
    pieces: Iterable[pa.Table]
    if rows_are_files:
        pieces = (table.slice(row, 1) for table in tables for row in range(table.num_rows))
    else:
        pieces = pieces_by_bytes(tables, FILE_BYTES, fewest=min_rows_per_file or 0, most=max_rows_per_file)
        pieces = _typed(plan, pieces, columns_if_empty) if has_schema else pieces
    try:
        numbers = itertools.count()
        for piece in pieces:
            for directory, part in partitions(piece, partition_cols):
                name = f"{stamp}-{next(numbers):06d}.{suffix}"
                target.add(f"{directory}/{name}" if directory else name, part, write)
        target.finish()
    except BaseException:
        target.undo()
        raise
    if mode == "overwrite":
        target.remove(before)


def _typed(
    plan: Plan, pieces: Iterable[pa.Table], columns_if_empty: Callable[[], pa.Schema]
) -> Iterator[pa.Table]:
    """Yield the pieces, all of one schema; an empty one where there are none, so that the columns are known."""
    schema: pa.Schema | None = None
    for piece in pieces:
        if schema is None:
            schema = schema_to_write(plan, piece.schema)
        yield conformed(piece, schema, _MIXED)
    if schema is None:
        yield columns_if_empty().empty_table()


def _checked_mode(mode: Any) -> str:
    given = (
        mode
        if isinstance(mode, str)
        else getattr(mode, "value", None)
        if isinstance(mode, enum.Enum)
        else None
    )
    text = given.lower() if isinstance(given, str) else ""
    if text not in MODES:
        raise DataError(f"mode={shown(mode)} is not valid: it must be one of {', '.join(map(repr, MODES))}.")
    return text


def _check_rows(fewest: int | None, most: int | None) -> None:
    if fewest is not None and most is not None and fewest > most:
        raise DataError(
            f"min_rows_per_file={fewest} is more than max_rows_per_file={most}. Give a range that a file can be in."
        )


# --------------------------------------------------------------------------- destinations


class Target(Protocol):
    """A directory that files are added to."""

    def files(self, suffix: str) -> list[str]:
        """Return the names of existing files with this suffix, also in "key=value" directories, except hidden ones."""

    def add(self, name: str, table: pa.Table, write: WriteTable) -> None:
        """Write one file."""

    def finish(self) -> None:
        """Publish all added files under their names."""

    def undo(self) -> None:
        """Remove all added files."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove existing files."""


def _opened(path: str, filesystem: Any) -> Target:
    from powertrain.storage.local import LocalStorage
    from powertrain.storage.opening import open_storage

    storage = open_storage(path, filesystem=filesystem)
    return _LocalTarget(Path(storage.uri)) if isinstance(storage, LocalStorage) else _StoreTarget(storage)


def _is_output(name: str, suffix: str) -> bool:
    return name.endswith(f".{suffix}") and not name.rpartition("/")[2].startswith((".", "_"))


class _LocalTarget:
    """A directory of this machine. Files are hidden until all are complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hidden: list[tuple[Path, Path]] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DataError(
                f"{directory} is a file, and rows are written to files in a directory. Choose another path."
            ) from error

    def files(self, suffix: str) -> list[str]:
        found = []
        for root, directories, entries in os.walk(self._directory):
            directories[:] = [name for name in directories if "=" in name]
            names = [os.path.relpath(os.path.join(root, name), self._directory) for name in entries]
            found += [name for name in names if _is_output(name, suffix)]
        return sorted(found)

    def add(self, name: str, table: pa.Table, write: WriteTable) -> None:
        from powertrain.storage.base import temporary_name

        hidden = self._directory / temporary_name()
        self._hidden.append((hidden, self._directory / name))
        write(table, str(hidden))
        with open(hidden, "rb") as file:
            os.fsync(file.fileno())

    def finish(self) -> None:
        for hidden, final in self._hidden:
            if final.parent != self._directory:  # of partitioned files
                final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(hidden, final)

    def undo(self) -> None:
        for hidden, final in self._hidden:
            hidden.unlink(missing_ok=True)
            final.unlink(missing_ok=True)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._directory / name).unlink(missing_ok=True)


class _StoreTarget:
    """An object store, or a user's file system: it has no hidden files, so each file appears when it is complete."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._added: list[str] = []

    def files(self, suffix: str) -> list[str]:
        names = (entry.key for entry in self._storage.list())
        return [name for name in names if is_partitioned(name) and _is_output(name, suffix)]

    def add(self, name: str, table: pa.Table, write: WriteTable) -> None:
        with tempfile.TemporaryDirectory(prefix="powertrain-") as directory:
            path = os.path.join(directory, name.rpartition("/")[2])
            write(table, path)
            self._added.append(name)
            self._storage.put_file(name, path, digest=False)

    def finish(self) -> None:
        self._added.clear()

    def undo(self) -> None:
        self.remove(self._added)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._storage.delete(name)


# --------------------------------------------------------------------------- file formats


def parquet_writer(arguments: dict[str, Any]) -> WriteTable:
    """Return a writer of Parquet with pyarrow's arguments. Row groups have :data:`ROW_GROUP_BYTES` by default."""
    import pyarrow.parquet as parquet

    nothing = pa.table({"column": pa.nulls(0)})
    _check_arguments("write_parquet", "pyarrow.parquet.write_table", parquet.write_table, nothing, arguments)

    def write(table: pa.Table, path: str) -> None:
        rows = max(1, int(table.num_rows * ROW_GROUP_BYTES / max(table.nbytes, 1)))
        try:
            parquet.write_table(table, path, **{"row_group_size": min(rows, 2**20), **arguments})
        except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError) as error:
            given = ", ".join(f"{name}={shown(value)}" for name, value in arguments.items()) or "no arguments"
            raise DataError(
                f"The rows cannot be written as Parquet with {given}: {shortened(str(error), 300)}. "
                "Check these arguments, which are those of pyarrow.parquet.write_table, and the types of the columns."
            ) from error

    return write


def csv_writer(arguments: dict[str, Any]) -> WriteTable:
    """Return a writer of CSV with a header line, with pyarrow's arguments."""
    import pyarrow.csv as csv

    nothing = pa.table({"column": pa.nulls(0)})
    _check_arguments("write_csv", "pyarrow.csv.write_csv", csv.write_csv, nothing, arguments)

    def write(table: pa.Table, path: str) -> None:
        for field in table.schema:
            if pa.types.is_nested(field.type) or isinstance(field.type, pa.BaseExtensionType):
                raise DataError(
                    f"The column {field.name!r} has the type {field.type}, and CSV has plain values only. Drop it with "
                    "drop_columns(), turn it into text with map(), or use write_parquet() or write_json()."
                )
        table = _with_text_for_bytes(table)
        try:
            csv.write_csv(table, path, **arguments)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise DataError(
                f"The rows cannot be written as CSV: {str(error).rstrip('.')}. The columns are "
                f"{', '.join(f'{field.name!r} ({field.type})' for field in table.schema)}. Turn what CSV has no form "
                "for into numbers or text with map(), or use write_parquet()."
            ) from error

    return write


def _check_arguments(
    method: str, function: str, write: Callable[..., object], nothing: pa.Table, arguments: dict[str, Any]
) -> None:
    """Raise for arguments that Arrow does not know (``TypeError``) or cannot use (:class:`DataError`), before any row
    is made."""
    try:
        write(nothing, pa.BufferOutputStream(), **arguments)
    except (pa.ArrowException, ValueError, KeyError):
        pass  # they may name columns, which are not known yet
    except ODD as error:
        given = ", ".join(f"{name}={shown(value)}" for name, value in arguments.items())
        is_unknown = isinstance(error, TypeError) and "unexpected keyword" in str(error)
        raise (TypeError if is_unknown else DataError)(
            f"{method}() was given {given}, which cannot be used: {type(error).__name__}: {str(error)[:200]}. Beside "
            f"its own arguments it takes those of {function}."
        ) from error


def _with_text_for_bytes(table: pa.Table) -> pa.Table:
    """Return bytes as UTF-8 text; raises :class:`DataError` where they are not text."""
    for place, field in enumerate(table.schema):
        if _holds_bytes(field.type):
            try:
                text = table.column(place).cast(pa.large_binary()).cast(pa.large_string())
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"The column {field.name!r} holds bytes that are no text in UTF-8, and CSV has no other form for "
                    "them. Drop it with drop_columns(), turn it into text with map(), or use write_parquet()."
                ) from error
            table = table.set_column(place, field.name, text)
    return table


def _holds_bytes(kind: Any) -> bool:
    """Return whether values are bytes, or contain some."""
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_bytes(kind.storage_type)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return not pa.types.is_decimal(kind)
    return any(_holds_bytes(kind.field(place).type) for place in range(kind.num_fields))


def json_writer() -> WriteTable:
    """Return a writer of JSON lines. Values unknown to JSON become text (times, decimals) or null (NaN, infinity)."""

    def write(table: pa.Table, path: str) -> None:
        for field in table.schema:
            if _holds_bytes(field.type):
                raise DataError(
                    f"The column {field.name!r} holds bytes, and JSON has no form for them. Drop it with "
                    "drop_columns(), turn it into text with map(), or use write_parquet()."
                )
        with open(path, "w", encoding="utf-8") as file:
            for batch in _with_lists_for_tensors(table).to_batches(max_chunksize=1024):
                file.writelines(
                    json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in batch.to_pylist()
                )

    return write


def numpy_writer(column: str) -> WriteTable:
    """Return a writer of one column as a numpy array."""
    import numpy as np

    from powertrain.data.rows.formats import from_arrow, to_numpy
    from powertrain.data.sources.plain import checked_columns

    def write(table: pa.Table, path: str) -> None:
        checked_columns([column], table.column_names, "the data")
        values = to_numpy(from_arrow(table.select([column]), np.arange(table.num_rows)))[column]
        if values.dtype == object:
            raise DataError(
                f"The column {column!r} cannot be written as a numpy array: its values have different shapes, or are "
                "text or None. Write numbers, or arrays of one shape; for others use write_parquet()."
            )
        with open(path, "wb") as file:
            np.save(file, values, allow_pickle=False)

    return write


def _with_lists_for_tensors(table: pa.Table) -> pa.Table:
    """Return tensors as nested lists: as Python values they would be flat."""
    for place, field in enumerate(table.schema):
        if isinstance(field.type, pa.FixedShapeTensorType):
            lists = [as_lists(chunk) for chunk in table.column(place).chunks]
            table = table.set_column(place, field.name, pa.chunked_array(lists or [pa.array([], pa.null())]))
    return table


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta)):
        return str(value)
    if hasattr(value, "tolist"):  # a numpy array or scalar
        return _plain(value.tolist())
    return value
