"""Conditions on columns, for :meth:`Dataset.filter`: written as Arrow expressions or as text."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import ODD, column_name, refused, shown
from powertrain.data.rows.nesting import check_nesting
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow.compute as pc


def _true_division(left: Any, right: Any) -> Any:
    """Divide as Python does, also integers; Arrow's own division truncates."""
    return left.cast("double") / right.cast("double")


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _true_division,
    ast.And: operator.and_,
    ast.Or: operator.or_,
}


def col(name: str) -> pc.Expression:
    """Return a column for use in an expression.

    Args:
        name: The name of the column.

    Returns:
        An Arrow expression.

    Raises:
        DataError: ``name`` is not a name of a column.

    Example::

        dataset.filter(col("label") == 3)
    """
    import pyarrow.compute as pc

    if not isinstance(name, str) or not name:
        raise DataError(f"col() was given {shown(name)}. Give the name of a column, as str.")
    return pc.field(column_name("col()", name))


def lit(value: Any) -> pc.Expression:
    """Return a constant for use in an expression, where a plain value is not accepted.

    Args:
        value: The value.

    Returns:
        An Arrow expression.

    Raises:
        DataError: Arrow has no type for the value.

    Example::

        dataset.filter(col("label") == lit(3))
    """
    import pyarrow.compute as pc

    check_nesting([value], "lit()")
    try:
        return pc.scalar(value)
    except ODD as error:
        raise refused("lit() cannot make a constant of", value, error) from error


def parse(text: str) -> Any:
    """Return the Arrow expression of a condition in Python's syntax: ``"label == 3 and name in ['a', 'b']"``.

    Names are columns. Comparisons, ``in``, ``is None``, ``and``, ``or``, ``not`` and plain arithmetic are supported.
    Raises :class:`DataError` for anything else.
    """
    if not isinstance(text, str):
        raise DataError(f"A filter is text such as 'label == 3', and not {shown(text)}.")
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body)
    except DataError:
        raise
    except (*ODD, MemoryError) as error:
        raise DataError(
            f"The filter {shown(text)} cannot be understood: {str(error)[:200]}. Write column names, constants, "
            "comparisons, 'in', 'is None', 'and', 'or' and 'not', or give a pyarrow expression or a function."
        ) from error


def _expression(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return col(node.id)
    if isinstance(node, ast.Constant):
        return lit(node.value)
    if isinstance(node, ast.BoolOp):
        return _chained(_OPERATORS[type(node.op)], [_expression(value) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_expression(node.operand)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return lit(ast.literal_eval(node))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_expression(node.left), _expression(node.right))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        steps = zip(sides[:-1], node.ops, sides[1:], strict=True)
        return _chained(operator.and_, [_comparison(left, op, right) for left, op, right in steps])
    raise ValueError(f"{ast.unparse(node)!r} is not allowed in a filter")


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
    if isinstance(op, (ast.In, ast.NotIn)):
        among = _expression(left).isin(list(ast.literal_eval(right)))
        return among if isinstance(op, ast.In) else ~among
    if isinstance(op, (ast.Is, ast.IsNot)):
        if not (isinstance(right, ast.Constant) and right.value is None):
            raise ValueError("'is' can only be followed by None")
        missing = _expression(left).is_null()
        return missing if isinstance(op, ast.Is) else ~missing
    return _OPERATORS[type(op)](_expression(left), _expression(right))


def _chained(join: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = join(result, value)
    return result
