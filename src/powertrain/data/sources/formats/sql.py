"""The rows of a query to a database, through any driver of Python's database interface (PEP 249).

The query runs once, in the process that inspects the data. Its rows are kept as an Arrow table, which ranks read from
a file: a second run of the query might give other rows, or the same in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import ODD, shortened, shown
from powertrain.data.sources.base import Source, SourceFacts
from powertrain.data.sources.items import table_of_columns
from powertrain.data.sources.memory import TableSource
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are fetched at a time.
_ROWS_AT_A_TIME = 16384


class SqlSource(Source):
    """The rows of a query."""

    in_memory = True
    cheap_to_decode = True

    def __init__(self, sql: str, connection_factory: Callable[[], Any], parameters: Any = None) -> None:
        self._sql, self._factory, self._parameters = sql, connection_factory, parameters
        self._inner: Source | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Other processes must not run the query again, and need no way to connect.
        return {**self.__dict__, "_factory": None} if self._inner is not None else self.__dict__

    def _fetched(self) -> Source:
        if self._inner is None:
            self._inner = TableSource(fetch_table(self._sql, self._factory, self._parameters))
        return self._inner

    def inspect(self) -> SourceFacts:
        return self._fetched().inspect()

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        return self._fetched().read(block, columns)

    def name_row(self, block: int, row: int) -> str:
        return self._fetched().name_row(block, row)

    def publish(self, directory: str) -> Source:
        return self._fetched().publish(directory)


def fetch_table(sql: str, connection_factory: Callable[[], Any], parameters: Any) -> pa.Table:
    """Return the rows of a query. Raises :class:`DataError`."""
    import pyarrow as pa

    with connected("read_sql", sql, connection_factory) as cursor:
        if parameters is None:
            cursor.execute(sql)
        else:
            cursor.execute(sql, parameters)
        if cursor.description is None:
            raise DataError(
                f"read_sql({shown(sql)}) is a statement without rows. Give a SELECT statement; to write, "
                "use write_sql()."
            )
        names = [str(column[0]) for column in cursor.description]
        tables = []
        while rows := cursor.fetchmany(_ROWS_AT_A_TIME):
            tables.append(_table(names, rows))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"read_sql({shown(sql)}) gives two columns {twice!r}. Name one otherwise: SELECT ... AS other."
        )
    if not tables:
        return pa.table({name: pa.nulls(0) for name in names})
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowException, TypeError) as error:
        raise DataError(
            f"The rows of read_sql({shown(sql)}) do not have one type in each column: {error}. Convert them with CAST."
        ) from error


def _table(names: Sequence[str], rows: Sequence[Any]) -> pa.Table:
    return table_of_columns({name: [row[place] for row in rows] for place, name in enumerate(names)}, "row")


@contextmanager
def connected(method: str, sql: str, connection_factory: Callable[[], Any]) -> Iterator[Any]:
    """Yield a cursor; commit at the end, or roll back. Errors of the driver become a :class:`DataError`."""
    try:
        connection = connection_factory()
    except ODD as error:
        raise DataError(
            f"{method}(): connection_factory could not connect ({type(error).__name__}: {shortened(str(error), 300)}). "
            "Check the address and the credentials that it uses."
        ) from error
    missing = [name for name in ("cursor", "commit", "close") if not hasattr(connection, name)]
    if missing:
        raise DataError(
            f"{method}(): connection_factory returned a {type(connection).__name__} without {missing[0]}(). Return a "
            "connection of a driver after PEP 249, such as sqlite3.connect(path)."
        )
    try:
        yield connection.cursor()
        connection.commit()
    except DataError:
        _roll_back(connection)
        raise
    except ODD as error:
        _roll_back(connection)
        raise DataError(
            f"{method}({shown(sql)}) failed in the database: {type(error).__name__}: {shortened(str(error), 300)}. "
            "Check the statement and its parameters."
        ) from error
    except BaseException:
        _roll_back(connection)
        raise
    finally:
        connection.close()


def _roll_back(connection: Any) -> None:
    try:
        connection.rollback()
    except ODD:
        pass  # drivers without transactions have no rollback, and the first error is the one to report
