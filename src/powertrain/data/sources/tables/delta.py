"""Delta Lake tables: the files of one version, of which each row group is a block.

The log is read by ``deltalake``, the files by this package's own reader of Parquet. Deletion vectors are applied;
tables with features that change what files mean in other ways are refused.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from powertrain.data.arguments import shown
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.files.file_columns import PATH
from powertrain.data.sources.files.files import DataFile, FilePaths
from powertrain.data.sources.files.parquet import ParquetSource
from powertrain.data.sources.plain import as_type, checked_columns, plain_schema, with_rows_only
from powertrain.data.sources.tables.opening import fields_of, import_package, opening_table
from powertrain.errors import DataError, NotSupportedError
from powertrain.storage.addresses import without_secrets

#: Features that a table may require of readers: those of the log, which ``deltalake`` reads, and those handled here.
_KNOWN_FEATURES = frozenset({"timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck"})


@dataclass(frozen=True)
class DeltaVersion:
    """One version of a Delta table."""

    uri: str
    version: int
    #: Credentials may be among them.
    storage_options: dict[str, str] | None = field(default=None, repr=False)
    #: A pyarrow file system whose root is the table; None for that of ``deltalake``.
    filesystem: Any = None

    @property
    def shown(self) -> str:
        return without_secrets(self.uri)


def open_table(uri: str, version: int | None, storage_options: dict[str, str] | None) -> Any:
    """Return a ``deltalake.DeltaTable``; raises :class:`DataError` if it or this version does not exist."""
    deltalake = import_package("read_delta", "deltalake", "deltalake", "delta")
    with opening_table("Delta table", uri, version):
        table = deltalake.DeltaTable(uri, version=version, storage_options=storage_options)
    _check_features(table, without_secrets(uri))
    return table


def _check_features(table: Any, where: str) -> None:
    """Raise where the table's files cannot be read as they are: unknown features would give wrong rows."""
    protocol = table.protocol()
    needed = set(protocol.reader_features or ())
    # Tables of an older protocol have no list of features.
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        needed.add("columnMapping")
    unknown = sorted(needed - _KNOWN_FEATURES)
    if unknown or protocol.min_reader_version > 3:
        named = ", ".join(unknown) or f"reader version {protocol.min_reader_version}"
        raise NotSupportedError(
            f"The Delta table {where!r} requires of its readers: {named}, which read_delta() does not have. Use "
            "from_arrow(deltalake.DeltaTable(path).scan().read_all()), or write the table anew without it."
        )


class DeltaSource(ParquetSource):
    """The rows of one version of a Delta table, in the order in which its files were added."""

    def __init__(
        self, table: DeltaVersion, columns: Sequence[str] | None = None, *, include_paths: bool = False
    ) -> None:
        super().__init__(_files_of(table), columns, include_paths=include_paths)
        self._table = table
        self._table_schema: pa.Schema | None = None
        self._listed: tuple[DataFile, ...] = ()
        #: By path: the values of partition columns, and which rows are kept, as bits, where some are deleted.
        self._partitions: dict[str, dict[str, Any]] = {}
        self._deletions: dict[str, tuple[bytes, int]] = {}

    # -- inspection

    def _inspect_data(self) -> SourceFacts:
        opened = self._opened_table()
        self._table_schema = plain_schema(pa.schema(opened.schema().to_arrow()))
        digest = xxhash.xxh3_128(f"delta-1\0{opened.metadata().id}\0{self._table.version}\0".encode())
        listed = _files_in_log(opened, self._table)
        self._partitions = {file.path: values for file, values in listed}
        if not listed:
            return SourceFacts((), self._common_schema((), ()), digest.hexdigest())
        self._listed = tuple(file for file, _ in listed)
        self._deletions = self._deleted(opened)
        facts = super()._inspect_data()
        digest.update(facts.fingerprint.encode())
        for path, (bits, _) in sorted(self._deletions.items()):
            digest.update(f"{self._named[path]}\0".encode() + bits)
        blocks = [self._without_deleted(number, block) for number, block in enumerate(facts.blocks)]
        return SourceFacts(tuple(blocks), facts.schema, digest.hexdigest())

    def _opened_table(self) -> Any:
        return open_table(self._table.uri, self._table.version, self._table.storage_options)

    def _find(self) -> tuple[DataFile, ...]:
        return self._listed

    def _sampled(self, files: Sequence[DataFile]) -> list[str]:
        return [""] * len(files)  # a file of a Delta table is never written anew under its name

    @property
    def _named(self) -> dict[str, str]:
        return {file.path: file.name for file in self._listed}

    def _common_schema(self, files: Sequence[DataFile], footers: Sequence[Any]) -> pa.Schema:
        """Return the table's columns, or the chosen ones, whichever of them a file has."""
        assert self._table_schema is not None
        schema = self._table_schema
        if self._include_paths:
            if PATH in schema.names:
                raise DataError(
                    f"include_paths=True would add a column {PATH!r}, and the Delta table {self._table.shown!r} has "
                    "one of that name already. Leave include_paths out."
                )
            schema = schema.append(pa.field(PATH, pa.string()))
        if self._columns is not None:
            checked_columns(self._columns, schema.names, f"the Delta table {self._table.shown!r}")
        return fields_of(schema, self._columns)

    def _deleted(self, opened: Any) -> dict[str, tuple[bytes, int]]:
        """Return the deletion vectors: bits of the rows that are kept, and their number, by path."""
        if "deletionVectors" not in (opened.protocol().reader_features or ()):
            return {}
        places: dict[str, list[DataFile]] = {}
        for file in self._listed:
            places.setdefault(file.name.rpartition("/")[2], []).append(file)
        found = {}
        for batch in pa.RecordBatchReader.from_stream(opened.deletion_vectors()):
            for uri, kept in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
                path = _place_of(str(uri), places, self._table)
                mask = np.asarray(kept.values.to_numpy(zero_copy_only=False), bool)
                found[path] = (np.packbits(mask).tobytes(), len(mask))
        return found

    def _without_deleted(self, number: int, block: BlockFacts) -> BlockFacts:
        kept = self._kept(number)
        if kept is None:
            return block
        rows = int(kept.sum())
        return BlockFacts(rows, block.nbytes * rows // max(block.rows, 1))

    def _kept(self, block: int) -> Any:
        """Return which rows of a row group are kept; None where no row of its file is deleted."""
        number = bisect.bisect_right(self._firsts, block) - 1
        known, group = self._files[number], block - self._firsts[number]
        if known.file.path not in self._deletions:
            return None
        return self._kept_of(known.file.path, self._footers.of(known).metadata, group)

    def _kept_of(self, path: str, metadata: pq.FileMetaData, group: int) -> Any:
        bits, count = self._deletions[path]
        first = sum(metadata.row_group(each).num_rows for each in range(group))
        rows = metadata.row_group(group).num_rows
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)[first : first + rows]
        # A vector may end after the last deleted row.
        return np.concatenate([mask, np.ones(rows - len(mask), bool)])

    # -- reading

    def _read_group(
        self, known: Any, group: int, wanted: pa.Schema, facts: BlockFacts
    ) -> Iterator[pa.RecordBatch]:
        if known.file.path not in self._deletions:
            yield from super()._read_group(known, group, wanted, facts)
            return
        kept = self._kept_of(known.file.path, self._footers.of(known).metadata, group)
        stored = BlockFacts(len(kept), facts.nbytes * len(kept) // max(facts.rows, 1))
        first = 0
        for batch in super()._read_group(known, group, wanted, stored):
            mask = kept[first : first + batch.num_rows]
            first += batch.num_rows
            if not wanted.names:
                yield with_rows_only(int(mask.sum()))
            elif mask.any():
                yield batch.take(pa.array(mask.nonzero()[0]))

    def _completed(self, batch: pa.RecordBatch, wanted: pa.Schema, file: DataFile) -> pa.RecordBatch:
        """Return ``batch`` with the requested columns: a column that a file lacks is that of its partition, or null."""
        arrays: list[Any] = []
        partition = self._partitions[file.path]
        for column in wanted:
            place = batch.schema.get_field_index(column.name)
            if column.name in partition:
                arrays.append(pa.repeat(pa.scalar(partition[column.name], column.type), batch.num_rows))
            elif place >= 0:
                arrays.append(as_type(batch.column(place), column.type))
            elif column.name == PATH and self._include_paths:
                arrays.append(pa.repeat(pa.scalar(file.shown, pa.string()), batch.num_rows))
            else:
                arrays.append(pa.nulls(batch.num_rows, column.type))
        return pa.RecordBatch.from_arrays(arrays, schema=wanted) if arrays else batch

    def name_row(self, block: int, row: int) -> str:
        kept = self._kept(block)
        return super().name_row(block, row if kept is None else int(kept.nonzero()[0][row]))

    def glimpse(self) -> pa.Schema:
        if self._facts is not None:
            return self._facts.schema
        self._table_schema = plain_schema(pa.schema(self._opened_table().schema().to_arrow()))
        return self._common_schema((), ())

    def select(self, columns: Sequence[str]) -> Source:
        if self._columns is not None:
            checked_columns(columns, self._columns, "the data")
        chosen = DeltaSource(self._table, tuple(columns), include_paths=self._include_paths)
        for name in (
            "_files",
            "_firsts",
            "_footers",
            "_table_schema",
            "_partitions",
            "_deletions",
            "_listed",
        ):
            setattr(chosen, name, getattr(self, name))
        if self._facts is not None:
            checked_columns(columns, self._facts.schema.names, "the data")
            schema = fields_of(self._facts.schema, columns)
            chosen._facts = replace(self._facts, schema=schema, blocks=self._narrowed(schema))
        return chosen


def _files_of(table: DeltaVersion) -> FilePaths:
    """Return where the table's files are, and through what they are opened: local ones without ``deltalake``."""
    filesystem = table.filesystem
    if filesystem is None and _local_root(table.uri) is None:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow import fs

        handler: Any = DeltaStorageHandler(table.uri, table.storage_options, None)
        filesystem = fs.PyFileSystem(handler)
    return FilePaths((table.uri,), filesystem=filesystem)


def _local_root(uri: str) -> str | None:
    """Return the directory of a table on a disk of this machine; None for any other."""
    if "://" not in uri:
        return uri
    return unquote(urlsplit(uri).path) if uri.startswith("file://") else None


def _files_in_log(opened: Any, table: DeltaVersion) -> list[tuple[DataFile, dict[str, Any]]]:
    """Return the files of a version with the values of their partition columns, in the order of their time.

    The log lists them in an order that changes when it is compacted.
    """
    actions = pa.table(opened.get_add_actions(flatten=True)).to_pylist()
    root = None if table.filesystem is not None else _local_root(table.uri)
    found = []
    for action in sorted(actions, key=lambda each: (each["modification_time"], each["path"])):
        name = unquote(action["path"])
        if "://" in name:
            raise NotSupportedError(
                f"The Delta table {table.shown!r} has the file {shown(without_secrets(name))}, which is outside of it: "
                "it is a shallow clone. Read the table that it was cloned from, or make a deep clone."
            )
        values = {
            key.removeprefix("partition."): value
            for key, value in action.items()
            if key.startswith("partition.")
        }
        path = name if root is None else f"{root.rstrip('/')}/{name}"
        found.append((DataFile(path, name, action["size_bytes"], columns=()), values))
    return found


def _place_of(uri: str, places: dict[str, list[DataFile]], table: DeltaVersion) -> str:
    """Return the path of the file that a deletion vector belongs to; ``places`` are files by the end of their names."""
    for name in (uri, unquote(uri), unquote(unquote(uri))):
        for file in places.get(name.rpartition("/")[2], ()):
            if name == file.name or name.endswith("/" + file.name):
                return file.path
    raise DataError(
        f"The Delta table {table.shown!r} has a deletion vector for {shown(without_secrets(uri))}, which is not among "
        "its files. Check the table with the tool that wrote it."
    )
