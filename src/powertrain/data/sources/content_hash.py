"""A hash of the values of an Arrow table, independent of chunks, padding and the version of Arrow; in plain form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

_pt = pa.types


def content_hash(table: pa.Table) -> str:
    """Return 32 hexadecimal digits that change when a value, a name, a type or a mark does."""
    digest = xxhash.xxh3_128()
    for field, column in zip(table.schema, table.columns, strict=True):
        digest.update(f"{field.name}\0{field.type}\0{sorted((field.metadata or {}).items())}\0".encode())
        hashed = _ColumnHash()
        for chunk in column.chunks:
            hashed.add(chunk)
        digest.update(hashed.digest())
    digest.update(str(table.num_rows).encode())
    return digest.hexdigest()


class _ColumnHash:
    """Hash of one column, or of a part of a nested one: where its nulls are, its lengths, its values, its parts."""

    def __init__(self) -> None:
        self._rows = 0
        self._nulls, self._lengths, self._values = xxhash.xxh3_128(), xxhash.xxh3_128(), xxhash.xxh3_128()
        self._parts: dict[str, _ColumnHash] = {}

    def digest(self) -> bytes:
        whole = xxhash.xxh3_128(self._nulls.digest() + self._lengths.digest() + self._values.digest())
        for name, part in self._parts.items():
            whole.update(name.encode() + part.digest())
        return whole.digest()

    def add(self, array: Any) -> None:
        """Add the next values."""
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if array.null_count:
            where = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            self._nulls.update((where + self._rows).astype("<i8").tobytes())
        self._rows += len(array)
        self._add_values(array)

    def _add_values(self, array: Any) -> None:
        kind = array.type
        if _pt.is_null(kind):
            return
        if _pt.is_struct(kind):
            for place, part in enumerate(array.flatten()):
                self._part(kind.field(place).name).add(part)
        elif _pt.is_map(kind):
            self._add_values(
                array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
            )
        elif _pt.is_nested(kind):
            self._add_lengths(pc.list_value_length(array))
            self._part("").add(array.flatten())
        elif _is_bytes(kind):
            self._add_lengths(pc.binary_length(array))
            self._values.update(_bytes_of(array))
        else:
            self._add_fixed(array)

    def _add_lengths(self, lengths: Any) -> None:
        self._lengths.update(lengths.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).tobytes())

    def _add_fixed(self, array: Any) -> None:
        """Add values of one width. The bytes of a null are undefined, so nulls are left out."""
        values = array.drop_null() if array.null_count else array
        if _pt.is_boolean(values.type):
            self._values.update(values.to_numpy(zero_copy_only=False).tobytes())
            return
        width = values.type.bit_width // 8
        start = values.offset * width
        self._values.update(
            memoryview(values.buffers()[1])[start : start + len(values) * width] if len(values) else b""
        )

    def _part(self, name: str) -> _ColumnHash:
        return self._parts.setdefault(name, _ColumnHash())


def _is_bytes(kind: pa.DataType) -> bool:
    return (
        _pt.is_string(kind) or _pt.is_binary(kind) or _pt.is_large_string(kind) or _pt.is_large_binary(kind)
    )


def _bytes_of(array: Any) -> memoryview | bytes:
    """Return the bytes of all values, one after the other."""
    values = array.drop_null() if array.null_count else array
    if len(values) == 0:
        return b""
    large = _pt.is_large_string(values.type) or _pt.is_large_binary(values.type)
    _, offsets, data = values.buffers()
    numbers = np.frombuffer(offsets, "<i8" if large else "<i4")[
        values.offset : values.offset + len(values) + 1
    ]
    return memoryview(data)[int(numbers[0]) : int(numbers[-1])] if data is not None else b""
