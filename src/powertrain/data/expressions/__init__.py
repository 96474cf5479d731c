"""Expressions on columns, for :meth:`Dataset.with_column` and :meth:`Dataset.filter`: ``col("x") * 2``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from powertrain.data.arguments import column_name, flag, seed_number, shown
from powertrain.data.expressions.arrow import arrow_type
from powertrain.data.expressions.expr import (
    Aliased,
    Called,
    Column,
    Downloaded,
    Expr,
    Literal,
    OfRow,
    Star,
    as_expr,
    constant,
)
from powertrain.data.expressions.text import parse
from powertrain.data.options.refused import EXPRESSION_CLASSES, EXPRESSION_FUNCTIONS, refused_name
from powertrain.errors import DataError

__all__ = [
    "Expr",
    "col",
    "download",
    "lit",
    "monotonically_increasing_id",
    "parse",
    "pyarrow_udf",
    "random",
    "star",
    "udf",
    "uuid",
]

#: Classes of expressions under their names in Ray Data.
_CLASSES: dict[str, type[Expr]] = {
    "ColumnExpr": Column,
    "LiteralExpr": Literal,
    "AliasExpr": Aliased,
    "StarExpr": Star,
    "DownloadExpr": Downloaded,
}


def col(name: str) -> Column:
    """Return a column for use in an expression.

    Args:
        name: The name of the column.

    Returns:
        An expression.

    Raises:
        DataError: ``name`` is not a name of a column.

    Example::

        dataset.filter(col("label") == 3)
    """
    if not isinstance(name, str) or not name:
        raise DataError(f"col() was given {shown(name)}. Give the name of a column, as str.")
    return Column(column_name("col()", name))


def lit(value: Any) -> Literal:
    """Return a constant for use in an expression, where a plain value is not accepted.

    Args:
        value: The value.

    Returns:
        An expression.

    Raises:
        DataError: Arrow has no type for the value.

    Example::

        dataset.with_column("split", lit("train"))
    """
    return constant(value)


def star() -> Star:
    """Return all columns, for :meth:`Dataset.select_columns`.

    Example::

        dataset.select_columns([star(), (col("x") * 2).alias("twice")])
    """
    return Star()


def udf(return_dtype: Any = None) -> Callable[[Any], Any]:
    """Return a decorator that makes a function of arrays one of expressions.

    The function gets an Arrow array of the values of each argument and returns as many values. A class is constructed
    once in each process. A parameter named ``rng`` gets a numpy generator that belongs to the first row of the array.

    Args:
        return_dtype: The type of the results: an Arrow type, its name or a ``DataType``; None for that of the values.

    Returns:
        A decorator. The decorated function takes expressions, and constants, and returns an expression.

    Raises:
        DataError: There is no such type, or something else than a function was decorated.

    Example::

        @udf(return_dtype="int64")
        def next_one(values):
            return pyarrow.compute.add(values, 1)


        dataset.with_column("next", next_one(col("id")))
    """
    kind = None if return_dtype is None else arrow_type(return_dtype)

    def decorate(fn: Any) -> Any:
        if not callable(fn):
            raise DataError(
                f"@udf() was put before {shown(fn)}. Decorate a function, or a class with __call__."
            )
        if isinstance(fn, type):
            return _class_of_expressions(fn, kind)

        def call(*args: Any, **kwargs: Any) -> Expr:
            return Called(fn, tuple(map(as_expr, args)), {k: as_expr(v) for k, v in kwargs.items()}, kind)

        call.__name__, call.__doc__ = getattr(fn, "__name__", "udf"), fn.__doc__
        return call

    return decorate


def pyarrow_udf(return_dtype: Any = None) -> Callable[[Any], Any]:
    """Return a decorator as :func:`udf` does: functions get Arrow arrays in any case.

    Args:
        return_dtype: The type of the results.
    """
    return udf(return_dtype)


def _class_of_expressions(kind_of_fn: type, result_type: Any) -> Any:
    class OfExpressions:
        """Constructor arguments of a class whose instances are called with arrays."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._args, self._kwargs = args, kwargs

        def __call__(self, *args: Any, **kwargs: Any) -> Expr:
            named = {key: as_expr(value) for key, value in kwargs.items()}
            operands = tuple(map(as_expr, args))
            return Called(kind_of_fn, operands, named, result_type, self._args, self._kwargs)

    OfExpressions.__name__ = OfExpressions.__qualname__ = kind_of_fn.__name__
    return OfExpressions


def download(uri_column_name: str, *, filesystem: Any = None) -> Downloaded:
    """Return the bytes of the file that a column names by path or address.

    A file that cannot be read ends the epoch with an error that names it. Leave its row out before, by a condition on
    the column, or set its path to null.

    Args:
        uri_column_name: The name of the column.
        filesystem: A pyarrow or fsspec file system that the paths belong to.

    Returns:
        An expression; null where the path is null.

    Raises:
        DataError: ``uri_column_name`` is not a name, or ``filesystem`` not a file system.

    Example::

        dataset.with_column("bytes", download("uri")).decode_images("bytes")
    """
    from powertrain.data.sources.files.files import as_arrow_filesystem

    given = uri_column_name if isinstance(uri_column_name, Column) else col(uri_column_name)
    as_arrow_filesystem(filesystem)  # to refuse other objects
    return Downloaded(given, filesystem)


def monotonically_increasing_id() -> OfRow:
    """Return the number of the row in the stored data: unique, and the same at any number of ranks.

    Rows that a function makes of one row have its number plus multiples of 2^40. A split, a sample or another order of
    blocks afterwards computes and keeps the rows first, as ``materialize()`` does, so that each keeps its number.

    Example::

        dataset.with_column("id", monotonically_increasing_id())
    """
    return OfRow("monotonically_increasing_id")


def random(*, seed: int | None = None, reseed_after_execution: bool = True) -> OfRow:
    """Return a random number from 0 to before 1 for each row, which follows from row, epoch and seed.

    Args:
        seed: Columns of the same seed in one call have the same numbers; the dataset's own seed is part of them too.
        reseed_after_execution: With False and a seed the numbers follow from seed and row alone: they are the same in
            every epoch and every reading. By default they differ from epoch to epoch, and after a split.

    Raises:
        DataError: ``seed`` is not a whole number, or ``reseed_after_execution`` not True or False.

    Example::

        dataset.filter(random() < 0.1)
    """
    number, is_redrawn = seed_number("seed", seed), flag("reseed_after_execution", reseed_after_execution)
    return OfRow("random", number, is_fixed=number is not None and not is_redrawn)


def uuid() -> OfRow:
    """Return a random UUID as text for each row, which follows from row, epoch and seed.

    Example::

        dataset.with_column("key", uuid())
    """
    return OfRow("uuid")


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name]
    found = refused_name(name, EXPRESSION_FUNCTIONS, EXPRESSION_CLASSES)
    if found is None:
        raise AttributeError(f"module 'powertrain.data.expressions' has no attribute {name!r}")
    return found
