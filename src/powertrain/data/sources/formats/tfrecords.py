"""TFRecord files of ``tf.train.Example`` messages: a row is an Example, a column one of its features.

A feature that has exactly one value in every row is a column of values, any other a column of lists. Every checksum is
checked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.sources.base import SourceFacts
from powertrain.data.sources.files.files import DataFile, FilePaths
from powertrain.data.sources.files.text import BLOCK_BYTES, TextSource
from powertrain.data.sources.formats.crc32c import crc32c, crc32c_of_all, masked, masked_all
from powertrain.data.sources.formats.examples import ExampleError, Feature, decode_example
from powertrain.errors import DataError

_TYPES: dict[str, Any] = {"bytes": pa.binary(), "float": pa.float32(), "int": pa.int64(), "": pa.null()}
#: The length of a record and its checksum, before its bytes; another checksum is behind them.
_HEAD, _TAIL = 12, 4


def record_ends(data: bytes) -> tuple[list[tuple[int, int]], int]:
    """Return the (start, stop) of each whole record's bytes in ``data``, and the end of the last.

    Stops before a record whose length has a wrong checksum.
    """
    found, place = [], 0
    while place + _HEAD <= len(data):
        length, checksum = struct.unpack_from("<QI", data, place)
        stop = place + _HEAD + length
        if masked(crc32c(data[place : place + 8])) != checksum or stop + _TAIL > len(data):
            break
        found.append((place + _HEAD, stop))
        place = stop + _TAIL
    return found, place


def has_broken_length(data: bytes, place: int) -> bool:
    """Return whether the record that begins at ``place`` has a length with a wrong checksum."""
    if place + _HEAD > len(data):
        return False
    return bool(masked(crc32c(data[place : place + 8])) != struct.unpack_from("<I", data, place + 8)[0])


class TFRecordSource(TextSource):
    """The Examples of TFRecord files, also of compressed ones (".gz")."""

    _kind = "TFRecord"
    _text_fits_all = False

    def __init__(
        self, paths: FilePaths, *, include_paths: bool = False, block_bytes: int = BLOCK_BYTES
    ) -> None:
        super().__init__(paths, include_paths=include_paths, block_bytes=block_bytes)
        self._names: tuple[str, ...] = ()

    def _inspect_data(self) -> SourceFacts:
        self._names = ()
        return super()._inspect_data()

    def _start_of_data(self, number: int, head: bytes) -> int:
        return 0

    def _last_end(self, data: bytes) -> int:
        _, end = record_ends(data)
        # Reading on would not mend a broken length; the piece is then refused when it is parsed.
        return len(data) if has_broken_length(data, end) else end

    def _parsed(self, data: bytes, number: int, schema: pa.Schema | None) -> pa.Table:
        places, end = record_ends(data)
        starts, stops = np.array(places, np.int64).reshape(-1, 2).T
        checksums = masked_all(crc32c_of_all(data, starts, stops))
        stored = np.array([struct.unpack_from("<I", data, stop)[0] for _, stop in places], np.uint32)
        wrong = np.flatnonzero(checksums != stored)
        if len(wrong):
            raise ValueError(f"the bytes of record {wrong[0]} do not fit their checksum: the file is damaged")
        if end < len(data):
            why = (
                "has a length that does not fit its checksum: the file is damaged, or not a TFRecord file"
                if has_broken_length(data, end)
                else "is not complete: the file was cut off"
            )
            raise ValueError(f"record {len(places)} {why}")
        rows = [_decoded(data[start:stop], place) for place, (start, stop) in enumerate(places)]
        names = dict.fromkeys(name for row in rows for name in row)
        if schema is None:
            self._names = tuple(dict.fromkeys((*self._names, *names)))
            types = {name: _type_of([row.get(name) for row in rows], name) for name in names}
        else:
            types = {field.name: field.type for field in schema}
        if not types:
            if rows:
                raise ValueError(
                    f"its {len(rows)} records have no features, and rows need at least one column"
                )
            return pa.schema([]).empty_table()
        columns = {name: _column([row.get(name) for row in rows], kind, name) for name, kind in types.items()}
        return pa.table(columns)

    def _advice(self, data: bytes) -> str:
        return "Copy the file again or write it anew; or leave it out."

    def _widened(self, schema: pa.Schema, found: pa.Schema, file: DataFile) -> pa.Schema:
        fields = {field.name: field.type for field in schema}
        for field in found:
            wider = _wider(fields.get(field.name, pa.null()), field.type)
            if wider is None:
                raise DataError(
                    f"The feature {field.name!r} of the TFRecord files has {fields[field.name]} in what comes first "
                    f"and {field.type} in {file.shown!r}, and no type fits both. Write it in one form."
                )
            fields[field.name] = wider
        return pa.schema(list(fields.items()))

    def _has(self, name: str) -> bool:
        return name in self._names


def _decoded(record: bytes, place: int) -> dict[str, Feature]:
    try:
        return decode_example(record)
    except ExampleError as error:
        raise ValueError(
            f"record {place} is not a tf.train.Example ({error}); other messages can be read with "
            "read_binary_files() and a decoder of their own"
        ) from error


def _wider(one: Any, other: Any) -> Any:
    """Return the type that values of both fit: lists where one is a list; None where there is none."""
    lists = [pa.types.is_list(each) for each in (one, other)]
    values = [each.value_type if is_list else each for each, is_list in zip((one, other), lists, strict=True)]
    known = [each for each in values if not pa.types.is_null(each)]
    if len(known) == 2 and not known[0].equals(known[1]):
        return None
    value = known[0] if known else pa.null()
    return pa.list_(value) if any(lists) else value


def _type_of(features: Sequence[Feature | None], name: str) -> pa.DataType:
    found: pa.DataType = pa.null()
    for feature in features:
        if feature is not None:
            kind, values = feature
            own = _TYPES[kind]
            wider = _wider(found, own if len(values) == 1 else pa.list_(own))
            if wider is None:
                raise ValueError(f"the feature {name!r} has {found} in some records and {own} in others")
            found = wider
    return found


def _column(features: Sequence[Feature | None], kind: Any, name: str) -> Any:
    if not pa.types.is_list(kind):
        for feature in features:
            if feature is not None and (len(feature[1]) != 1 or not _TYPES[feature[0]].equals(kind)):
                raise ValueError(f"the feature {name!r} is not one value of {kind} in all records, as it was")
        values = [None if feature is None else feature[1][0] for feature in features]
        return pa.array(values, kind)
    lengths = np.array([0 if feature is None else len(feature[1]) for feature in features], np.int64)
    if lengths.sum() >= 2**31:
        raise ValueError(f"the feature {name!r} has more than 2**31 values in one block")
    offsets: Any = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    there = [feature[1] for feature in features if feature is not None and len(feature[1])]
    if pa.types.is_floating(kind.value_type) and there:
        flat = pa.array(np.concatenate([np.asarray(each, np.float32) for each in there]))
    else:
        flat = pa.array([value for each in there for value in each], kind.value_type)
    missing: Any = pa.array([feature is None for feature in features], pa.bool_())
    return pa.ListArray.from_arrays(offsets, flat, mask=missing)
