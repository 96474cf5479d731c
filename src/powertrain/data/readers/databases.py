"""Datasets from databases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data import arguments
from powertrain.data.from_memory import dataset_of
from powertrain.data.options.scheduling import take_ray_arguments
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.dataset import Dataset


def read_sql(
    sql: str,
    connection_factory: Callable[[], Any],
    *,
    sql_params: Any = None,
    shard_keys: Sequence[str] | None = None,
    shard_hash_fn: str = "MD5",
    **ray_arguments: Any,
) -> Dataset:
    """Read the rows of a query, through any driver of Python's database interface (PEP 249).

    The query runs once, in this process, when rows or their number are first needed. The result is kept in memory, and
    in a file for the ranks. A run resumes in mid-epoch only if the query gives the same rows in the same order: give it
    an ORDER BY.

    Args:
        sql: The query.
        connection_factory: A function without arguments that returns a connection, such as
            ``lambda: sqlite3.connect(path)``.
        sql_params: Parameters of the query, in the form of the driver.
        shard_keys: Without effect: the query runs once.
        shard_hash_fn: Without effect.
        **ray_arguments: Ray Data's arguments about scheduling, without effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_sql("SELECT text, label FROM train ORDER BY id", lambda: sqlite3.connect("train.db"))
    """
    from powertrain.data.sources.formats.sql import SqlSource

    without_effect = {
        "shard_keys": shard_keys,
        "shard_hash_fn": None if shard_hash_fn == "MD5" else shard_hash_fn,
    }
    take_ray_arguments("read_sql", ray_arguments)
    take_ray_arguments("read_sql", without_effect, known=frozenset(without_effect))
    if not isinstance(sql, str) or not sql.strip():
        raise DataError(f"read_sql({arguments.shown(sql)}) is not a query. Give a SELECT statement, as str.")
    if not callable(connection_factory):
        raise DataError(
            f"read_sql(): connection_factory={arguments.shown(connection_factory)} cannot be called. Give a function "
            "that connects: lambda: sqlite3.connect(path)."
        )
    return dataset_of(SqlSource(sql, connection_factory, sql_params))
