"""One report as a record, and many as columns of an Arrow table. Pure.

Metrics are flattened into one column a leaf: ``{"eval": {"acc": 1}}`` becomes the column "eval/acc". A "/" or
"\\" inside a key is written with a "\\" before it, and a key that is called as one of our own columns gets a
"\\" in front, so flattening can be undone. Whole numbers, floats, booleans and text have columns of their
type; other values, and columns of mixed type, are JSON text (see :mod:`powertrain.checkpoint.manifest` for
how it says NaN), and the field's metadata says so. A missing value is null.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.checkpoint.manifest import from_json_value, to_json_value

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns that every table of points has.
OWN_COLUMNS = ("rank", "attempt", "row", "at", "solo")
#: The column of what had no column left, as JSON text. No key is ever flattened to this name.
MORE = "\\more"
#: Stands in lists of values where a point has none; None is a value.
MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()
#: Columns of metrics in one table; what is beyond goes together into :data:`MORE`.
_MAX_COLUMNS = 512
_JSON_FIELD = {b"powertrain": b"json"}


class PointRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One report of one rank. ``at`` is in Unix seconds; ``row`` is 0 for a ``solo`` report."""

    rank: int
    attempt: int
    row: int
    at: float
    solo: bool
    metrics: dict[str, Any]


def _plain_scalar(value: Any) -> Any:
    """numpy and torch scalars as Python's."""
    item = getattr(value, "item", None)
    if item is None:
        raise NotImplementedError(f"a metric of type {type(value).__name__} cannot be kept")
    return item()


encode_records = msgspec.msgpack.Encoder(enc_hook=_plain_scalar).encode
decode_records = msgspec.msgpack.Decoder(list[PointRecord]).decode


def table_of(records: Sequence[PointRecord]) -> pa.Table:
    """The points as a table: our own columns, then one column a leaf of their metrics."""
    import pyarrow as pa

    columns, more = _flatten_all(records)
    fields = [pa.field(name, _own_type(name)) for name in OWN_COLUMNS]
    arrays: list[Any] = [
        pa.array([getattr(record, name) for record in records], field.type)
        for name, field in zip(OWN_COLUMNS, fields, strict=True)
    ]
    if more:
        columns[MORE] = [more.get(index, MISSING) for index in range(len(records))]
    for name, values in columns.items():
        array, field = _column_of(name, values)
        arrays.append(array)
        fields.append(field)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _own_type(name: str) -> pa.DataType:
    import pyarrow as pa

    types: dict[str, pa.DataType] = {"rank": pa.int32(), "attempt": pa.int32(), "row": pa.int64()}
    types |= {"at": pa.float64(), "solo": pa.bool_()}
    return types[name]


def _flatten_all(
    records: Sequence[PointRecord],
) -> tuple[dict[str, list[Any]], dict[int, dict[str, Any]]]:
    """Leaves by column, and by index those for which there is no column left."""
    columns: dict[str, list[Any]] = {}
    more: dict[int, dict[str, Any]] = {}
    names: dict[str, str] = {}
    count = len(records)
    for index, record in enumerate(records):
        for key, value in record.metrics.items():
            name = names.get(key)
            if name is None:
                name = names[key] = name_of_path((key,))
            leaves = flatten(name, value) if type(value) is dict else ((name, value),)
            for leaf, item in leaves:
                column = columns.get(leaf)
                if column is None:
                    if len(columns) >= _MAX_COLUMNS:
                        more.setdefault(index, {})[leaf] = item
                        continue
                    column = columns[leaf] = [MISSING] * count
                column[index] = item
        if len(names) > 4 * _MAX_COLUMNS:
            names.clear()
    return columns, more


def flatten(name: str, value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(column, leaf) of each leaf below ``name``. A dict that is empty or has keys other than text is one."""
    if not value or not all(type(key) is str for key in value):
        yield name, value
        return
    prefix = escape(name[1:]) if name.startswith("\\") and name[1:] in OWN_COLUMNS else name
    for key, item in value.items():
        below = f"{prefix}/{escape(key)}"
        if type(item) is dict:
            yield from flatten(below, item)
        else:
            yield below, item


def escape(key: str) -> str:
    """One key as a part of a column's name."""
    return key.replace("\\", "\\\\").replace("/", "\\/")


def name_of_path(path: Sequence[str]) -> str:
    """The column of a leaf under these keys."""
    name = "/".join(map(escape, path))
    return f"\\{name}" if name in OWN_COLUMNS else name


def path_of_name(name: str) -> list[str]:
    """The keys of a column: the inverse of :func:`name_of_path`."""
    if name.startswith("\\") and name[1:] in OWN_COLUMNS:
        return [name[1:]]
    parts = [""]
    characters = iter(name)
    for character in characters:
        if character == "\\":
            parts[-1] += next(characters)
        elif character == "/":
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _column_of(name: str, values: list[Any]) -> tuple[pa.Array[Any], pa.Field[Any]]:
    """The values as one typed column where they have one plain type, else as JSON text."""
    import pyarrow as pa

    kinds = set(map(type, values))
    if type(MISSING) in kinds:
        kinds.discard(type(MISSING))
        plain = [None if value is MISSING else value for value in values]
    else:
        plain = values
    types = {float: pa.float64(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}
    kind = types.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is not None:
        with contextlib.suppress(pa.ArrowInvalid, OverflowError):  # a whole number beyond 64 bits
            return pa.array(plain, kind), pa.field(name, kind)
    texts = [None if value is MISSING else _json_text(value) for value in values]
    return pa.array(texts, pa.string()), pa.field(name, pa.string(), metadata=_JSON_FIELD)


def _json_text(value: Any) -> str:
    return msgspec.json.encode(to_json_value(value)).decode()


def _from_json_text(text: str) -> Any:
    return from_json_value(msgspec.json.decode(text))


def is_json(field: pa.Field[Any]) -> bool:
    return (field.metadata or {}).get(b"powertrain") == b"json"


def values_of(column: pa.ChunkedArray[Any], field: pa.Field[Any]) -> list[Any]:
    """The inverse of :func:`_column_of`."""
    read = _from_json_text if is_json(field) else _same
    return [MISSING if value is None else read(value) for value in column.to_pylist()]


def _same(value: Any) -> Any:
    return value


def concatenate(tables: Sequence[pa.Table]) -> pa.Table:
    """The tables end to end. A column whose type differs between them becomes JSON text."""
    import pyarrow as pa

    fields: dict[str, pa.Field[Any]] = {}
    mixed: set[str] = set()
    for table in tables:
        for field in table.schema:
            if not fields.setdefault(field.name, field).equals(field, check_metadata=True):
                mixed.add(field.name)
    chosen: list[pa.Field[Any]] = []
    arrays: list[Any] = []
    for name, field in fields.items():
        pieces = [
            table.column(name) if name in table.column_names else pa.nulls(table.num_rows, field.type)
            for table in tables
        ]
        array: Any
        if name not in mixed:
            array = pa.chunked_array([c for p in pieces for c in getattr(p, "chunks", [p])], type=field.type)
        else:
            sources = [t.schema.field(name) if name in t.column_names else field for t in tables]
            values = [v for p, source in zip(pieces, sources, strict=True) for v in values_of(p, source)]
            array, field = _column_of(name, values)
        chosen.append(field)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=pa.schema(chosen))


def metrics_at(table: pa.Table, index: int) -> dict[str, Any]:
    """The metrics of one point of a table, nested again as they were reported."""
    leaves: dict[str, Any] = {}
    for field in table.schema:
        if field.name in OWN_COLUMNS:
            continue
        value = table.column(field.name)[index].as_py()
        if value is not None:
            leaves[field.name] = _from_json_text(value) if is_json(field) else value
    leaves.update(leaves.pop(MORE, {}))
    return unflatten(leaves)


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from (column, leaf): the inverse of flattening."""
    metrics: dict[str, Any] = {}
    for name, value in leaves.items():
        *above, key = path_of_name(name)
        place = metrics
        for part in above:
            place = place.setdefault(part, {})
        place[key] = value
    return metrics
