"""Rows as ORC files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from powertrain.data.arguments import shortened, shown
from powertrain.data.output.writing import WriteTable
from powertrain.errors import DataError


def orc_writer(arguments: dict[str, Any]) -> WriteTable:
    """Return a writer of ORC files with pyarrow's arguments."""
    from pyarrow import orc

    def write(table: pa.Table, path: str) -> None:
        try:
            orc.write_table(table, path, **arguments)
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            given = ", ".join(f"{name}={shown(value)}" for name, value in arguments.items()) or "no arguments"
            raise DataError(
                f"The rows cannot be written as ORC with {given}: {shortened(str(error), 300)}. Check these arguments, "
                "which are those of pyarrow.orc.write_table, and the types of the columns."
            ) from error

    return write
