"""Conditions on columns written as text, for :meth:`Dataset.filter`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from powertrain.data.arguments import ODD, column_name, shown
from powertrain.data.expressions.expr import Column, constant
from powertrain.errors import DataError


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
        return Column(column_name("filter", node.id)).to_pyarrow()
    if isinstance(node, ast.Constant):
        return constant(node.value).to_pyarrow()
    if isinstance(node, ast.BoolOp):
        return _chained(_OPERATORS[type(node.op)], [_expression(value) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_expression(node.operand)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return constant(ast.literal_eval(node)).to_pyarrow()
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
