"""``Expr``: a value computed from the columns of a row, as a tree."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import ODD, column_name, refused, shown
from powertrain.data.expressions.arrow import (
    OPERATORS,
    UNSAFE_CASTS,
    are_same,
    arrow_type,
    floor_division,
    is_text_function,
)
from powertrain.data.expressions.namespaces import (
    ArrayNamespace,
    DateNamespace,
    ListNamespace,
    MapNamespace,
    StringNamespace,
    StructNamespace,
)
from powertrain.data.options.refused import EXPRESSION_METHODS, missing_member
from powertrain.data.rows.nesting import check_nesting
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow.compute as pc


#: Python's, where a property of :class:`Expr` has its name.
Text = str


class Expr:
    """A value computed from the columns of a row: made by ``col()`` and ``lit()``, operators and methods.

    Example::

        dataset.with_column("ratio", col("clicks") / col("views")).filter(col("ratio") > 0.5)
    """

    # A condition is not a bool: "and" would silently keep only one side.
    def __bool__(self) -> bool:
        raise DataError(
            f"The expression {self!r} has no truth value before rows are read. Join conditions with & and | in "
            "parentheses, and use ~ for not."
        )

    __hash__ = object.__hash__
    _refused_names = EXPRESSION_METHODS

    def __getattr__(self, name: Text) -> Any:
        raise missing_member(type(self), name)

    def _called(self, function: Text, *others: Any, options: Any = None) -> Expr:
        return Computed(function, (self, *map(as_expr, others)), options)

    def _by(self, fn: Callable[[Any], Any]) -> Expr:
        return Called(fn, (self,), is_by_row=True)

    # -- operators

    def __add__(self, other: Any) -> Expr:
        return self._called("add", other)

    def __radd__(self, other: Any) -> Expr:
        return as_expr(other)._called("add", self)

    def __sub__(self, other: Any) -> Expr:
        return self._called("subtract", other)

    def __rsub__(self, other: Any) -> Expr:
        return as_expr(other)._called("subtract", self)

    def __mul__(self, other: Any) -> Expr:
        return self._called("multiply", other)

    def __rmul__(self, other: Any) -> Expr:
        return as_expr(other)._called("multiply", self)

    def __truediv__(self, other: Any) -> Expr:
        return self.cast("float64")._called("divide", as_expr(other).cast("float64"))

    def __rtruediv__(self, other: Any) -> Expr:
        return as_expr(other).__truediv__(self)

    def __floordiv__(self, other: Any) -> Expr:
        return self._called("floor_divide", other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return as_expr(other).__floordiv__(self)

    def __mod__(self, other: Any) -> Expr:
        return self._called("modulo", other)

    def __rmod__(self, other: Any) -> Expr:
        return as_expr(other).__mod__(self)

    def __neg__(self) -> Expr:
        return self.negate()

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return self._called("equal", other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return self._called("not_equal", other)

    def __lt__(self, other: Any) -> Expr:
        return self._called("less", other)

    def __le__(self, other: Any) -> Expr:
        return self._called("less_equal", other)

    def __gt__(self, other: Any) -> Expr:
        return self._called("greater", other)

    def __ge__(self, other: Any) -> Expr:
        return self._called("greater_equal", other)

    def __and__(self, other: Any) -> Expr:
        return self._called("and_kleene", other)

    def __rand__(self, other: Any) -> Expr:
        return as_expr(other).__and__(self)

    def __or__(self, other: Any) -> Expr:
        return self._called("or_kleene", other)

    def __ror__(self, other: Any) -> Expr:
        return as_expr(other).__or__(self)

    def __invert__(self) -> Expr:
        return self._called("invert")

    # -- methods

    @property
    def name(self) -> Text | None:
        """The name of the column that it is, or of :meth:`alias`; None for a computed value."""
        return None

    def alias(self, name: Text) -> Expr:
        """Return the same value under a name, for :meth:`Dataset.with_columns` and :meth:`Dataset.select_columns`.

        Args:
            name: The name of the column.
        """
        if not isinstance(name, Text) or not name:
            raise DataError(f"alias() was given {shown(name)}. Give the name of a column, as str.")
        return Aliased(self, column_name("alias()", name))

    def is_null(self) -> Expr:
        """Return whether the value is null."""
        return self._called("is_null")

    def is_not_null(self) -> Expr:
        """Return whether the value is not null."""
        return self._called("is_valid")

    is_valid = is_not_null

    def is_in(self, values: Any) -> Expr:
        """Return whether the value is one of some.

        Args:
            values: A list of values.
        """
        return self._called("is_in", options=("SetLookupOptions", {"value_set": _listed(values)}))

    isin = is_in

    def not_in(self, values: Any) -> Expr:
        """Return whether the value is none of some.

        Args:
            values: A list of values.
        """
        return ~self.is_in(values)

    def cast(self, target_type: Any, *, safe: bool = True) -> Expr:
        """Return the value as another type.

        Args:
            target_type: An Arrow type, its name, or a ``DataType``.
            safe: Raise for values that do not fit.
        """
        options = {"target_type": arrow_type(target_type)}
        if not safe:
            options.update(dict.fromkeys(UNSAFE_CASTS, True))
        return self._called("cast", options=("CastOptions", options))

    def ceil(self) -> Expr:
        """Return the smallest whole number that is not below it."""
        return self._called("ceil")

    def floor(self) -> Expr:
        """Return the largest whole number that is not above it."""
        return self._called("floor")

    def round(self) -> Expr:
        """Return the nearest whole number; halves go to the even one."""
        return self._called("round")

    def trunc(self) -> Expr:
        """Return it without its fraction."""
        return self._called("trunc")

    def ln(self) -> Expr:
        """Return the natural logarithm."""
        return self._called("ln")

    def log10(self) -> Expr:
        """Return the logarithm to base 10."""
        return self._called("log10")

    def log2(self) -> Expr:
        """Return the logarithm to base 2."""
        return self._called("log2")

    def exp(self) -> Expr:
        """Return e to the power of it."""
        return self._called("exp")

    def sqrt(self) -> Expr:
        """Return the square root."""
        return self._called("sqrt")

    def sin(self) -> Expr:
        """Return the sine."""
        return self._called("sin")

    def cos(self) -> Expr:
        """Return the cosine."""
        return self._called("cos")

    def tan(self) -> Expr:
        """Return the tangent."""
        return self._called("tan")

    def asin(self) -> Expr:
        """Return the inverse sine."""
        return self._called("asin")

    def acos(self) -> Expr:
        """Return the inverse cosine."""
        return self._called("acos")

    def atan(self) -> Expr:
        """Return the inverse tangent."""
        return self._called("atan")

    def negate(self) -> Expr:
        """Return it with the other sign."""
        return self._called("negate")

    def sign(self) -> Expr:
        """Return -1, 0 or 1."""
        return self._called("sign")

    def abs(self) -> Expr:
        """Return it without its sign."""
        return self._called("abs")

    def power(self, exponent: Any) -> Expr:
        """Return a power of it.

        Args:
            exponent: A number or an expression.
        """
        return self._called("power", exponent)

    # -- values of some kinds

    @property
    def str(self) -> StringNamespace:
        """Functions of text: ``col("name").str.upper()``."""
        return StringNamespace(self)

    @property
    def list(self) -> ListNamespace:
        """Functions of lists: ``col("tokens").list.len()``."""
        return ListNamespace(self)

    @property
    def struct(self) -> StructNamespace:
        """Fields of structs: ``col("point").struct["x"]``."""
        return StructNamespace(self)

    @property
    def map(self) -> MapNamespace:
        """Functions of maps: ``col("tags").map.keys()``."""
        return MapNamespace(self)

    @property
    def arr(self) -> ArrayNamespace:
        """Functions of lists of one length: ``col("vector").arr.to_list()``."""
        return ArrayNamespace(self)

    @property
    def dt(self) -> DateNamespace:
        """Functions of times: ``col("when").dt.year()``."""
        return DateNamespace(self)

    # -- the tree

    def parts(self) -> Iterator[Expr]:
        """Yield the expressions that it is made of."""
        return iter(())

    def walk(self) -> Iterator[Expr]:
        """Yield it and all expressions below it."""
        yield self
        for part in self.parts():
            yield from part.walk()

    def columns(self) -> builtins.list[Text]:
        """Return the columns that it reads."""
        return builtins.list(dict.fromkeys(each.column for each in self.walk() if isinstance(each, Column)))

    def to_pyarrow(self) -> pc.Expression:
        """Return it as an Arrow expression.

        Raises:
            DataError: It calls a function of the user, or belongs to the row: Arrow alone cannot compute it.
        """
        raise DataError(
            f"The expression {self!r} cannot be an Arrow expression, because it calls a function. Use it in "
            "with_column() or filter()."
        )

    @property
    def is_arrow(self) -> bool:
        """True when Arrow alone can compute it."""
        return all(isinstance(each, (Column, Literal, Computed, Aliased)) for each in self.walk())

    def structurally_equals(self, other: Any) -> bool:
        """Return whether another expression is the same tree.

        Args:
            other: An expression.
        """
        return are_same(self, other)


@dataclass(frozen=True, eq=False, repr=False)
class Column(Expr):
    """The value of a column."""

    column: str

    def __repr__(self) -> str:
        return f"col({self.column!r})"

    @property
    def name(self) -> str | None:
        return self.column

    def to_pyarrow(self) -> pc.Expression:
        import pyarrow.compute as pc

        return pc.field(self.column)


@dataclass(frozen=True, eq=False, repr=False)
class Literal(Expr):
    """A constant."""

    value: Any

    def __repr__(self) -> str:
        return f"lit({shown(self.value)})"

    def to_pyarrow(self) -> pc.Expression:
        import pyarrow.compute as pc

        try:
            return pc.scalar(self.value)
        except ODD as error:
            raise refused("lit() cannot make a constant of", self.value, error) from error


@dataclass(frozen=True, eq=False, repr=False)
class Computed(Expr):
    """A function of Arrow's on some values. ``options`` is the name of a class of options, and its arguments."""

    function: str
    operands: tuple[Expr, ...]
    options: tuple[str, Mapping[str, Any]] | None = None

    def __repr__(self) -> str:
        given = [] if self.options is None else [f"{name}={value}" for name, value in self.options[1].items()]
        return f"{self.function}({', '.join([*map(repr, self.operands), *given])})"

    def parts(self) -> Iterator[Expr]:
        return iter(self.operands)

    def arrow_options(self) -> Any:
        """Return the options as an object of Arrow's; None without any."""
        import pyarrow.compute as pc

        return None if self.options is None else getattr(pc, self.options[0])(**self.options[1])

    @property
    def is_text(self) -> bool:
        """True when it is known to be text."""
        if self.function == "add":
            return any(_is_text(operand) for operand in self.operands)
        return is_text_function(self.function)

    def to_pyarrow(self) -> pc.Expression:
        import pyarrow.compute as pc

        if self.function in ("floor_divide", "modulo"):
            divided: Expr = floor_division(self.function, *self.operands)
            return divided.to_pyarrow()
        operands = [operand.to_pyarrow() for operand in self.operands]
        plain = OPERATORS.get(self.function)
        made: pc.Expression
        if self.function == "add" and self.is_text:
            made = pc.binary_join_element_wise(*operands, pc.scalar(""))
            return made
        if plain is not None:
            made = plain(*operands)
            return made
        if self.function == "cast" and self.options is not None and len(self.options[1]) == 1:
            return operands[0].cast(self.options[1]["target_type"])
        kind: Any = pc.Expression
        made = kind._call(self.function, operands, self.arrow_options())  # as pyarrow's own functions do
        return made


@dataclass(frozen=True, eq=False, repr=False)
class Aliased(Expr):
    """A value under a name."""

    inner: Expr
    given: str

    def __repr__(self) -> str:
        return f"{self.inner!r}.alias({self.given!r})"

    @property
    def name(self) -> str | None:
        return self.given

    def parts(self) -> Iterator[Expr]:
        yield self.inner

    def to_pyarrow(self) -> pc.Expression:
        return self.inner.to_pyarrow()


@dataclass(frozen=True, eq=False, repr=False)
class Star(Expr):
    """All columns, in :meth:`Dataset.select_columns`."""

    def __repr__(self) -> str:
        return "star()"


@dataclass(frozen=True, eq=False, repr=False)
class Called(Expr):
    """A function of the user on arrays of values."""

    fn: Callable[..., Any]
    operands: tuple[Expr, ...]
    kwargs: Mapping[str, Expr] = field(default_factory=dict)
    #: The type of the results; None for that of the values.
    result_type: Any = None
    #: Arguments of the constructor, where ``fn`` is a class.
    constructor_args: tuple[Any, ...] = ()
    constructor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: True where each value follows from its own row alone.
    is_by_row: bool = False

    def __repr__(self) -> str:
        return f"{getattr(self.fn, '__name__', 'udf')}({', '.join(map(repr, self.parts()))})"

    def parts(self) -> Iterator[Expr]:
        yield from self.operands
        yield from self.kwargs.values()


@dataclass(frozen=True, eq=False, repr=False)
class Downloaded(Expr):
    """The bytes of the file that a column names."""

    column_expr: Expr
    filesystem: Any = None

    def __repr__(self) -> str:
        return f"download({self.column_expr!r})"

    def parts(self) -> Iterator[Expr]:
        yield self.column_expr


@dataclass(frozen=True, eq=False, repr=False)
class OfRow(Expr):
    """A value that belongs to the row: "id", "random" or "uuid"."""

    kind: str
    seed: int | None = None
    #: True where it is the same in every epoch and every reading.
    is_fixed: bool = False

    def __repr__(self) -> str:
        return f"{self.kind}()"


def _is_text(expr: Expr) -> bool:
    if isinstance(expr, Aliased):
        return _is_text(expr.inner)
    if isinstance(expr, Literal):
        return isinstance(expr.value, str)
    return isinstance(expr, Computed) and expr.is_text


def as_expr(value: Any) -> Expr:
    """Return an expression; other values become constants."""
    if isinstance(value, Expr):
        return value
    return constant(value)


def constant(value: Any) -> Literal:
    """Return a constant. Raises :class:`DataError` where Arrow has no type for the value."""
    import pyarrow.compute as pc

    check_nesting([value], "lit()")
    try:
        pc.scalar(value)
    except ODD as error:
        raise refused("lit() cannot make a constant of", value, error) from error
    return Literal(value)


def _listed(values: Any) -> Any:
    import pyarrow as pa

    values = values.value if isinstance(values, Literal) else values
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError("it is text")
        return pa.array(list(values))
    except ODD as error:
        raise refused("is_in() takes a list of values, and not", values, error) from error
