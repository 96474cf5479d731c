"""Functions of expressions by the kind of their values: ``.str``, ``.list``, ``.struct``, ``.map``, ``.dt``."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from powertrain.data.arguments import shown
from powertrain.errors import DataError

#: An ``Expr``, whose module imports this one.
Expr = Any
#: Functions of text without arguments, by their names in Ray Data.
_OF_TEXT = {
    "len": "utf8_length", "byte_len": "binary_length", "upper": "utf8_upper", "lower": "utf8_lower",
    "capitalize": "utf8_capitalize", "title": "utf8_title", "swapcase": "utf8_swapcase", "reverse": "utf8_reverse",
    "is_alpha": "utf8_is_alpha", "is_alnum": "utf8_is_alnum", "is_digit": "utf8_is_digit",
    "is_decimal": "utf8_is_decimal", "is_numeric": "utf8_is_numeric", "is_space": "utf8_is_space",
    "is_lower": "utf8_is_lower", "is_upper": "utf8_is_upper", "is_title": "utf8_is_title",
    "is_printable": "utf8_is_printable", "is_ascii": "string_is_ascii",
}  # fmt: skip
#: Functions of text with arguments: Arrow's function, its class of options, and the names of the arguments.
_WITH_OPTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "starts_with": ("starts_with", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "ends_with": ("ends_with", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "contains": ("match_substring", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "match": ("match_like", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "match_regex": ("match_substring_regex", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "find": ("find_substring", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "find_regex": ("find_substring_regex", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "count": ("count_substring", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "count_regex": ("count_substring_regex", "MatchSubstringOptions", ("pattern", "ignore_case")),
    "slice": ("utf8_slice_codeunits", "SliceOptions", ("start", "stop", "step")),
    "replace": ("replace_substring", "ReplaceSubstringOptions", ("pattern", "replacement", "max_replacements")),
    "replace_regex": (
        "replace_substring_regex", "ReplaceSubstringOptions", ("pattern", "replacement", "max_replacements"),
    ),
    "replace_slice": ("utf8_replace_slice", "ReplaceSliceOptions", ("start", "stop", "replacement")),
    "split": ("split_pattern", "SplitPatternOptions", ("pattern", "max_splits", "reverse")),
    "split_regex": ("split_pattern_regex", "SplitPatternOptions", ("pattern", "max_splits", "reverse")),
    "split_whitespace": ("utf8_split_whitespace", "SplitOptions", ("max_splits", "reverse")),
    "extract": ("extract_regex", "ExtractRegexOptions", ("pattern",)),
    "center": ("utf8_center", "PadOptions", ("width", "padding")),
    "lpad": ("utf8_lpad", "PadOptions", ("width", "padding")),
    "rpad": ("utf8_rpad", "PadOptions", ("width", "padding")),
}  # fmt: skip
_TRIMS = {"strip": "utf8_trim", "lstrip": "utf8_ltrim", "rstrip": "utf8_rtrim"}
_SIDES = {"left": "lpad", "right": "rpad", "both": "center"}


class _Namespace:
    """Functions of one kind of values."""

    _label = ""

    def __init__(self, expr: Expr) -> None:
        self._expr = expr

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise DataError(
            f"Expressions have no function .{self._label}.{name}(). Use map_batches(), or @udf of "
            "powertrain.data.expressions."
        )

    def _of(self, function: str, options: tuple[str, dict[str, Any]] | None = None) -> Expr:
        return self._expr._called(function, options=options)

    def _by(self, fn: Callable[..., Any]) -> Expr:
        return self._expr._by(fn)


class StringNamespace(_Namespace):
    """Functions of text, under the names of Ray Data: ``upper``, ``contains``, ``replace``, ``split``, and so on."""

    _label = "str"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TEXT:
            return lambda: self._of(_OF_TEXT[name])
        if name in _WITH_OPTIONS:
            return lambda *args, **kwargs: self._with_options(name, args, kwargs)
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_OF_TEXT, *_WITH_OPTIONS})

    def _with_options(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expr:
        import pyarrow.compute as pc

        function, options, names = _WITH_OPTIONS[name]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            if len(args) > len(names):
                raise TypeError(f"it takes {len(names)} arguments")
            getattr(pc, options)(**given)
        except Exception as error:
            shown_args = ", ".join(
                [*map(shown, args), *(f"{key}={shown(value)}" for key, value in kwargs.items())]
            )
            raise DataError(
                f".str.{name}({shown_args}) cannot be used: {error}. It takes {', '.join(names)}."
            ) from error
        return self._of(function, (options, given))

    def strip(self, characters: str | None = None) -> Expr:
        """Return text without whitespace, or these characters, at both ends."""
        return self._trimmed("strip", characters)

    def lstrip(self, characters: str | None = None) -> Expr:
        """Return text without whitespace, or these characters, at its beginning."""
        return self._trimmed("lstrip", characters)

    def rstrip(self, characters: str | None = None) -> Expr:
        """Return text without whitespace, or these characters, at its end."""
        return self._trimmed("rstrip", characters)

    def _trimmed(self, name: str, characters: str | None) -> Expr:
        if characters is None:
            return self._of(f"{_TRIMS[name]}_whitespace")
        if not isinstance(characters, str):
            raise DataError(f".str.{name}({shown(characters)}) takes characters as text.")
        return self._of(_TRIMS[name], ("TrimOptions", {"characters": characters}))

    def pad(self, width: int, fillchar: str = " ", side: str = "right") -> Expr:
        """Return text of at least ``width`` characters; ``side`` is "left", "right" or "both"."""
        if side not in _SIDES:
            raise DataError(f".str.pad(side={shown(side)}) is unknown. Use 'left', 'right' or 'both'.")
        return self._with_options(_SIDES[side], (width, fillchar), {})

    def repeat(self, n: int) -> Expr:
        """Return text ``n`` times in a row."""
        return self._expr._called("binary_repeat", n)


class ListNamespace(_Namespace):
    """Functions of lists."""

    _label = "list"

    def len(self) -> Expr:
        """Return the number of values."""
        return self._of("list_value_length")

    def get(self, index: int) -> Expr:
        """Return the value at an index; a negative one counts from the end."""
        if not isinstance(index, int) or isinstance(index, bool):
            raise DataError(f".list.get({shown(index)}) takes an index, as int.")
        return self._by(lambda values: _item(values, index))

    def slice(self, start: int = 0, stop: int | None = None, step: int = 1) -> Expr:
        """Return the values from ``start`` to before ``stop``."""
        return self._by(lambda values: _mapped(values, lambda each: each[start:stop:step], _list_type))

    def __getitem__(self, key: Any) -> Expr:
        if isinstance(key, builtins.slice):
            return self.slice(key.start or 0, key.stop, key.step or 1)
        return self.get(key)

    def sort(self, order: str = "ascending", null_placement: str = "at_end") -> Expr:
        """Return the values in order."""
        if order not in ("ascending", "descending") or null_placement not in ("at_start", "at_end"):
            raise DataError(
                f".list.sort(order={shown(order)}, null_placement={shown(null_placement)}) is unknown. Use 'ascending' "
                "or 'descending', and 'at_start' or 'at_end'."
            )
        return self._by(
            lambda values: _mapped(values, lambda each: _sorted(each, order, null_placement), _list_type)
        )

    def flatten(self) -> Expr:
        """Return the values of the inner lists in one list."""
        return self._by(
            lambda values: _mapped(
                values,
                lambda each: [one for inner in each for one in inner or ()],
                lambda kind: _list_type(kind.value_type),
            )
        )


class ArrayNamespace(_Namespace):
    """Functions of lists of one length."""

    _label = "arr"

    def to_list(self) -> Expr:
        """Return them as lists of any length."""
        return self._by(lambda values: _mapped(values, list, _list_type))


class StructNamespace(_Namespace):
    """Fields of structs."""

    _label = "struct"

    def field(self, field_name: str) -> Expr:
        """Return a field by its name."""
        return self._of("struct_field", ("StructFieldOptions", {"indices": field_name}))

    def field_by_index(self, index: int) -> Expr:
        """Return a field by its number."""
        return self._of("struct_field", ("StructFieldOptions", {"indices": [index]}))

    def __getitem__(self, key: str | int) -> Expr:
        return self.field_by_index(key) if isinstance(key, int) else self.field(key)


class MapNamespace(_Namespace):
    """Functions of maps."""

    _label = "map"

    def keys(self) -> Expr:
        """Return the keys, as a list."""
        return self._by(lambda values: _mapped(values, lambda each: [key for key, _ in each], _keys_type))

    def values(self) -> Expr:
        """Return the values, as a list."""
        return self._by(
            lambda values: _mapped(values, lambda each: [value for _, value in each], _values_type)
        )


class DateNamespace(_Namespace):
    """Functions of times."""

    _label = "dt"

    def year(self) -> Expr:
        """Return the year."""
        return self._of("year")

    def month(self) -> Expr:
        """Return the month, from 1."""
        return self._of("month")

    def day(self) -> Expr:
        """Return the day of the month."""
        return self._of("day")

    def hour(self) -> Expr:
        """Return the hour."""
        return self._of("hour")

    def minute(self) -> Expr:
        """Return the minute."""
        return self._of("minute")

    def second(self) -> Expr:
        """Return the second."""
        return self._of("second")

    def strftime(self, fmt: str) -> Expr:
        """Return the time as text in this format."""
        return self._of("strftime", ("StrftimeOptions", {"format": fmt}))

    def ceil(self, unit: str) -> Expr:
        """Return the next time that is whole in this unit."""
        return self._of("ceil_temporal", ("RoundTemporalOptions", {"unit": unit}))

    def floor(self, unit: str) -> Expr:
        """Return the last time that is whole in this unit."""
        return self._of("floor_temporal", ("RoundTemporalOptions", {"unit": unit}))

    def round(self, unit: str) -> Expr:
        """Return the nearest time that is whole in this unit."""
        return self._of("round_temporal", ("RoundTemporalOptions", {"unit": unit}))


def _mapped(values: Any, function: Callable[[Any], Any], type_of: Callable[[Any], Any]) -> Any:
    """Return the results for all values. ``type_of`` derives their type from that of the values: found from the
    results it would differ between pieces of the data, where one holds only nulls or empty lists."""
    import pyarrow as pa

    kind = None if pa.types.is_null(values.type) else type_of(values.type)
    return pa.array([None if value is None else function(value) for value in values.to_pylist()], kind)


def _list_type(kind: Any) -> Any:
    import pyarrow as pa

    return pa.null() if pa.types.is_null(kind) else pa.list_(kind.value_type)


def _keys_type(kind: Any) -> Any:
    import pyarrow as pa

    return pa.list_(kind.key_type)


def _values_type(kind: Any) -> Any:
    import pyarrow as pa

    return pa.list_(kind.item_type)


def _item(values: Any, index: int) -> Any:
    return _mapped(
        values,
        lambda each: each[index] if -len(each) <= index < len(each) else None,
        lambda kind: kind.value_type,
    )


def _sorted(values: list[Any], order: str, null_placement: str) -> list[Any]:
    known = sorted((value for value in values if value is not None), reverse=order == "descending")
    nulls = [None] * (len(values) - len(known))
    return [*nulls, *known] if null_placement == "at_start" else [*known, *nulls]
