"""Common types of the columns of text files whose parts have different types. Pure."""

from __future__ import annotations

import pyarrow as pa

_pt = pa.types


def wider(one: pa.DataType, other: pa.DataType, *, text_fits_all: bool) -> pa.DataType | None:
    """Return the type that values of both can be read as; None where there is none.

    ``text_fits_all`` where every value is text in the file, as in CSV.
    """
    if one.equals(other) or _pt.is_null(other):
        return one
    if _pt.is_null(one):
        return other
    if _is_number(one) and _is_number(other):
        return pa.float64()
    if _is_moment(one) and _is_moment(other):
        return _finer(one, other)
    if _pt.is_struct(one) and _pt.is_struct(other):
        return _wider_struct(one, other, text_fits_all)
    if _pt.is_list(one) and _pt.is_list(other):
        item = wider(one.value_type, other.value_type, text_fits_all=text_fits_all)
        return None if item is None else pa.list_(item)
    if _pt.is_binary(one) or _pt.is_binary(other):
        return pa.binary() if text_fits_all else None
    if text_fits_all or all(_pt.is_string(each) or _is_moment(each) for each in (one, other)):
        return pa.string()
    return None


def wider_schema(one: pa.Schema, other: pa.Schema, *, text_fits_all: bool) -> pa.Schema | str:
    """Return the columns of both; or the name of a column whose types have nothing in common."""
    fields = {field.name: field.type for field in one}
    for field in other:
        found = wider(fields.get(field.name, pa.null()), field.type, text_fits_all=text_fits_all)
        if found is None:
            return field.name
        fields[field.name] = found
    return pa.schema(list(fields.items()))


def _is_number(given: pa.DataType) -> bool:
    return _pt.is_integer(given) or _pt.is_floating(given)


def _is_moment(given: pa.DataType) -> bool:
    return _pt.is_date(given) or (_pt.is_timestamp(given) and given.tz is None)


def _finer(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the finer of a date and times to the second or finer."""
    units = ("s", "ms", "us", "ns")
    found = [given.unit for given in (one, other) if _pt.is_timestamp(given)]
    return pa.timestamp(max(found, key=units.index)) if found else one


def _wider_struct(one: pa.DataType, other: pa.DataType, text_fits_all: bool) -> pa.DataType | None:
    as_schemas = [pa.schema([given.field(i) for i in range(given.num_fields)]) for given in (one, other)]
    found = wider_schema(as_schemas[0], as_schemas[1], text_fits_all=text_fits_all)
    return None if isinstance(found, str) else pa.struct(list(found))
