"""Lance datasets: a block is a range of the rows of a fragment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import xxhash

from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.plain import checked_columns, plain_schema, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.data.sources.tables.opening import (
    as_data_error,
    checked_rows,
    fields_of,
    import_package,
    opening_table,
    reason_of,
    row_bytes,
    shaped,
)
from powertrain.errors import DataError
from powertrain.storage.addresses import without_secrets

#: The most rows of a block, and about its most decoded bytes.
_BLOCK_ROWS = 65536
_BLOCK_BYTES = 32 << 20
#: Columns that Lance adds on request; they can be named like any other.
_ROW_MARKS = {"with_row_id": "_rowid", "with_row_address": "_rowaddr"}


@dataclass(frozen=True)
class LanceTable:
    """One version of a Lance dataset."""

    uri: str
    version: int
    #: Credentials may be among them.
    storage_options: dict[str, str] | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        return without_secrets(self.uri)


@dataclass(frozen=True)
class LanceScan:
    """The rows and columns to read: arguments of Lance's scanner."""

    #: Names, or names with SQL expressions; None for all columns.
    columns: tuple[str, ...] | dict[str, str] | None = None
    filter: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    #: Numbers of the fragments to read; None for all.
    fragments: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _RowRange:
    table: int
    fragment: int
    first: int


def open_table(uri: str, version: int | str | None, storage_options: dict[str, str] | None) -> Any:
    """Return a ``lance.LanceDataset``; raises :class:`DataError` if it or this version does not exist."""
    lance = import_package("read_lance", "lance", "Lance", "lance")
    with opening_table("Lance dataset", uri, version):
        return lance.dataset(uri, version=version, storage_options=storage_options)


class LanceSource(RememberingSource):
    """The rows of one or several Lance datasets, each at one version. Deleted rows are left out by Lance."""

    def __init__(self, tables: Sequence[LanceTable], scan: LanceScan) -> None:
        super().__init__()
        self._tables, self._scan = tuple(tables), scan
        self._ranges: tuple[_RowRange, ...] = ()
        self._opened = _Opened()

    @property
    def cache_key(self) -> str:
        places = [(table.uri, table.version) for table in self._tables]
        return f"{self.inspect().fingerprint}/{places}/{sorted(map(repr, self._scan.options.items()))}"

    # -- inspection

    def _inspect_data(self) -> SourceFacts:
        schema = self._common_schema()
        digest = xxhash.xxh3_128(b"lance-1\0")
        digest.update(f"{self._scan.filter}\0{_expressions(self._scan.columns)}\0".encode())
        ranges: list[_RowRange] = []
        blocks: list[BlockFacts] = []
        for number, table in enumerate(self._tables):
            digest.update(f"{table.version}\0".encode())
            for fragment in self._fragments(number):
                found = fragment.metadata
                digest.update(f"{found.id}\0{found.physical_rows}\0{found.deletion_file}\0".encode())
                digest.update("\0".join(file.path for file in found.files).encode())
                stored = sum(file.file_size_bytes or 0 for file in found.files)
                width = row_bytes(schema, stored, found.physical_rows or 1)
                each = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // width))
                rows = self._counted(table, fragment)
                for first in range(0, rows, each):
                    ranges.append(_RowRange(number, found.id, first))
                    blocks.append(BlockFacts(min(each, rows - first), min(each, rows - first) * width))
        self._ranges = tuple(ranges)
        return SourceFacts(tuple(blocks), schema, digest.hexdigest())

    def _common_schema(self) -> pa.Schema:
        """Return the columns of all datasets; raises where a column has two types."""
        found = []
        for number, table in enumerate(self._tables):
            chosen = self._scan.columns
            if chosen is not None and not isinstance(chosen, dict):
                there = [*self._dataset(number).schema.names, *_ROW_MARKS.values()]
                checked_columns(
                    [name for name in chosen if "." not in name], there, f"the Lance dataset {table.shown!r}"
                )
            with _reporting(table, "scanned"):
                found.append(plain_schema(self._scanner(number, chosen, self._scan.options).projected_schema))
        try:
            return pa.unify_schemas(found)
        except pa.ArrowException as error:
            raise DataError(
                f"The Lance datasets {', '.join(repr(table.shown) for table in self._tables[:5])} have different types "
                f"in a column: {reason_of(error)}. Read them apart and cast before union()."
            ) from error

    def _fragments(self, number: int) -> list[Any]:
        found = self._dataset(number).get_fragments()
        if self._scan.fragments is None:
            return list(found)
        by_id = {fragment.fragment_id: fragment for fragment in found}
        missing = [one for one in self._scan.fragments if one not in by_id]
        if missing:
            raise DataError(
                f"The Lance dataset {self._tables[number].shown!r} has no fragment {missing[0]} at version "
                f"{self._tables[number].version}. Take fragments of its get_fragments()."
            )
        return [by_id[one] for one in self._scan.fragments]

    def _counted(self, table: LanceTable, fragment: Any) -> int:
        with _reporting(table, "counted"):
            return int(fragment.count_rows(self._scan.filter))

    # -- reading

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        facts, place = self.inspect(), self._ranges[block]
        rows, wanted = facts.blocks[block].rows, fields_of(facts.schema, columns)
        if not wanted.names:
            yield with_rows_only(rows)
            return
        table = self._tables[place.table]
        where = f"Fragment {place.fragment} of the Lance dataset {table.shown!r}"
        with _reporting(table, "read"):
            yield from checked_rows(shaped(self._batches(place, rows, wanted.names), wanted), rows, where)

    def _batches(self, place: _RowRange, rows: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        dataset, chosen = self._dataset(place.table), self._scan.columns
        projection: Any
        if isinstance(chosen, dict):
            projection = {name: chosen.get(name, name) for name in names}
        elif chosen is None:  # one of several datasets may lack columns that the others have
            there = {*dataset.schema.names, *_ROW_MARKS.values()}
            projection = [name for name in names if name in there] or dataset.schema.names[:1]
        else:
            projection = list(names)
        options = {name: value for name, value in self._scan.options.items() if name not in _ROW_MARKS}
        options |= {"fragments": [dataset.get_fragment(place.fragment)], "limit": rows, "offset": place.first}
        yield from self._scanner(place.table, projection, options).to_reader()

    def _scanner(self, number: int, columns: Any, options: Mapping[str, Any]) -> Any:
        projection = list(columns) if isinstance(columns, tuple) else columns
        return self._dataset(number).scanner(
            columns=projection, filter=self._scan.filter, scan_in_order=True, **options
        )

    def _dataset(self, number: int) -> Any:
        return self._opened.table(self._tables[number])

    def name_row(self, block: int, row: int) -> str:
        place = self._ranges[block]
        return f"{self._tables[place.table].shown}, fragment {place.fragment}, row {place.first + row}"

    def select(self, columns: Sequence[str]) -> Source | None:
        if isinstance(self._scan.columns, tuple):
            checked_columns(columns, self._scan.columns, "the data")
        elif self._scan.columns is not None or any(name in self._scan.options for name in _ROW_MARKS):
            return None
        chosen = LanceSource(self._tables, replace(self._scan, columns=tuple(columns)))
        chosen._ranges, chosen._opened = self._ranges, self._opened
        if self._facts is not None:
            checked_columns(columns, self._facts.schema.names, "the data")
            chosen._facts = replace(self._facts, schema=fields_of(self._facts.schema, columns))
        return chosen


class _Opened:
    """The open datasets of this process. Thread-safe; empty after unpickling."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Any] = {}
        self._guard = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Opened, ())

    def table(self, wanted: LanceTable) -> Any:
        key = (wanted.uri, wanted.version)
        with self._guard:
            if key not in self._kept:
                self._kept[key] = open_table(wanted.uri, wanted.version, wanted.storage_options)
            return self._kept[key]


def _reporting(table: LanceTable, done: str) -> AbstractContextManager[None]:
    """Turn errors of Lance into a :class:`DataError`."""
    return as_data_error(
        f"The Lance dataset {table.shown!r} cannot be {done} at version {table.version}",
        "Check columns, filter and scanner_options, and that this version was not cleaned up.",
    )


def _expressions(columns: Any) -> str:
    return repr(sorted(columns.items())) if isinstance(columns, dict) else ""
