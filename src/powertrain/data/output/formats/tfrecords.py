"""Rows as TFRecord files of ``tf.train.Example`` messages."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.sources.formats.crc32c import crc32c_of_all, masked_all
from powertrain.data.sources.formats.examples import Feature, encode_example, encode_tensor
from powertrain.errors import DataError

_pt = pa.types
#: Rows that are encoded together.
_ROWS = 4096


def write_tfrecords(table: pa.Table, path: str) -> None:
    """Write a file. A null is left out of its Example; a tensor of several dimensions is a serialized TensorProto."""
    kinds = {field.name: _kind_of(field) for field in table.schema}
    with open(path, "wb") as file:
        for first in range(0, table.num_rows, _ROWS):
            piece = table.slice(first, _ROWS)
            columns = {name: _values(piece.column(name), kinds[name], name) for name in kinds}
            records = []
            for row in range(piece.num_rows):
                found: dict[str, Feature] = {}
                for name, values in columns.items():
                    if values[row] is not None:
                        found[name] = (kinds[name], values[row])
                records.append(encode_example(found))
            lengths = [struct.pack("<Q", len(record)) for record in records]
            checks = [_checksums(strings) for strings in (lengths, records)]
            for length, record, one, other in zip(lengths, records, *checks, strict=True):
                file.write(length + one.tobytes() + record + other.tobytes())


def _checksums(strings: list[bytes]) -> Any:
    stops = np.cumsum([len(each) for each in strings])
    starts = np.concatenate([[0], stops[:-1]])
    return masked_all(crc32c_of_all(b"".join(strings), starts, stops)).astype("<u4")


def _kind_of(field: Any) -> str:
    kind = field.type
    if _is_tensor(kind) and len(kind.shape) > 1:
        return "bytes"
    value = kind.value_type if _is_tensor(kind) or _is_list(kind) else kind
    if _pt.is_integer(value) or _pt.is_boolean(value):
        return "int"
    if _pt.is_floating(value):
        return "float"
    if (
        _pt.is_string(value)
        or _pt.is_large_string(value)
        or _pt.is_binary(value)
        or _pt.is_large_binary(value)
    ):
        return "bytes"
    if _pt.is_null(value):
        return ""
    raise DataError(
        f"The column {field.name!r} has the type {kind}, and TFRecords hold lists of bytes, floats and integers. Drop "
        "it with drop_columns(), turn it into one of these with map(), or use write_parquet()."
    )


def _is_list(kind: Any) -> bool:
    return bool(_pt.is_list(kind) or _pt.is_large_list(kind) or _pt.is_fixed_size_list(kind))


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType)


def _values(column: Any, kind: str, name: str) -> list[Any]:
    """Return the list of values of each row; None for null."""
    if _is_tensor(column.type):
        arrays = (
            [row for chunk in column.chunks for row in chunk.to_numpy_ndarray()] if column.num_chunks else []
        )
        if len(column.type.shape) > 1:
            return [[encode_tensor(array)] for array in arrays]
        return [array.tolist() for array in arrays]
    if _pt.is_null(column.type):
        return [None] * len(column)
    rows: list[Any] = column.to_pylist()
    if not _is_list(column.type):
        rows = [None if value is None else [value] for value in rows]
    if kind == "bytes":
        rows = [None if row is None else [_as_bytes(value, name) for value in row] for row in rows]
    elif kind == "int":
        rows = [None if row is None else [_as_int(value, name) for value in row] for row in rows]
    elif kind == "float":
        rows = [None if row is None else _as_floats(row, name) for row in rows]
    return rows


def _as_bytes(value: Any, name: str) -> bytes:
    if value is None:
        raise _null_in_list(name)
    return value.encode() if isinstance(value, str) else bytes(value)


def _as_int(value: Any, name: str) -> int:
    if value is None:
        raise _null_in_list(name)
    if not -(2**63) <= int(value) < 2**63:
        raise DataError(
            f"The column {name!r} has the value {value}, and TFRecords hold integers of 64 bits with a sign. Convert "
            "it with map() first."
        )
    return int(value)


def _as_floats(row: Any, name: str) -> Any:
    if any(value is None for value in row):
        raise _null_in_list(name)
    return np.asarray(row, np.float32)


def _null_in_list(name: str) -> DataError:
    return DataError(
        f"The column {name!r} has a null within a list, and TFRecords have no form for it. Replace it with map() first."
    )
