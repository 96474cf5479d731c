"""One report as a record, and many as columns of an Arrow table. Pure.

Metrics are flattened into one column per leaf: ``{"eval": {"acc": 1}}`` becomes the column "eval/acc". A "/" or
"\\" inside a key is written with a "\\" before it, and a key that is called as one of our own columns gets a
"\\" in front, so flattening can be undone. Whole numbers, floats, booleans and text have columns of their
type; other values, and columns of mixed type, are JSON text (see :mod:`powertrain.checkpoint.manifest` for
its form of NaN), which is marked in the field's metadata. A missing value is null.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.checkpoint.manifest import from_json_value, to_json_value
from powertrain.run.metrics.arrays import array_of

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns that every table of points has.
OWN_COLUMNS = ("rank", "attempt", "row", "at", "solo")
#: The column of metrics beyond the column limit, as JSON text. No key is ever flattened to this name.
MORE = "\\more"
#: Placeholder for a missing value of a point; None is a value.
MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()
#: Maximum number of metric columns in one segment; metrics beyond it go into :data:`MORE`.
MAX_COLUMNS = 512
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
    """Convert numpy and torch scalars to Python scalars."""
    item = getattr(value, "item", None)
    if item is None:
        raise NotImplementedError(f"a metric of type {type(value).__name__} cannot be kept")
    return item()


encode_records = msgspec.msgpack.Encoder(enc_hook=_plain_scalar).encode
decode_records = msgspec.msgpack.Decoder(list[PointRecord]).decode


def table_of(records: Sequence[PointRecord]) -> pa.Table:
    """Return the points as a table: the reserved columns, then one column per leaf of their metrics."""
    import pyarrow as pa

    alike = _columns_of_alike(records)
    columns, more = _flatten_all(records) if alike is None else (alike, {})
    fields = [pa.field(name, own_type(name)) for name in OWN_COLUMNS]
    arrays: list[Any] = [
        array_of([getattr(record, name) for record in records], field.type)
        for name, field in zip(OWN_COLUMNS, fields, strict=True)
    ]
    if more:
        columns[MORE] = [more.get(index, MISSING) for index in range(len(records))]
    for name, values in columns.items():
        array, field = _column_of(name, values)
        arrays.append(array)
        fields.append(field)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def own_type(name: str) -> pa.DataType:
    """Return the type of one of :data:`OWN_COLUMNS`."""
    import pyarrow as pa

    types: dict[str, pa.DataType] = {"rank": pa.int32(), "attempt": pa.int32(), "row": pa.int64()}
    types |= {"at": pa.float64(), "solo": pa.bool_()}
    return types[name]


def _columns_of_alike(records: Sequence[PointRecord]) -> dict[str, list[Any]] | None:
    """Return the columns of reports that all have the same few flat keys, the common case; else None."""
    dicts = [record.metrics for record in records]
    keys = list(dicts[0]) if dicts else []
    if len(keys) > MAX_COLUMNS or set(map(len, dicts)) != {len(keys)}:
        return None
    try:
        columns = {name_of_path((key,)): [metrics[key] for metrics in dicts] for key in keys}
    except KeyError:
        return None
    nested = any(dict in set(map(type, values)) for values in columns.values())
    return None if nested else columns


def _flatten_all(
    records: Sequence[PointRecord],
) -> tuple[dict[str, list[Any]], dict[int, dict[str, Any]]]:
    """Return the leaves by column, and by index those without a column."""
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
                    if len(columns) >= MAX_COLUMNS:
                        more.setdefault(index, {})[leaf] = item
                        continue
                    column = columns[leaf] = [MISSING] * count
                column[index] = item
        if len(names) > 4 * MAX_COLUMNS:
            names.clear()
    return columns, more


def flatten(name: str, value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (column, leaf) of each leaf below ``name``. A dict that is empty or has keys other than text is a leaf."""
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
    """Return a key escaped as a part of a column's name."""
    return key.replace("\\", "\\\\").replace("/", "\\/")


def name_of_path(path: Sequence[str]) -> str:
    """Return the column of a leaf under these keys."""
    name = "/".join(map(escape, path))
    return f"\\{name}" if name in OWN_COLUMNS else name


def path_of_name(name: str) -> list[str]:
    """Return the keys of a column: the inverse of :func:`name_of_path`."""
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
    """Return the values as one typed column if they have one plain type, else as JSON text."""
    import pyarrow as pa

    kinds = set(map(type, values))
    if type(MISSING) in kinds:
        kinds.discard(type(MISSING))
        plain = [None if value is MISSING else value for value in values]
    else:
        plain = values
    types: dict[type, pa.DataType] = {
        float: pa.float64(),
        int: pa.int64(),
        bool: pa.bool_(),
        str: pa.string(),
    }
    kind = types.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is not None:
        with contextlib.suppress(OverflowError):  # an integer beyond 64 bits
            return array_of(plain, kind), pa.field(name, kind)
    return _json_column(values), _json_field(name)


def _json_column(values: list[Any]) -> pa.Array[Any]:
    import pyarrow as pa

    texts = [None if value is MISSING else _json_text(value) for value in values]
    return array_of(texts, pa.string())


def _json_field(name: str) -> pa.Field[Any]:
    import pyarrow as pa

    return pa.field(name, pa.string(), metadata=_JSON_FIELD)


def _json_text(value: Any) -> str:
    return msgspec.json.encode(to_json_value(value)).decode()


def _from_json_text(text: str) -> Any:
    return from_json_value(msgspec.json.decode(text))


def is_json(field: pa.Field[Any]) -> bool:
    return (field.metadata or {}).get(b"powertrain") == b"json"


def values_of(column: pa.ChunkedArray[Any] | pa.Array[Any], field: pa.Field[Any]) -> list[Any]:
    """Return the values of a column: the inverse of :func:`_column_of`."""
    read = _from_json_text if is_json(field) else _same
    return [MISSING if value is None else read(value) for value in column.to_pylist()]


def _same(value: Any) -> Any:
    return value


def unified(schemas: Sequence[pa.Schema], *, most: int | None = None, lossless: bool = True) -> pa.Schema:
    """Return a common schema: the columns of all schemas in order of first appearance.

    A column whose type differs between them becomes JSON text; with ``lossless=False`` integers and floats become
    floats instead. Metrics beyond the first ``most`` have no column and go together into :data:`MORE`.
    """
    import pyarrow as pa

    fields: dict[str, pa.Field[Any]] = {}
    for schema in schemas:
        for field in schema:
            known = fields.setdefault(field.name, field)
            if known.equals(field, check_metadata=True):
                continue
            numbers = {known.type, field.type} == {pa.int64(), pa.float64()} and not lossless
            fields[field.name] = pa.field(field.name, pa.float64()) if numbers else _json_field(field.name)
    more = fields.pop(MORE, None)
    chosen = list(fields.values())
    if most is not None and len(chosen) - len(OWN_COLUMNS) > most:
        chosen, more = chosen[: len(OWN_COLUMNS) + most], _json_field(MORE)
    return pa.schema([*chosen, more] if more is not None else chosen)


def conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with the columns of a schema that is :func:`unified` from its own and others."""
    import pyarrow as pa

    if batch.schema.equals(schema, check_metadata=True):
        return batch
    own = {field.name: (field, column) for field, column in zip(batch.schema, batch.columns, strict=True)}
    arrays: list[Any] = []
    for field in schema:
        source, column = own.pop(field.name, (None, None))
        if source is None or column is None:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        elif source.equals(field, check_metadata=True):
            arrays.append(column)
        elif is_json(field):
            arrays.append(_json_column(values_of(column, source)))
        else:
            arrays.append(column.cast(field.type, safe=False))
    if own:
        place = schema.get_field_index(MORE)
        more = values_of(arrays[place], schema.field(place))
        arrays[place] = _json_column(_with_leaves(more, own))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _with_leaves(more: list[Any], columns: Mapping[str, tuple[pa.Field[Any], pa.Array[Any]]]) -> list[Any]:
    """Return the metrics of each point beyond its columns, with the leaves of columns that are dropped."""
    for name, (field, column) in columns.items():
        for index, value in enumerate(values_of(column, field)):
            if value is not MISSING:
                more[index] = {name: value} if more[index] is MISSING else {**more[index], name: value}
    return more


def concatenate(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables for reading: see :func:`unified` for columns with different types."""
    import pyarrow as pa

    schema = unified([table.schema for table in tables], lossless=False)
    batches = (conformed(batch, schema) for table in tables for batch in table.to_batches())
    return pa.Table.from_batches(batches, schema)


def metrics_at(table: pa.Table | pa.RecordBatch, index: int) -> dict[str, Any]:
    """Return the metrics of one point of a table or batch, nested as they were reported."""
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
    """Return nested dicts from (column, leaf): the inverse of flattening."""
    metrics: dict[str, Any] = {}
    for name, value in leaves.items():
        *above, key = path_of_name(name)
        place = metrics
        for part in above:
            place = place.setdefault(part, {})
        place[key] = value
    return metrics
