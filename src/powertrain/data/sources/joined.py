"""Several tables of the same columns as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def joined(tables: list[pa.Table], what: str) -> pa.Table:
    """Return one table of all of them; a column of nulls gets the type that it has elsewhere."""
    import pyarrow as pa

    from powertrain.data.sources.plain import plain_table

    if not tables:
        raise DataError(f"No {what} were given. Give at least one.")
    plain = [plain_table(table) for table in tables]
    for number, table in enumerate(plain):
        if set(table.column_names) != set(plain[0].column_names):
            odd = sorted(set(table.column_names) ^ set(plain[0].column_names))[0]
            raise DataError(
                f"The {what} 0 and {number} have different columns: only one of them has {odd!r}. Give all the same."
            )
    try:
        return plain[0] if len(plain) == 1 else pa.concat_tables(plain, promote_options="default")
    except (pa.ArrowException, TypeError) as error:
        raise DataError(
            f"The {what} do not fit together: {error}. Give them columns of the same types."
        ) from error
