"""CSV and JSON lines: a block is a stretch of a file that ends at the end of a record.

Inspecting such data means reading it through once, to count the records and to find types that fit all of them. A
compressed file is one block, because it can only be read from its beginning.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from powertrain.data.sources.base import BlockFacts, SourceFacts
from powertrain.data.sources.files.file_columns import file_column, with_file_columns
from powertrain.data.sources.files.files import DataFile, FilePaths, find_files, open_file, unreadable
from powertrain.data.sources.files.records import Dialect, last_line_end, pieces
from powertrain.data.sources.files.text_types import wider_schema
from powertrain.data.sources.plain import as_type, one_batch, plain_type, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError, StorageError

#: Approximate bytes of the file in a block.
BLOCK_BYTES = 16 << 20
#: The names of the columns are searched in so many bytes at the beginning of a file.
_HEAD_BYTES = 1 << 20
#: Arrow's names of the compressions, by file extension.
_COMPRESSIONS = {"gz": "gzip", "tgz": "gzip", "bz2": "bz2", "zst": "zstd", "lz4": "lz4", "br": "brotli"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_ENCODING = (
    "If it is text in another encoding, name it: read_options=pyarrow.csv.ReadOptions(encoding='latin-1')."
)


@dataclass(frozen=True)
class _Stretch:
    """Bytes of a file from ``start`` to before ``stop``, None for the end; the records before them in that file."""

    file: int
    start: int
    stop: int | None
    first_record: int


class TextSource(RememberingSource):
    """The common part of the CSV and JSON sources."""

    _kind: str
    #: True where a column of several types can be read as text.
    _text_fits_all: bool

    def __init__(self, paths: FilePaths, *, include_paths: bool, block_bytes: int) -> None:
        super().__init__()
        self._paths, self._include_paths, self._block_bytes = paths, include_paths, block_bytes
        self._files: tuple[DataFile, ...] = ()
        self._stretches: tuple[_Stretch, ...] = ()

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._paths.cache_key}/{self._block_bytes}/{self._options_key}"

    # -- hooks of the formats

    #: The options of the format that rows depend on, for the cache key.
    _options_key: str = ""

    @abstractmethod
    def _start_of_data(self, number: int, head: bytes) -> int:
        """Return the offset of the first record of a file, which starts with ``head``."""

    @abstractmethod
    def _last_end(self, data: bytes) -> int:
        """Return the end of the last whole record in ``data``, 0 where there is none."""

    @abstractmethod
    def _parsed(self, data: bytes, number: int, schema: pa.Schema | None) -> pa.Table:
        """Return the records in ``data``, a piece of a file: columns and types as in ``schema``, or inferred."""

    def _declared(self) -> pa.Schema:
        """Return the columns that exist even where no record has one."""
        return pa.schema([])

    def _check_end(self, number: int, data: bytes) -> None:
        """Raise where the last piece of a file, ``data``, ends inside a record."""

    # -- inspection

    def _inspect_data(self) -> SourceFacts:
        self._files = find_files(self._paths)
        digest = xxhash.xxh3_128()
        schema = pa.schema([])
        stretches: list[_Stretch] = []
        blocks: list[BlockFacts] = []
        for number, file in enumerate(self._files):
            digest.update(f"{file.name}\0{file.size}\0".encode())
            for stretch, facts, found in self._surveyed(number, digest):
                stretches.append(stretch)
                blocks.append(facts)
                schema = self._widened(schema, found, file)
        self._stretches = tuple(stretches)
        schema = self._widened(schema, self._declared(), self._files[0])
        plain = pa.schema([(field.name, plain_type(field.type)) for field in schema])
        return SourceFacts(
            tuple(blocks), with_file_columns(plain, self._files, self._include_paths), digest.hexdigest()
        )

    def _widened(self, schema: pa.Schema, found: pa.Schema, file: DataFile) -> pa.Schema:
        wider = wider_schema(schema, found, text_fits_all=self._text_fits_all)
        if isinstance(wider, str):
            raise DataError(
                f"Column {wider!r} of the {self._kind} files has {schema.field(wider).type} in what comes first and "
                f"{found.field(wider).type} in {file.shown!r}, and no type fits both. Write it in one form."
            )
        return wider

    def _surveyed(self, number: int, digest: Any) -> Iterator[tuple[_Stretch, BlockFacts, pa.Schema]]:
        """Yield the stretches of a file with their contents; all its bytes go into ``digest``."""
        file = self._files[number]
        place, records, whole = self._start(number, digest), 0, BlockFacts(0, 0)
        start, schema, data = place, pa.schema([]), b""
        for data in self._pieces(number, place, None):
            digest.update(data)
            table = self._parse(data, number, None, records)
            facts = BlockFacts(table.num_rows, table.nbytes)
            if not _is_compressed(file):
                yield _Stretch(number, place, place + len(data), records), facts, table.schema
            else:
                whole = BlockFacts(whole.rows + facts.rows, whole.nbytes + facts.nbytes)
                schema = self._widened(schema, table.schema, file)
            place, records = place + len(data), records + table.num_rows
        self._check_end(number, data)
        if _is_compressed(file) and place > start:
            yield _Stretch(number, start, None, 0), whole, schema

    def _start(self, number: int, digest: Any) -> int:
        """Return the offset of the data of a file."""
        file = self._files[number]
        try:
            with _opened(file, self._paths.filesystem) as stream:
                head = stream.read(_HEAD_BYTES)
        except (OSError, StorageError) as error:
            raise unreadable(file, error) from error
        try:
            start = self._start_of_data(number, head)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"The beginning of the {self._kind} file {file.shown!r} is not understood: {str(error).rstrip('.')}. "
                f"{_OTHER_ENCODING if isinstance(error, UnicodeDecodeError) else 'Correct the file, or leave it out.'}"
            ) from error
        digest.update(head[:start])
        return start

    def _pieces(self, number: int, start: int, stop: int | None) -> Iterator[bytes]:
        file = self._files[number]
        try:
            with _opened(file, self._paths.filesystem) as stream:
                _skip(stream, start, _is_compressed(file))
                if stop is not None:
                    yield stream.read(stop - start)
                    return
                yield from pieces(stream, self._block_bytes, self._last_end)
        except (OSError, StorageError) as error:
            raise unreadable(file, error) from error

    def _parse(self, data: bytes, number: int, schema: pa.Schema | None, records: int) -> pa.Table:
        try:
            return self._parsed(data, number, schema)
        except (pa.ArrowException, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"The {self._kind} file {self._files[number].shown!r} cannot be parsed: {error}. (Rows are counted "
                f"from record {records} of the file, which has number 0.) {self._advice(data)}"
            ) from error

    def _advice(self, data: bytes) -> str:
        return "Correct the file, or leave it out."

    # -- reading

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        stretch = self._stretches[block]
        file = self._files[stretch.file]
        added = {field.name for field in with_file_columns(pa.schema([]), [file], self._include_paths)}
        own = pa.schema([field for field in wanted if field.name not in added or self._has(field.name)])
        counted, rows = self.inspect().blocks[block].rows, 0
        for data in self._pieces(stretch.file, stretch.start, stretch.stop):
            table = self._parse(data, stretch.file, own if len(own) else schema, stretch.first_record)
            rows += table.num_rows
            if table.num_rows:
                yield _completed(table, wanted, own.names, file)
        if rows != counted:
            raise DataError(
                f"The {self._kind} file {file.shown!r} is not the one that was inspected: a part of it had {counted} "
                f"records and has {rows} now. Keep the data as it is during a run, or start the run again."
            )

    def _has(self, name: str) -> bool:
        """Return whether the records themselves have a column that their paths would add as well."""
        return False

    def name_row(self, block: int, row: int) -> str:
        stretch = self._stretches[block]
        return f"{self._files[stretch.file].name}, row {stretch.first_record + row}"


def key_of(*options: Any) -> str:
    """Return a hash of pyarrow's options, made once in the driver: pickling them again may give other bytes."""
    import cloudpickle

    try:
        return xxhash.xxh3_128_hexdigest(cloudpickle.dumps(options))
    except Exception:  # a handler of the user's may refuse with anything; the name of the object is its own
        return repr([each.__reduce_ex__(2) for each in options])


def _completed(table: pa.Table, wanted: pa.Schema, own: Sequence[str], file: DataFile) -> pa.RecordBatch:
    if not len(wanted):
        return with_rows_only(table.num_rows)
    arrays = []
    batch = one_batch(table.to_batches())
    for field in wanted:
        if field.name in own:
            arrays.append(as_type(batch.column(batch.schema.get_field_index(field.name)), field.type))
        else:
            arrays.append(file_column(file, field.name, batch.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _compression(file: DataFile) -> Any:
    return _COMPRESSIONS.get(file.name.rpartition(".")[2].lower())


def _is_compressed(file: DataFile) -> bool:
    return _compression(file) is not None


def _opened(file: DataFile, filesystem: Any) -> Any:
    compression = _compression(file)
    opened = open_file(file, filesystem)
    return opened if compression is None else pa.CompressedInputStream(opened, compression)


def _skip(stream: Any, start: int, compressed: bool) -> None:
    if not compressed:
        stream.seek(start)
        return
    while start > 0:
        start -= len(stream.read(min(start, _HEAD_BYTES)))


# --------------------------------------------------------------------------- CSV


class CsvSource(TextSource):
    """CSV files of the same columns. The options are pyarrow's; newlines in quotes are always parsed."""

    _kind = "CSV"
    _text_fits_all = True

    def __init__(
        self,
        paths: FilePaths,
        *,
        read_options: Any = None,
        parse_options: Any = None,
        convert_options: Any = None,
        include_paths: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        from pyarrow import csv

        super().__init__(paths, include_paths=include_paths, block_bytes=block_bytes)
        self._read_options = read_options or csv.ReadOptions()
        check_encoding(self._read_options.encoding)
        self._parse_options = _with_newlines_in_values(parse_options or csv.ParseOptions())
        self._convert_options = convert_options or csv.ConvertOptions()
        self._dialect = Dialect(
            self._parse_options.delimiter.encode(),
            _byte(self._parse_options.quote_char),
            _byte(self._parse_options.escape_char),
        )
        self._options_key = key_of(self._read_options, self._parse_options, self._convert_options)
        #: The columns of each file, in its order.
        self._names: tuple[tuple[str, ...], ...] = ()

    def _inspect_data(self) -> SourceFacts:
        self._names = ()
        return super()._inspect_data()

    def _start_of_data(self, number: int, head: bytes) -> int:
        options = self._read_options
        start = len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0
        for _ in range(options.skip_rows):
            start = head.find(b"\n", start) + 1 or len(head)
        names = tuple(options.column_names or ())
        rest = head[start:]
        if not names and rest:
            first = next(self._dialect.ends(_without_blank_lines(rest)), len(rest))
            blank = len(rest) - len(_without_blank_lines(rest))
            names = self._header(rest[: blank + first])
            start += 0 if options.autogenerate_column_names else blank + first
        for _ in range(options.skip_rows_after_names):
            start += next(self._dialect.ends(head[start:]), len(head) - start)
        self._check_names(number, names)
        return start

    def _header(self, record: bytes) -> tuple[str, ...]:
        from pyarrow import csv

        options = csv.ReadOptions(
            use_threads=False,
            autogenerate_column_names=self._read_options.autogenerate_column_names,
            encoding=self._read_options.encoding,
        )
        # Arrow finds no column in a line without a line end.
        whole = record if record.endswith((b"\n", b"\r")) else record + b"\n"
        found = csv.read_csv(_as_file(whole), options, self._parse_options).column_names
        twice = [name for name in found if found.count(name) > 1]
        if twice:
            raise DataError(
                f"The first line of a CSV file names the column {twice[0]!r} twice: {found}. Rename one, or give "
                "read_options=pyarrow.csv.ReadOptions(column_names=[...], skip_rows=1)."
            )
        return tuple(found)

    def _check_names(self, number: int, names: tuple[str, ...]) -> None:
        known = next((each for each in self._names if each), ())
        if known and names and set(known) != set(names):
            first = self._files[next(i for i, each in enumerate(self._names) if each)]
            odd = sorted(set(known) ^ set(names))[0]
            having, lacking = (first, self._files[number]) if odd in known else (self._files[number], first)
            raise DataError(
                f"The CSV files have different columns: {having.shown!r} has {odd!r} and {lacking.shown!r} does not. "
                "Read them apart and make them alike before union(). If their first lines are no names, give "
                "read_options=pyarrow.csv.ReadOptions(autogenerate_column_names=True)."
            )
        self._names = (*self._names, names)

    def _last_end(self, data: bytes) -> int:
        return self._dialect.last_end(data)

    def _declared(self) -> pa.Schema:
        given: Any = self._convert_options.column_types or {}
        names = dict.fromkeys(name for names in self._names for name in names if self._has(name))
        return pa.schema([(name, given.get(name, pa.null())) for name in names])

    def _check_end(self, number: int, data: bytes) -> None:
        # With one more line end the last record is whole, unless a quote was opened and not closed.
        if data and self._dialect.last_end(data + b"\n") <= len(data):
            end = self._dialect.last_end(data)
            raise DataError(
                f"The CSV file {self._files[number].shown!r} has a quote that is opened and never closed, in the "
                f"record that begins {data[end : end + 40]!r}. Close it; or, where quotes mean nothing in the file, "
                "give parse_options=pyarrow.csv.ParseOptions(quote_char=False)."
            )

    def _parsed(self, data: bytes, number: int, schema: pa.Schema | None) -> pa.Table:
        from pyarrow import csv

        read = csv.ReadOptions(
            use_threads=False,
            block_size=max(len(data), 1),
            column_names=list(self._names[number]),
            encoding=self._read_options.encoding,
        )
        convert = self._convert_options if schema is None else self._options_for(schema)
        table = csv.read_csv(_as_file(data), read, self._parse_options, convert)
        if schema is None and convert.check_utf8:
            self._refuse_other_encodings(table.schema, number)
        return table

    def _refuse_other_encodings(self, found: pa.Schema, number: int) -> None:
        """Raise for a column of bytes that are not UTF-8, unless the user has given its type."""
        given: Any = self._convert_options.column_types or {}
        for field in found:
            if pa.types.is_binary(field.type) and field.name not in given:
                raise DataError(
                    f"Column {field.name!r} of the CSV file {self._files[number].shown!r} has bytes that are not text "
                    f"in UTF-8. {_OTHER_ENCODING} If it is bytes that are wanted, give "
                    f"convert_options=pyarrow.csv.ConvertOptions(column_types={{{field.name!r}: pyarrow.binary()}})."
                )

    def _options_for(self, schema: pa.Schema) -> Any:
        """Return the conversion options for known types."""
        from pyarrow import csv

        given = self._convert_options
        return csv.ConvertOptions(
            check_utf8=given.check_utf8,
            column_types=schema,
            null_values=given.null_values,
            true_values=given.true_values,
            false_values=given.false_values,
            decimal_point=given.decimal_point,
            timestamp_parsers=given.timestamp_parsers,
            strings_can_be_null=given.strings_can_be_null,
            quoted_strings_can_be_null=given.quoted_strings_can_be_null,
            include_columns=[name for name in schema.names if self._has(name)],
            include_missing_columns=given.include_missing_columns,
        )

    def _has(self, name: str) -> bool:
        chosen = self._convert_options.include_columns
        return name in chosen if chosen else any(name in names for names in self._names)


def check_encoding(encoding: str) -> None:
    """Check that line ends are encoded as in ASCII, as files are cut there. Raises :class:`DataError`."""
    try:
        is_like_ascii = "\n".encode(encoding) == b"\n"
    except LookupError:
        is_like_ascii = False
    if not is_like_ascii:
        raise DataError(
            f"Files cannot be read in the encoding {encoding!r}: it is unknown, or lines end in other bytes than "
            "in ASCII. Write the files in UTF-8."
        )


def _with_newlines_in_values(given: Any) -> Any:
    """Return a copy of pyarrow's options that allows newlines in quotes."""
    from pyarrow import csv

    return csv.ParseOptions(
        delimiter=given.delimiter,
        quote_char=given.quote_char,
        double_quote=given.double_quote,
        escape_char=given.escape_char,
        newlines_in_values=True,
        ignore_empty_lines=given.ignore_empty_lines,
        invalid_row_handler=given.invalid_row_handler,
    )


def _as_file(data: bytes) -> Any:
    return pa.BufferReader(data)


def _byte(given: Any) -> bytes | None:
    """Return one of pyarrow's options that is a character, or False for none."""
    return given.encode() if isinstance(given, str) else None


def _without_blank_lines(data: bytes) -> bytes:
    """Remove leading empty lines, which are not records."""
    return data.lstrip(b"\r\n")


# --------------------------------------------------------------------------- JSON


class JsonSource(TextSource):
    """Files with one JSON object on each line; without ``lines``, files with one list of objects, or one object.

    A record that lacks a key has a null there.
    """

    _kind = "JSON"
    _text_fits_all = False

    def __init__(
        self,
        paths: FilePaths,
        *,
        lines: bool = True,
        parse_options: Any = None,
        include_paths: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(paths, include_paths=include_paths, block_bytes=block_bytes)
        self._lines, self._parse_options = lines, parse_options
        self._options_key = key_of(lines, parse_options)
        self._keys: tuple[str, ...] = ()

    def _inspect_data(self) -> SourceFacts:
        self._keys = ()
        return super()._inspect_data()

    def _start_of_data(self, number: int, head: bytes) -> int:
        return len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0

    def _last_end(self, data: bytes) -> int:
        return last_line_end(data) if self._lines else 0

    def _parsed(self, data: bytes, number: int, schema: pa.Schema | None) -> pa.Table:
        from pyarrow import json as arrow_json

        if not self._lines:
            data = _as_lines(data)
        if not data.strip():
            return (schema or pa.schema([])).empty_table()
        options = self._parse_options
        if schema is not None:
            options = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        read = arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        table = arrow_json.read_json(_as_file(data), read, options)
        if schema is None:
            self._keys = tuple(dict.fromkeys((*self._keys, *table.column_names)))
        return table

    def _advice(self, data: bytes) -> str:
        if not self._lines:
            return "With lines=False a file is one JSON list of objects, or one object. Correct it, or leave it out."
        if data.lstrip().startswith(b"[") or data.lstrip()[:2] in (b"{\n", b"{\r"):
            return (
                "Its records do not stand on a line each. Give lines=False to read each file as one document."
            )
        return (
            "Every line must be one JSON object, and a key have one type. Correct the file, or leave it out."
        )

    def _has(self, name: str) -> bool:
        return name in self._keys


def _as_lines(data: bytes) -> bytes:
    """Return the objects of one JSON document, one on each line."""
    if not data.strip():
        return b""
    document = json.loads(data)
    records = document if isinstance(document, list) else [document]
    if not all(isinstance(record, dict) for record in records):
        odd = next(record for record in records if not isinstance(record, dict))
        raise ValueError(f"it holds {odd!r:.60} where an object should be")
    return b"\n".join(json.dumps(record).encode() for record in records)
