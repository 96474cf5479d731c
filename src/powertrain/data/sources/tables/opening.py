"""What the sources of versioned tables share: their optional packages, addresses, messages and sizes."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pyarrow as pa

from powertrain.data.arguments import ODD, path_text, shortened, shown
from powertrain.data.sources.plain import as_type, moderate
from powertrain.errors import DataError
from powertrain.storage.addresses import without_secrets

#: Decoded bytes up to which a block is read into one batch; a larger one is read in batches of about the second.
ONE_BATCH_BYTES = 64 << 20
BATCH_BYTES = 32 << 20
#: The place in the library's own source that messages of Rust libraries end with, and colours of the terminal.
_NOISE = re.compile(r",? ?/\S+\.rs:\d+(:\d+)?|\x1b\[\d+m")


def import_package(method: str, module: str, name: str, extra: str) -> Any:
    """Return an optional package; raises :class:`DataError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{method}() needs {name}, which is not installed. Run: pip install 'powertrain[{extra}]'."
        ) from error


@contextmanager
def as_data_error(where: str, remedy: str) -> Iterator[None]:
    """Turn errors of a library into a :class:`DataError`, its message between ``where`` and ``remedy``."""
    try:
        yield
    except DataError:
        raise
    except ODD as error:
        raise DataError(f"{where}: {reason_of(error)}. {remedy}") from error


def opening_table(kind: str, uri: str, version: int | str | None) -> AbstractContextManager[None]:
    """Turn errors of opening a table into a :class:`DataError`."""
    at = "" if version is None else f" at version {shown(version)}"
    return as_data_error(
        f"The {kind} {without_secrets(uri)!r}{at} cannot be opened",
        "Check the path, the version, and storage_options for the credentials of an object store.",
    )


def table_address(name: str, given: Any) -> str:
    """Return an address, or an absolute path: ranks have other working directories."""
    found = path_text(name, given)
    return found if "://" in found else os.path.abspath(os.path.expanduser(found))


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error on one line."""
    words = " ".join(_NOISE.sub("", str(error)).split()).rstrip(". ")
    return shortened(words, 300) or type(error).__name__


def shaped(batches: Iterable[pa.RecordBatch], wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches of moderate size with exactly these columns, in their plain types; a missing column is null."""
    yield from moderate((_shaped(batch, wanted) for batch in batches), most=ONE_BATCH_BYTES, each=BATCH_BYTES)


def _shaped(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    arrays: list[Any] = []
    for field in wanted:
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        else:
            arrays.append(as_type(batch.column(place), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def checked_rows(batches: Iterable[pa.RecordBatch], rows: int, where: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches; raises :class:`DataError` at their end where their rows are not as many as were counted."""
    found = 0
    for batch in batches:
        found += batch.num_rows
        yield batch
    if found != rows:
        raise DataError(
            f"{where} gave {found} rows, and {rows} were counted when it was inspected: its files have changed. Keep "
            "the table's files as they are during a run, or start the run again."
        )


def row_bytes(schema: pa.Schema, stored: int, rows: int) -> int:
    """Return the estimated bytes of a decoded row: of the types with a fixed width, and at least those stored."""
    fixed = sum(_bytes(field.type) for field in schema)
    return max(1, fixed, stored // max(rows, 1))


def _bytes(given: Any) -> int:
    if isinstance(given, pa.BaseExtensionType):
        return _bytes(given.storage_type)
    if pa.types.is_fixed_size_list(given):
        return _bytes(given.value_type) * int(given.list_size)
    try:
        return max(1, int(given.bit_width) // 8)
    except ValueError:
        return 16  # text and lists, of which little is known


def fields_of(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of these columns, in this order."""
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])
