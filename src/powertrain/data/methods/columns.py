"""Other columns: selected, dropped, renamed, added, computed by expressions, decoded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from powertrain.data.arguments import column_name, column_names, keyword_arguments, shown
from powertrain.data.dataset_arguments import checked_batch_format, function
from powertrain.data.methods.statistics import StatisticsMethods
from powertrain.data.options.scheduling import take_ray_arguments
from powertrain.data.plan.changing import project
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.expressions.expr import Expr

_D = TypeVar("_D", bound="ColumnMethods")


class ColumnMethods(StatisticsMethods):
    """The methods of :class:`powertrain.data.Dataset` that change columns."""

    __slots__ = ()

    def select_columns(self: _D, cols: str | Sequence[str | Expr], **ray_remote_args: Any) -> _D:
        """Return a dataset of only these columns, in this order. Others are not even read where the source allows it.

        Args:
            cols: The name of a column, or several; expressions among them are computed.
            **ray_remote_args: Ray Data's arguments about scheduling, without effect.

        Example::

            dataset.select_columns(["text", "label"])
        """
        from powertrain.data.expressions.expr import Expr
        from powertrain.data.operations.columns import SelectColumns
        from powertrain.data.operations.computing import ComputeColumns
        from powertrain.data.sources.filtered import ProjectedSource

        take_ray_arguments("select_columns", ray_remote_args)
        given = [cols] if isinstance(cols, Expr) else cols
        if isinstance(given, (list, tuple)) and any(isinstance(each, Expr) for each in given):
            return self._then(ComputeColumns(_selected(given), only=True, verb="select_columns"))
        names = column_names("select_columns", given)
        return self._of_plan(
            project(self.plan, lambda source: ProjectedSource(source, names), SelectColumns(names))
        )

    def drop_columns(self: _D, cols: str | Sequence[str], **ray_remote_args: Any) -> _D:
        """Return a dataset without these columns.

        Args:
            cols: The name of a column, or several.
            **ray_remote_args: Ray Data's arguments about scheduling, without effect.

        Example::

            dataset.drop_columns("path")
        """
        from powertrain.data.operations.columns import DropColumns
        from powertrain.data.sources.relabeled import WithoutColumnsSource

        take_ray_arguments("drop_columns", ray_remote_args)
        names = column_names("drop_columns", cols)
        return self._of_plan(
            project(self.plan, lambda source: WithoutColumnsSource(source, names), DropColumns(names))
        )

    def rename_columns(self: _D, names: Mapping[str, str] | Sequence[str], **ray_remote_args: Any) -> _D:
        """Return a dataset with other names for its columns.

        Args:
            names: A dict from old to new names, or new names for all columns in order.
            **ray_remote_args: Ray Data's arguments about scheduling, without effect.

        Example::

            dataset.rename_columns({"img": "image"})
        """
        from powertrain.data.operations.columns import RenameColumns
        from powertrain.data.sources.filtered import ProjectedSource
        from powertrain.data.sources.relabeled import RelabeledSource

        take_ray_arguments("rename_columns", ray_remote_args)
        if isinstance(names, Mapping):
            renames = keyword_arguments("rename_columns(): names", names)
            column_names("rename_columns", [*renames, *renames.values()])
            return self._of_plan(
                project(
                    self.plan,
                    lambda source: ProjectedSource(source, None, renames),
                    RenameColumns(renames),
                )
            )
        new = column_names("rename_columns", [names] if isinstance(names, str) else names)
        return self._of_plan(
            project(self.plan, lambda source: RelabeledSource(source, new), RenameColumns(new))
        )

    def with_column(self: _D, column_name: str, expr: Expr, **ray_remote_args: Any) -> _D:
        """Return a dataset with one more column, computed by an expression. A column of that name is replaced.

        Args:
            column_name: The name of the column.
            expr: An expression on other columns: see :mod:`powertrain.data.expressions`.
            **ray_remote_args: Ray Data's arguments about scheduling, without effect.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value.

        Example::

            dataset.with_column("ratio", col("clicks") / col("views"))
        """
        take_ray_arguments("with_column", ray_remote_args)
        return self._computed("with_column", {column_name: expr})

    def with_columns(
        self: _D, exprs: Mapping[str, Expr] | None = None, *more_exprs: Any, **ray_remote_args: Any
    ) -> _D:
        """Return a dataset with more columns, each computed by an expression on the columns before.

        Args:
            exprs: A dict from the name of a column to its expression.
            *more_exprs: Further dicts.
            **ray_remote_args: Ray Data's arguments about scheduling, without effect.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value.

        Example::

            dataset.with_columns({"half": col("x") / 2, "square": col("x") * col("x")})
        """
        take_ray_arguments("with_columns", ray_remote_args)
        given: dict[str, Any] = {}
        for each in (exprs, *more_exprs):
            given.update(keyword_arguments("with_columns(): exprs", each))
        if not given:
            raise DataError("with_columns() was given no expression. Give a dict from names to expressions.")
        return self._computed("with_columns", given)

    def _computed(self: _D, method: str, given: Mapping[Any, Any]) -> _D:
        from powertrain.data.expressions.expr import Expr, Star
        from powertrain.data.operations.computing import ComputeColumns

        for name, expr in given.items():
            if not isinstance(name, str) or not name:
                raise DataError(
                    f"{method}() was given {shown(name)} as a name. Give the name of a column, as str."
                )
            column_name(method, name)
            if isinstance(expr, Star):
                raise DataError(f"{method}({name!r}) was given star(), which only select_columns() takes.")
            if not isinstance(expr, Expr):
                raise DataError(
                    f"{method}({name!r}) was given a {type(expr).__name__}. Give an expression of "
                    "powertrain.data.expressions, such as col('x') * 2 or lit(1); for a function use add_column()."
                )
        return self._then(ComputeColumns(tuple(given.items()), verb=method))

    def add_column(
        self: _D,
        col: str,
        fn: Callable[..., Any],
        *,
        batch_format: str | None = "pandas",
        compute: Any = None,
        concurrency: int | tuple[int, ...] | None = None,
        **ray_remote_args: Any,
    ) -> _D:
        """Return a dataset with one more column: the values that ``fn(batch)`` returns.

        Args:
            col: The name of the column; one of that name is replaced.
            fn: A function of a batch that returns one value for each row.
            batch_format: ``"pandas"``, ``"numpy"`` or ``"pyarrow"``.
            compute: As for :meth:`Dataset.map`.
            concurrency: As for :meth:`Dataset.map`.
            **ray_remote_args: Ray Data's arguments about scheduling, without effect.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value.

        Example::

            dataset.add_column("double", lambda frame: frame["id"] * 2)
        """
        from powertrain.data.operations.functions import AddColumn

        take_ray_arguments("add_column", ray_remote_args)
        if not isinstance(col, str) or not col:
            raise DataError(
                f"add_column() was given {shown(col)} as a name. Give the name of a column, as str."
            )
        form = checked_batch_format(batch_format)
        given = function("add_column", fn, None, None, None, None, concurrency, compute)
        if callable(fn):
            given["fn"] = _adding(fn, column_name("add_column", col), form)
        return self._then(AddColumn(**given, batch_format=form, changes_count=False))

    def decode_images(
        self: _D,
        columns: str | Sequence[str],
        *,
        size: tuple[int, int] | None = None,
        mode: str | None = None,
    ) -> _D:
        """Return a dataset whose columns of images (JPEG, PNG, …: bytes) are decoded: uint8 (height, width, channels).

        Columns of :func:`read_images` and of Hugging Face's ``Image`` features are decoded automatically.

        Args:
            columns: The name of a column, or several.
            size: (height, width) to scale every image to.
            mode: A mode of Pillow, such as "RGB".
        """
        from powertrain.data.operations.decode import DecodeImages
        from powertrain.data.operations.images import checked_mode, checked_size

        names = column_names("decode_images", columns)
        return self._then(DecodeImages(names, checked_size(size), checked_mode(mode)))


def _selected(given: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the expressions of select_columns by name."""
    from powertrain.data.expressions.expr import Column, Expr, Star

    found: list[tuple[str, Any]] = []
    for each in given:
        expr = each if isinstance(each, Expr) else Column(column_names("select_columns", each)[0])
        name = "*" if isinstance(expr, Star) else expr.name
        if name is None:
            raise DataError(
                f"select_columns() was given {expr!r} without a name. Give it one: (...).alias('name')."
            )
        if name in dict(found):
            raise DataError(f"The column {shown(name)} is selected twice. Name each column once.")
        found.append((name, expr))
    return tuple(found)


def _adding(fn: Callable[..., Any], name: str, form: str) -> Callable[..., Any]:
    """Return a function of batches that adds the values that ``fn`` returns."""
    if isinstance(fn, type):
        raise DataError(
            f"add_column() was given the class {fn.__name__}. Give a function, or use map_batches()."
        )

    @functools.wraps(fn)
    def add(batch: Any, **more: Any) -> Any:
        values = fn(batch, **more)
        if form == "numpy":
            return {**batch, name: values}
        if form == "pandas":
            batch = batch.copy(deep=False)
            batch[name] = values
            return batch
        place = batch.schema.get_field_index(name)
        return batch.append_column(name, values) if place < 0 else batch.set_column(place, name, values)

    return add
