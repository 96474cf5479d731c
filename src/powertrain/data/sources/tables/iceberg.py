"""Iceberg tables: the data files of one snapshot, each a block, read by PyIceberg, which applies deletes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import xxhash

from powertrain.data.arguments import ODD, shown
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.plain import checked_columns, plain_schema, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.data.sources.tables.opening import (
    as_data_error,
    checked_rows,
    fields_of,
    import_package,
    reason_of,
    row_bytes,
    shaped,
)
from powertrain.errors import DataError
from powertrain.storage.addresses import without_secrets


@dataclass(frozen=True)
class IcebergSnapshot:
    """One snapshot of an Iceberg table, with its metadata as they were when it was looked up."""

    name: str
    #: None for a table without snapshots, which has no rows.
    snapshot_id: int | None
    metadata: Any = field(repr=False)
    #: PyIceberg's access to the files, with the credentials of the catalog.
    io: Any = field(repr=False)


@dataclass(frozen=True)
class IcebergScan:
    """The rows and columns to read: arguments of ``Table.scan()``."""

    row_filter: Any = None
    fields: tuple[str, ...] = ("*",)
    case_sensitive: bool = True
    options: dict[str, str] = field(default_factory=dict)
    #: True where the snapshot was named, whose columns are then read; else the table's present ones are.
    is_time_travel: bool = False


def find_snapshot(
    name: str, snapshot_id: int | None, catalog_arguments: Mapping[str, Any]
) -> IcebergSnapshot:
    """Look up a table; raises :class:`DataError` if the table or the snapshot does not exist."""
    catalogs = import_package("read_iceberg", "pyiceberg.catalog", "PyIceberg", "iceberg")
    try:
        catalog = catalogs.load_catalog(**catalog_arguments)
    except ODD as error:
        raise DataError(
            f"read_iceberg(): the catalog {shown(catalog_arguments.get('name', 'default'))} cannot be loaded: "
            f"{reason_of(error)}. Check catalog_kwargs, or the file .pyiceberg.yaml."
        ) from error
    try:
        table = catalog.load_table(name)
    except ODD as error:
        raise DataError(
            f"The Iceberg table {name!r} cannot be loaded: {reason_of(error)}. Check table_identifier "
            "('namespace.table') and catalog_kwargs."
        ) from error
    finally:
        close = getattr(catalog, "close", None)
        if close is not None:
            close()
    metadata = table.metadata
    if snapshot_id is None:
        snapshot_id = metadata.current_snapshot_id
    elif metadata.snapshot_by_id(snapshot_id) is None:
        there = ", ".join(str(each.snapshot_id) for each in metadata.snapshots[-5:])
        raise DataError(
            f"The Iceberg table {name!r} has no snapshot {snapshot_id}: it never had it, or it has expired. The newest "
            f"are: {there or 'none'}."
        )
    return IcebergSnapshot(name, snapshot_id, metadata, table.io)


class IcebergSource(RememberingSource):
    """The rows of one snapshot of an Iceberg table."""

    def __init__(
        self, table: IcebergSnapshot, scan: IcebergScan, columns: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self._table, self._scan, self._columns = table, scan, columns
        self._tasks: tuple[Any, ...] = ()
        #: PyIceberg's schema of the columns, and its condition.
        self._projection: Any = None
        self._filter: Any = None

    def __getstate__(self) -> dict[str, Any]:
        if self._facts is None:
            return self.__dict__
        # The history of a table is long, and reading needs its schemas and partitions only.
        nothing: dict[str, Any] = {"snapshots": [], "snapshot_log": [], "metadata_log": [], "refs": {}}
        metadata = self._table.metadata.model_copy(update=nothing)
        return {**self.__dict__, "_table": replace(self._table, metadata=metadata)}

    @property
    def cache_key(self) -> str:
        where = (self._table.name, self._table.metadata.location, self._table.snapshot_id)
        return f"{self.inspect().fingerprint}/{where}"

    # -- inspection

    def _inspect_data(self) -> SourceFacts:
        from pyiceberg.expressions import AlwaysTrue

        with _reporting(self._table, "planned"):
            scan = self._planned()
            self._projection = scan.projection()
            self._filter = scan.row_filter
            tasks = [] if self._table.snapshot_id is None else list(scan.plan_files())
        schema = self._in_order(self._arrow_schema())
        digest = xxhash.xxh3_128(f"iceberg-1\0{self._table.metadata.table_uuid}\0".encode())
        digest.update(f"{self._table.snapshot_id}\0{self._filter!r}\0{self._scan.case_sensitive}\0".encode())
        blocks, kept = [], []
        for task in tasks:
            digest.update(f"{_file_name(task.file)}\0{task.file.record_count}\0".encode())
            for deletes in sorted(map(_file_name, task.delete_files)):
                digest.update(f"{deletes}\0".encode())
            is_whole = not task.delete_files and task.residual == AlwaysTrue()
            rows = task.file.record_count if is_whole else self._counted(task)
            width = row_bytes(schema, task.file.file_size_in_bytes, task.file.record_count)
            if rows:
                blocks.append(BlockFacts(rows, rows * width))
                kept.append(_without_statistics(task))
        self._tasks = tuple(kept)
        return SourceFacts(tuple(blocks), schema, digest.hexdigest())

    def _planned(self) -> Any:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.table import DataScan

        return DataScan(
            table_metadata=self._table.metadata,
            io=self._table.io,
            row_filter=AlwaysTrue() if self._scan.row_filter is None else self._scan.row_filter,
            selected_fields=self._scan.fields,
            case_sensitive=self._scan.case_sensitive,
            snapshot_id=self._table.snapshot_id if self._scan.is_time_travel else None,
            options=self._scan.options,
        )

    def _arrow_schema(self) -> pa.Schema:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        return plain_schema(schema_to_pyarrow(self._projection, include_field_ids=False))

    def _in_order(self, schema: pa.Schema) -> pa.Schema:
        if self._columns is not None:
            checked_columns(self._columns, schema.names, f"the Iceberg table {self._table.name!r}")
        return fields_of(schema, self._columns)

    def _counted(self, task: Any) -> int:
        """Return the rows of a file that are not deleted and fit the filter; reads one column and those it names."""
        names = [column.name for column in self._projection.fields[:1]]
        with _reporting(self._table, "counted"):
            return sum(batch.num_rows for batch in self._batches(task, names))

    # -- reading

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        facts, task = self.inspect(), self._tasks[block]
        rows, wanted = facts.blocks[block].rows, fields_of(facts.schema, columns)
        if not wanted.names:
            yield with_rows_only(rows)
            return
        where = f"The file {_shown_file(task.file)} of the Iceberg table {self._table.name!r}"
        with _reporting(self._table, "read"):
            yield from checked_rows(shaped(self._batches(task, wanted.names), wanted), rows, where)

    def _batches(self, task: Any, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        from pyiceberg.io import pyarrow as reading

        projected = self._projection.select(*names)
        scan = reading.ArrowScan(
            self._table.metadata, self._table.io, projected, self._filter, self._scan.case_sensitive
        )
        try:
            read_deletes = reading._read_all_delete_files
            stream = scan._record_batches_from_scan_tasks_and_deletes
        except AttributeError:  # of another version: the public method holds a decoded file in memory
            yield from scan.to_record_batches([task])
            return
        yield from stream([task], read_deletes(self._table.io, [task]))

    def name_row(self, block: int, row: int) -> str:
        return f"{self._table.name}, {_file_name(self._tasks[block].file)}, row {row}"

    def select(self, columns: Sequence[str]) -> Source:
        if self._columns is not None:
            checked_columns(columns, self._columns, "the data")
        chosen = IcebergSource(self._table, self._scan, tuple(columns))
        if self._facts is not None:
            checked_columns(columns, self._facts.schema.names, "the data")
            chosen._tasks, chosen._projection, chosen._filter = self._tasks, self._projection, self._filter
            chosen._facts = replace(self._facts, schema=fields_of(self._facts.schema, columns))
        return chosen

    def glimpse(self) -> pa.Schema:
        if self._facts is not None:
            return self._facts.schema
        with _reporting(self._table, "planned"):
            self._projection = self._planned().projection()
        return self._in_order(self._arrow_schema())


def _reporting(table: IcebergSnapshot, done: str) -> AbstractContextManager[None]:
    """Turn errors of PyIceberg into a :class:`DataError`."""
    return as_data_error(
        f"The Iceberg table {table.name!r} cannot be {done} at snapshot {table.snapshot_id}",
        "Check row_filter, selected_fields and scan_kwargs, and that the snapshot has not expired.",
    )


def _file_name(file: Any) -> str:
    return str(file.file_path).rpartition("/")[2]


def _shown_file(file: Any) -> str:
    return shown(without_secrets(str(file.file_path)))


def _without_statistics(task: Any) -> Any:
    """Return a task whose files have no statistics, which need not be sent to every rank."""
    bare = copy.copy(task)
    bare.file = _bare(task.file)
    bare.delete_files = {_bare(file) for file in task.delete_files}
    return bare


def _bare(file: Any) -> Any:
    found = copy.deepcopy(file)
    for place in range(len(found)):
        if isinstance(found[place], Mapping):  # counts, sizes and bounds of each column
            found[place] = None
    return found
