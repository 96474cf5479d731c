"""Checks of the arguments of ``Dataset``'s methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from powertrain.data.arguments import keyword_arguments, one_of, positional_arguments
from powertrain.data.options.strategies import processes_of
from powertrain.errors import DataError


def function(
    method: str,
    fn: Callable[..., Any],
    fn_args: Iterable[Any] | None,
    fn_kwargs: Mapping[str, Any] | None,
    fn_constructor_args: Iterable[Any] | None,
    fn_constructor_kwargs: Mapping[str, Any] | None,
    concurrency: Any,
    compute: Any = None,
) -> dict[str, Any]:
    """Return the arguments that all operations with a user's function have."""
    return {
        "fn": fn,
        "fn_args": positional_arguments("fn_args", fn_args),
        "fn_kwargs": keyword_arguments("fn_kwargs", fn_kwargs),
        "fn_constructor_args": positional_arguments("fn_constructor_args", fn_constructor_args),
        "fn_constructor_kwargs": keyword_arguments("fn_constructor_kwargs", fn_constructor_kwargs),
        "concurrency": processes_of(method, concurrency, compute),
    }


def checked_place(on: Any) -> str | None:
    place: str | None = one_of(
        "on", on, (None, "ray"), "Use on='ray' for tasks of a Ray cluster, or leave it out."
    )
    return place


def checked_batch_format(batch_format: str | None) -> str:
    """Return the format of batches; Ray Data's "default" and None are numpy and pyarrow."""
    choices = (None, "default", "numpy", "pandas", "pyarrow")
    form = one_of("batch_format", batch_format, choices, "Use 'numpy', 'pandas' or 'pyarrow'.")
    return {None: "pyarrow", "default": "numpy"}.get(form, form or "")


def parsed(condition: Any) -> Any:
    """Return a condition as an Arrow expression; as an ``Expr`` where it calls functions."""
    import pyarrow.compute as pc

    from powertrain.data.expressions.expr import Expr

    if isinstance(condition, Expr):
        return condition.to_pyarrow() if condition.is_arrow else condition
    if isinstance(condition, str):
        from powertrain.data.expressions.text import parse

        return parse(condition)
    if not isinstance(condition, pc.Expression):
        raise DataError(
            f"filter() got a {type(condition).__name__}. Give a function, an expression such as col('label') == 3 or "
            "pyarrow.compute.field('label') == 3, or text such as 'label == 3'."
        )
    return condition
