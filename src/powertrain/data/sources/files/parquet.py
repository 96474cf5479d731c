"""Parquet files: a block is a row group."""

from __future__ import annotations

import bisect
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.content_sample import content_samples
from powertrain.data.sources.files.file_columns import file_column, with_file_columns
from powertrain.data.sources.files.files import (
    DataFile,
    FilePaths,
    find_files,
    for_each,
    is_object,
    open_file,
    read_tail,
    unreadable,
)
from powertrain.data.sources.files.images import encoded_images, image_field, is_stored_image
from powertrain.data.sources.files.object_files import open_object
from powertrain.data.sources.plain import (
    as_type,
    checked_columns,
    moderate,
    plain_field_type,
    with_rows_only,
)
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError, StorageError

#: A row group of up to this many decoded bytes is read into one batch; a larger one in batches of about the second.
ONE_BATCH_BYTES = 64 << 20
BATCH_BYTES = 32 << 20
#: Bytes read from the end of a file at first: the footer of most files is shorter.
_TAIL_BYTES = 64 << 10
#: Bytes of a column that are read at a time from a row group too large to have its columns in memory.
_STREAM_BYTES = 4 << 20
#: Rows decoded at a time where a dictionary may hide how large they are.
_CAUTIOUS_ROWS = 8192
#: Footers of this many files are kept in memory.
_KEPT_FOOTERS = 256
_MAGIC = b"PAR1"
#: Hashed first: version 2 of the fingerprint. Version 1 was made of names, sizes and footers alone.
_FINGERPRINT_FORM = b"parquet-2\0"


@dataclass(frozen=True)
class _ParquetFile:
    """The kept metadata of a file: little, because it is sent to every rank."""

    file: DataFile
    row_groups: int
    #: Hash of the footer, to detect a file that was rewritten since.
    footer: str


class ParquetSource(RememberingSource):
    """The rows of Parquet files, which all have the columns of the first.

    Directories named "key=value" add a text column "key" where the files have none of that name. ``include_paths`` adds
    the column "path".
    """

    def __init__(
        self, paths: FilePaths, columns: Sequence[str] | None = None, *, include_paths: bool = False
    ) -> None:
        super().__init__()
        self._paths, self._columns, self._include_paths = paths, columns, include_paths
        self._files: tuple[_ParquetFile, ...] = ()
        #: Number of the first block of each file.
        self._firsts: tuple[int, ...] = ()
        self._footers = _Footers(paths.filesystem)

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._paths.cache_key}"

    # -- inspection

    def _inspect_data(self) -> SourceFacts:
        found = self._find()
        footers = for_each(found, lambda file: read_footer(file, self._paths.filesystem))
        schema = self._common_schema(found, footers)
        samples = self._sampled(found)
        digest, earlier = xxhash.xxh3_128(_FINGERPRINT_FORM), xxhash.xxh3_128()
        files: list[_ParquetFile] = []
        firsts: list[int] = []
        blocks: list[BlockFacts] = []
        for file, footer, sample in zip(found, footers, samples, strict=True):
            earlier.update(f"{file.name}\0{file.size}\0{footer.digest}\0".encode())
            digest.update(f"{file.name}\0{file.size}\0{footer.digest}\0{footer.before}\0{sample}\0".encode())
            firsts.append(len(blocks))
            files.append(_ParquetFile(file, footer.metadata.num_row_groups, footer.digest))
            blocks += _blocks_of(footer.metadata, schema)
            self._footers.keep(file.path, footer)
        self._files, self._firsts = tuple(files), tuple(firsts)
        return SourceFacts(tuple(blocks), schema, digest.hexdigest(), earlier.hexdigest())

    def _find(self) -> tuple[DataFile, ...]:
        return find_files(self._paths)

    def _sampled(self, files: Sequence[DataFile]) -> list[str]:
        """Return a hash of bytes of each file, so that rows in another order are noticed."""
        return _samples(files, self._paths.filesystem)

    def _common_schema(self, files: Sequence[DataFile], footers: Sequence[Footer]) -> pa.Schema:
        """Return the first file's columns, or the chosen ones: the files may differ in all others. A column of nulls
        gets the type that it has elsewhere."""
        if self._columns is not None:
            self._in_order(with_file_columns(footers[0].schema, files, self._include_paths), files[0])
        schema = self._chosen(footers[0].schema)
        for file, footer in zip(files, footers, strict=True):
            theirs = self._chosen(footer.schema)
            if not theirs.equals(schema):
                schema = _agreed(schema, files[0], theirs, file)
        schema = with_file_columns(schema, files, self._include_paths)
        return schema if self._columns is None else self._in_order(schema, files[0])

    def _in_order(self, schema: pa.Schema, first: DataFile) -> pa.Schema:
        """Return the chosen columns, in the user's order; raises where one is not in ``schema``."""
        columns = self._columns or ()
        checked_columns(columns, schema.names, f"the Parquet file {first.shown!r}")
        return pa.schema([schema.field(name) for name in columns])

    def _chosen(self, schema: pa.Schema) -> pa.Schema:
        """Return the part of a file's columns that was chosen."""
        if self._columns is None:
            return schema
        return pa.schema([field for field in schema if field.name in self._columns])

    # -- reading

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        number = bisect.bisect_right(self._firsts, block) - 1
        known, group = self._files[number], block - self._firsts[number]
        try:
            yield from self._read_group(known, group, wanted, self.inspect().blocks[block])
        except DataError:
            raise
        except (OSError, StorageError) as error:
            raise unreadable(known.file, error) from error
        except pa.ArrowException as error:
            raise DataError(
                f"Row group {group} of the Parquet file {known.file.shown!r} cannot be decoded: {error}. The file is "
                "damaged: write it anew, or leave it out."
            ) from error

    def _read_group(
        self, known: _ParquetFile, group: int, wanted: pa.Schema, facts: BlockFacts
    ) -> Iterator[pa.RecordBatch]:
        footer = self._footers.of(known)
        stored = [name for name in wanted.names if name in footer.names]
        if not stored:
            yield self._completed(with_rows_only(facts.rows), wanted, known.file)
            return
        places = _column_places(footer, stored)
        batch_rows = _rows_at_a_time(footer.metadata, group, places, facts)
        is_large = facts.nbytes > ONE_BATCH_BYTES
        with self._opened(known.file, footer.metadata, group, [] if is_large else places) as source:
            parquet = pq.ParquetFile(
                source,
                metadata=footer.metadata,
                pre_buffer=False,
                buffer_size=_STREAM_BYTES if is_large else 0,
            )
            decoded = parquet.iter_batches(batch_rows, row_groups=[group], columns=stored, use_threads=False)
            completed = (self._completed(batch, wanted, known.file) for batch in decoded)
            yield from moderate(completed, most=ONE_BATCH_BYTES, each=BATCH_BYTES)

    def _opened(
        self, file: DataFile, metadata: pq.FileMetaData, group: int, places: Sequence[int]
    ) -> pa.NativeFile:
        """Return the file; for one in an object store these columns of the row group are fetched in one batch."""
        if self._paths.filesystem is not None or not is_object(file.path):
            return open_file(file, self._paths.filesystem)
        fetching: Any = open_object(file.path, file.size)
        fetching.fetch([_byte_range(metadata.row_group(group).column(place)) for place in places])
        return pa.PythonFile(fetching, "r")

    def _completed(self, batch: pa.RecordBatch, wanted: pa.Schema, file: DataFile) -> pa.RecordBatch:
        """Return ``batch`` with exactly the requested columns, in their plain types."""
        arrays: list[Any] = []
        for field in wanted:
            place = batch.schema.get_field_index(field.name)
            if place >= 0:
                arrays.append(_as_field(batch.column(place), field))
            else:
                arrays.append(file_column(file, field.name, batch.num_rows))
        return pa.RecordBatch.from_arrays(arrays, schema=wanted) if arrays else batch

    def name_row(self, block: int, row: int) -> str:
        number = bisect.bisect_right(self._firsts, block) - 1
        return f"{self._files[number].file.name}, row group {block - self._firsts[number]}, row {row}"

    def select(self, columns: Sequence[str]) -> Source:
        if self._columns is not None:
            checked_columns(columns, self._columns, "the data")
        chosen = ParquetSource(self._paths, tuple(columns), include_paths=self._include_paths)
        chosen._files, chosen._firsts, chosen._footers = self._files, self._firsts, self._footers
        if self._facts is not None:
            checked_columns(columns, self._facts.schema.names, "the data")
            schema = pa.schema([self._facts.schema.field(name) for name in columns])
            chosen._facts = replace(self._facts, schema=schema, blocks=self._narrowed(schema))
        return chosen

    def glimpse(self) -> pa.Schema:
        if self._facts is not None:
            return self._facts.schema
        files = find_files(self._paths)
        footer = read_footer(files[0], self._paths.filesystem)
        schema = with_file_columns(footer.schema, files, self._include_paths)
        return schema if self._columns is None else self._in_order(schema, files[0])

    def _narrowed(self, schema: pa.Schema) -> tuple[BlockFacts, ...]:
        """Return the blocks of some columns, sized in proportion, since most footers are not in memory any more."""
        facts = self.inspect()
        before, after = _usual_width(facts.schema), _usual_width(schema)
        return tuple(BlockFacts(block.rows, block.nbytes * after // max(before, 1)) for block in facts.blocks)


# --------------------------------------------------------------------------- footers


@dataclass(frozen=True)
class Footer:
    """The contents of a Parquet footer."""

    metadata: pq.FileMetaData
    #: Of the columns in plain form, with marks.
    schema: pa.Schema
    digest: str
    #: Hash of the bytes before the footer that were read together with it: the ends of the last columns.
    before: str = ""

    @property
    def names(self) -> list[str]:
        return self.schema.names


def read_footer(file: DataFile, filesystem: Any = None) -> Footer:
    """Return the footer of a Parquet file; raises :class:`DataError` where it cannot be read."""
    try:
        tail = read_tail(file, _TAIL_BYTES, filesystem)
        if len(tail) < 12 or tail[-4:] != _MAGIC:
            raise DataError(_why_no_footer(file, tail, filesystem))
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > file.size - len(_MAGIC):
            raise DataError(
                f"The file {file.shown!r} is damaged: it says that its footer has {length - 8} bytes, and the whole "
                f"file has {file.size}. Write it anew, or leave it out."
            )
        if length > len(tail):
            tail = read_tail(file, length, filesystem)
    except (OSError, StorageError) as error:
        raise unreadable(file, error) from error
    footer = tail[-length:]
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
        schema = _plain_file_schema(metadata.schema.to_arrow_schema(), file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"The footer of the Parquet file {file.shown!r} cannot be understood: {error}. The file is damaged or made "
            "by a newer version: write it anew, or leave it out."
        ) from error
    before = xxhash.xxh3_64_hexdigest(memoryview(tail)[:-length]) if length <= _TAIL_BYTES else ""
    return Footer(metadata, schema, xxhash.xxh3_64_hexdigest(footer), before)


def _samples(files: Sequence[DataFile], filesystem: Any) -> list[str]:
    """Return a hash of bytes of each file; raises :class:`DataError` where one cannot be read."""
    try:
        return content_samples(files, filesystem)
    except OSError as error:
        broken = next((file for file in files if file.path == error.filename), files[0])
        raise unreadable(broken, error) from error


def _why_no_footer(file: DataFile, tail: bytes, filesystem: Any) -> str:
    if file.size == 0:
        return (
            f"The file {file.shown!r} has 0 bytes, so it is no Parquet file: its writer has not finished. Write it "
            "anew, or leave it out."
        )
    if tail[-4:] == b"PARE":
        return f"The Parquet file {file.shown!r} is encrypted, which is not supported. Write it without encryption."
    with open_file(file, filesystem) as opened:
        begins_well = opened.read(4) == _MAGIC
    if begins_well:
        return (
            f"The Parquet file {file.shown!r} is cut short: it begins as one, and after {file.size} bytes there is no "
            "footer. Its writer or a copy has not finished: write or copy it anew."
        )
    return (
        f"The file {file.shown!r} is not a Parquet file (it does not begin and end with 'PAR1'). Leave it out, for "
        'example with file_extensions=["parquet"], or read it with the function for its kind.'
    )


def _plain_file_schema(schema: pa.Schema, file: DataFile) -> pa.Schema:
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise DataError(
            f"The Parquet file {file.shown!r} has several columns named {twice[0]!r}. Write it anew with one."
        )
    images = hugging_face_images(schema)
    fields = []
    for field in schema:
        if field.name in images and is_stored_image(field.type):
            fields.append(image_field(field.name))
        else:
            fields.append(pa.field(field.name, plain_field_type(field), metadata=_own_marks(field)))
    return pa.schema(fields)


def _own_marks(field: Any) -> dict[bytes, bytes] | None:
    """Return this package's metadata of a field: other metadata may differ between files that agree."""
    ours = {key: value for key, value in (field.metadata or {}).items() if key.startswith(b"powertrain.")}
    return ours or None


def hugging_face_images(schema: pa.Schema) -> set[str]:
    """Return the image columns by a schema written by Hugging Face's datasets."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name for name, feature in features.items() if feature.get("_type") == "Image"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return set()  # not written by it, or in another format


def _agreed(schema: pa.Schema, first: DataFile, other: pa.Schema, file: DataFile) -> pa.Schema:
    """Return the schema of both; raises where a column is missing in one or has another type."""
    for one, other_one, having, lacking in ((schema, other, first, file), (other, schema, file, first)):
        for name in one.names:
            if name not in other_one.names:
                raise DataError(
                    f"The Parquet files have different columns: {having.shown!r} has {name!r} and {lacking.shown!r} "
                    "does not. Read the files apart and make them alike before union(), or read only columns that all "
                    "have, with columns=[...]."
                )
    fields: list[Any] = []
    for field in schema:
        there: Any = other.field(field.name)
        if pa.types.is_null(field.type):
            field = field.with_type(there.type).with_metadata(there.metadata or {})
        elif not pa.types.is_null(there.type) and not _same_type(there.type, field.type):
            raise _different_types(field, first, there, file)
        fields.append(field)
    return pa.schema(fields)


def _different_types(one: Any, first: DataFile, other: Any, file: DataFile) -> DataError:
    if isinstance(one.type, pa.FixedShapeTensorType) and isinstance(other.type, pa.FixedShapeTensorType):
        return DataError(
            f"The Parquet files have different tensors in column {one.name!r}: of shape {tuple(one.type.shape)} and "
            f"type {one.type.value_type} in {first.shown!r}, {tuple(other.type.shape)} and {other.type.value_type} in "
            f"{file.shown!r}. Write them with one shape and type, or read them apart and make them alike before "
            "union()."
        )
    return DataError(
        f"The Parquet files have different types in column {one.name!r}: {one.type} in {first.shown!r}, {other.type} "
        f"in {file.shown!r}. Write them with one type, or read them apart and cast before union()."
    )


def _same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether types are equal but for the names and nullability of list items, which depend on the writer."""
    if one.equals(other):
        return True
    if pa.types.is_list(one) and pa.types.is_list(other):
        return _same_type(one.value_type, other.value_type)
    if pa.types.is_fixed_size_list(one) and pa.types.is_fixed_size_list(other):
        return one.list_size == other.list_size and _same_type(one.value_type, other.value_type)
    return False


class _Footers:
    """The newest footers of this process. Thread-safe; empty after unpickling."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._kept: OrderedDict[str, Footer] = OrderedDict()
        self._guard = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Footers, (self._filesystem,))

    def keep(self, path: str, footer: Footer) -> None:
        with self._guard:
            self._kept[path] = footer
            while len(self._kept) > _KEPT_FOOTERS:
                self._kept.popitem(last=False)

    def of(self, known: _ParquetFile) -> Footer:
        """Return the footer of an inspected file; raises where it has changed."""
        with self._guard:
            footer = self._kept.get(known.file.path)
        if footer is None:
            footer = self._read(known)
            self.keep(known.file.path, footer)
        if footer.digest != known.footer:
            raise _changed(known.file)
        return footer

    def _read(self, known: _ParquetFile) -> Footer:
        try:
            return read_footer(known.file, self._filesystem)
        except DataError as error:
            if isinstance(error.__cause__, (OSError, StorageError)):
                raise
            raise _changed(known.file) from error  # it was well-formed when it was inspected


def _changed(file: DataFile) -> DataError:
    return DataError(
        f"The Parquet file {file.shown!r} is not the one that was inspected: it was written anew while it was in use. "
        "Keep the data as it is during a run, or start the run again."
    )


# --------------------------------------------------------------------------- sizes


def _blocks_of(metadata: pq.FileMetaData, schema: pa.Schema) -> list[BlockFacts]:
    """Return the rows of each row group, and the bytes of the columns in ``schema``: from fixed-width types, otherwise
    from the file (encoded, which may be less)."""
    fixed_bits = sum(_bits(field.type) or 0 for field in schema)
    variable = {field.name for field in schema if _bits(field.type) is None}
    blocks: list[BlockFacts] = []
    share: float | None = None
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if share is None and variable and group.num_rows:
            # Visiting every column of every row group takes long in files that have many of both.
            share = _variable_bytes(group, variable) / max(1, group.total_byte_size)
        nbytes = fixed_bits * group.num_rows // 8 + int(group.total_byte_size * (share or 0))
        blocks.append(BlockFacts(group.num_rows, nbytes))
    return blocks


def _variable_bytes(group: Any, names: set[str]) -> int:
    """Return the bytes of columns without a fixed width in a row group."""
    columns = [group.column(place) for place in range(group.num_columns)]
    return sum(
        max(column.total_uncompressed_size, column.num_values * _least_bytes(column))
        for column in columns
        if column.path_in_schema in names or column.path_in_schema.partition(".")[0] in names
    )


def _least_bytes(column: Any) -> int:
    """Return the least bytes of a decoded value of a column."""
    return {"BOOLEAN": 0, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4, "INT96": 8}.get(column.physical_type, 8)


def _bits(given: pa.DataType) -> int | None:
    """Return the bits of each value of the type, None where they differ."""
    if isinstance(given, pa.BaseExtensionType):
        return _bits(given.storage_type)
    if pa.types.is_fixed_size_list(given):
        each = _bits(given.value_type)
        return None if each is None else each * given.list_size
    try:
        return given.bit_width
    except ValueError:
        return None


def _usual_width(schema: pa.Schema) -> int:
    """Return the bits of a row, with a guess for types without a fixed width."""
    return sum(_bits(field.type) or 512 for field in schema)


def _column_places(footer: Footer, names: Sequence[str]) -> list[int]:
    """Return the leaf columns of the named columns in a file."""
    wanted = set(names)
    schema = footer.metadata.schema
    paths = [schema.column(place).path for place in range(len(schema))]
    return [place for place, path in enumerate(paths) if path in wanted or path.partition(".")[0] in wanted]


def _rows_at_a_time(metadata: pq.FileMetaData, group: int, places: Sequence[int], facts: BlockFacts) -> int:
    """Return the rows to decode at a time for a moderate batch: few where a dictionary may hide long values."""
    found = metadata.row_group(group)
    per_row = max(1, facts.nbytes // max(1, facts.rows))
    rows = facts.rows if facts.nbytes <= ONE_BATCH_BYTES else max(1, BATCH_BYTES // per_row)
    for place in places:
        column = found.column(place)
        if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page:
            return max(1, min(rows, _CAUTIOUS_ROWS))
    return max(1, rows)


def _byte_range(column: Any) -> tuple[int, int]:
    """Return the byte range of a column's pages of a row group in the file."""
    start = column.data_page_offset
    if column.dictionary_page_offset is not None and column.dictionary_page_offset > 0:
        start = min(start, column.dictionary_page_offset)
    return start, start + column.total_compressed_size


def _as_field(array: Any, field: Any) -> Any:
    if is_stored_image(array.type) and pa.types.is_binary(field.type):
        return encoded_images(array)
    return as_type(array, field.type)
