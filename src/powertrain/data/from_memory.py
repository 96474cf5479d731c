"""Datasets from memory: Python objects, DataFrames, arrays and Arrow tables."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data import arguments
from powertrain.data.options.scheduling import take_ray_arguments
from powertrain.data.plan.plan import Part, Plan
from powertrain.data.sources.joined import joined
from powertrain.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    from powertrain.data.dataset import Dataset
    from powertrain.data.sources.base import Source

#: Most numbers of range(): the list of blocks is made beforehand.
_LARGEST_RANGE = 2**40
#: Most items that are read from a sequence.
_MOST_ITEMS = 2**34


def dataset_of(source: Source) -> Dataset:
    """Return a dataset of the rows of a source."""
    from powertrain.data.dataset import Dataset

    return Dataset(Plan((Part(source),)))


def from_items(
    items: Iterable[Any], *, parallelism: int = -1, override_num_blocks: int | None = None
) -> Dataset:
    """Make a dataset of Python objects: the keys of dicts are columns (null where missing); others are in "item".

    Python's floats become torch's default dtype in tensors. Arrays and tensors of one shape stay arrays.

    Args:
        items: The objects.
        parallelism: Accepted for compatibility, without effect.
        override_num_blocks: Accepted for compatibility, without effect.

    Returns:
        A dataset with one row for each object.

    Raises:
        DataError: ``items`` is not a collection of rows, or the values of a column do not have one type.

    Example::

        powertrain.data.from_items([{"x": 1.0}, {"x": 2.0}])
    """
    from powertrain.data.sources.items import table_of_items
    from powertrain.data.sources.memory import TableSource

    take_ray_arguments("from_items", {"parallelism": parallelism, "override_num_blocks": override_num_blocks})
    what = "Give a list with one item for each row; for a dict of columns use from_numpy()."
    if isinstance(items, (str, bytes, Mapping)) or not (
        hasattr(type(items), "__iter__") or hasattr(type(items), "__getitem__")
    ):
        raise DataError(f"from_items was given {arguments.shown(items)}, a {type(items).__name__}. {what}")
    try:
        # A sequence without __iter__ ends at its length: it may yield more beyond it.
        count = None if hasattr(type(items), "__iter__") else len(items)  # type: ignore[arg-type]
        if (expected := operator.length_hint(items)) > _MOST_ITEMS:
            raise OverflowError(
                f"{expected} items do not fit in memory; from_torch() asks for items when needed"
            )
        given = list(itertools.islice(items, count))
    except (*arguments.ODD, MemoryError) as error:
        raise arguments.refused("from_items cannot read through", items, error) from error
    table = _made(lambda: table_of_items(given), "from_items cannot make rows of", given)
    return dataset_of(TableSource(table, "item"))


def _made(make: Callable[[], pa.Table], what: str, given: Any) -> pa.Table:
    """Return a table of a user's values; exceptions of the values themselves become an error about them."""
    try:
        return make()
    except DataError:
        raise
    except (*arguments.ODD, MemoryError) as error:
        raise arguments.refused(what, given, error) from error


def from_pandas(
    dfs: pd.DataFrame | Sequence[pd.DataFrame], override_num_blocks: int | None = None
) -> Dataset:
    """Make a dataset of a DataFrame, or of several with the same columns. The index is left out.

    Args:
        dfs: A DataFrame, or a list of them, whose rows come one after the other.
        override_num_blocks: Accepted for compatibility, without effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: Another object was given, or the DataFrames have different columns.

    Example::

        powertrain.data.from_pandas(pd.DataFrame({"x": [1.0, 2.0], "label": [0, 1]}))
    """
    import pandas as pd

    from powertrain.data.sources.memory import TableSource

    take_ray_arguments("from_pandas", {"override_num_blocks": override_num_blocks})
    what = "Give a DataFrame or a list of them."
    frames = [dfs] if isinstance(dfs, pd.DataFrame) else arguments.values_of("dfs", dfs, what)
    for frame in frames:
        if not isinstance(frame, pd.DataFrame):
            raise DataError(
                f"from_pandas was given a {type(frame).__name__}. Give a DataFrame or a list of them."
            )
    table = _made(
        lambda: joined([_table_of_frame(frame) for frame in frames], "DataFrames"),
        "from_pandas cannot make rows of",
        dfs,
    )
    return dataset_of(TableSource(table, "row"))


def _table_of_frame(frame: pd.DataFrame) -> pa.Table:
    import pyarrow as pa

    names = [str(name) for name in frame.columns]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"The DataFrame has several columns {twice[0]!r}. Rename or drop the others.")
    tables = [_table_of_series(frame.iloc[:, place], name) for place, name in enumerate(names)]
    fields = [table.schema.field(0) for table in tables]
    return pa.Table.from_arrays([table.column(0) for table in tables], schema=pa.schema(fields))


def _table_of_series(series: Any, name: str) -> pa.Table:
    """Return one column. None, NA and, in columns of objects, NaN are nulls."""
    import numpy as np
    import pyarrow as pa

    from powertrain.data.rows.nesting import check_nesting
    from powertrain.data.sources.base import ARRAYS
    from powertrain.data.sources.items import holds_arrays, table_of_columns

    if series.dtype == object:
        check_nesting(series.tolist(), f"column {name!r}")
    try:
        is_numpy = isinstance(series.dtype, np.dtype) and series.dtype != object
        # In Arrow's conversion of pandas, NaN would be null, also where it is a number among others.
        array: Any = pa.array(series.to_numpy()) if is_numpy else pa.Array.from_pandas(series)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        # Arrays of several dimensions, tensors and the like, which only items handle; or it raises with the reason.
        return table_of_columns({name: list(series)}, "row")
    had_arrays = pa.types.is_list(array.type) and holds_arrays(series)
    field = pa.field(name, array.type, metadata=dict([ARRAYS]) if had_arrays else None)
    return pa.Table.from_arrays([array], schema=pa.schema([field]))


def from_numpy(ndarrays: np.ndarray[Any, Any] | Sequence[Any] | Mapping[str, Any]) -> Dataset:
    """Make a dataset of an array, or of several one after the other, in the column "data"; or of a dict of columns.

    Arrays of more than one dimension give a tensor for each row.

    Args:
        ndarrays: An array, a list of arrays, or a dict from the name of a column to its array.

    Returns:
        A dataset with one row for each entry of the first dimension.

    Raises:
        DataError: The arrays of a dict have different lengths, or the arrays of a list do not fit together.

    Example::

        powertrain.data.from_numpy({"features": np.zeros((100, 8)), "label": np.zeros(100)})
    """
    from powertrain.data.sources.memory import TableSource

    table = _made(lambda: _table_of_ndarrays(ndarrays), "from_numpy cannot make rows of", ndarrays)
    return dataset_of(TableSource(table))


def _table_of_ndarrays(ndarrays: Any) -> pa.Table:
    import numpy as np

    from powertrain.data.sources.items import table_of_arrays

    if isinstance(ndarrays, Mapping):
        columns = {
            arguments.column_name("from_numpy", str(name)): _array(values)
            for name, values in ndarrays.items()
        }
        lengths = {name: len(values) for name, values in columns.items() if values.ndim}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"The arrays have different numbers of rows: {lengths}. Give all of them as many."
            )
        return table_of_arrays(columns)
    what = "Give a numpy array, a list of arrays, or a dict of arrays."
    arrays = (
        [ndarrays] if isinstance(ndarrays, np.ndarray) else arguments.values_of("ndarrays", ndarrays, what)
    )
    return joined([table_of_arrays({"data": _array(array)}) for array in arrays], "arrays")


def _array(values: Any) -> Any:
    """Return values as an array; those of a tensor without its gradient."""
    import numpy as np

    from powertrain.data.rows.nesting import check_nesting

    if not isinstance(values, np.ndarray):
        check_nesting([values], "an array")
    return np.asarray(values.detach().cpu() if hasattr(type(values), "detach") else values)


def _read_stream(content: Any) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(content).read_all()


def from_arrow(tables: Any, *, override_num_blocks: int | None = None) -> Dataset:
    """Make a dataset of an Arrow table or record batch, or of several with the same columns.

    Args:
        tables: A ``pyarrow.Table`` or ``RecordBatch``, the bytes of an Arrow IPC stream, or a list of these.
        override_num_blocks: Accepted for compatibility, without effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: Another object was given, or the tables have different columns.

    Example::

        powertrain.data.from_arrow(pa.table({"x": [1, 2, 3]}))
    """
    import pyarrow as pa

    from powertrain.data.sources.memory import TableSource

    take_ray_arguments("from_arrow", {"override_num_blocks": override_num_blocks})
    given = list(tables) if isinstance(tables, (list, tuple)) else [tables]
    found = []
    for table in given:
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if isinstance(table, (bytes, pa.Buffer)):
            read = functools.partial(_read_stream, table)
            table = _made(read, "from_arrow was given bytes that are not an Arrow IPC stream:", table)
        if not isinstance(table, pa.Table):
            raise DataError(
                f"from_arrow was given a {type(table).__name__}. Give a pyarrow.Table or a list of them."
            )
        found.append(table)
    table = _made(lambda: joined(found, "tables"), "from_arrow cannot make rows of", tables)
    return dataset_of(TableSource(table))


def from_blocks(blocks: Sequence[Any]) -> Dataset:
    """Make a dataset of tables and DataFrames of the same columns, one after the other.

    Args:
        blocks: A list of Arrow tables or DataFrames.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: Another object was given, or the columns differ.

    Example::

        powertrain.data.from_blocks([pa.table({"x": [1, 2]}), pa.table({"x": [3]})])
    """
    import pandas as pd

    given = arguments.values_of("blocks", blocks, "Give a list of Arrow tables or DataFrames.")
    return from_arrow([_table_of_frame(each) if isinstance(each, pd.DataFrame) else each for each in given])


def range_tensor(
    n: int,
    *,
    shape: Sequence[int] = (1,),
    parallelism: int = -1,
    concurrency: int | None = None,
    override_num_blocks: int | None = None,
) -> Dataset:
    """Make a dataset of ``n`` tensors in the column "data"; all values of tensor i are i.

    Args:
        n: How many tensors.
        shape: The shape of each.
        parallelism: Accepted for compatibility, without effect.
        concurrency: Accepted for compatibility, without effect.
        override_num_blocks: Accepted for compatibility, without effect.

    Returns:
        A dataset of ``n`` rows.

    Raises:
        DataError: ``n`` or ``shape`` is not of whole numbers.

    Example::

        powertrain.data.range_tensor(1000, shape=(2, 2))
    """
    import numpy as np

    given = {
        "parallelism": parallelism,
        "concurrency": concurrency,
        "override_num_blocks": override_num_blocks,
    }
    take_ray_arguments("range_tensor", given)
    what = "Give the sizes of its dimensions, such as (2, 2)."
    sizes = tuple(
        arguments.whole("shape", size, 1, 2**31) for size in arguments.values_of("shape", shape, what)
    )

    def tensors(batch: Any) -> Any:
        ids = batch["id"].reshape(-1, *([1] * len(sizes)))
        return {"data": np.broadcast_to(ids, (len(ids), *sizes)).copy()}

    return range(n).map_batches(tensors, udf_modifying_row_count=False)


def range(
    n: int,
    *,
    parallelism: int = -1,
    concurrency: int | None = None,
    override_num_blocks: int | None = None,
) -> Dataset:
    """Make a dataset of the numbers from 0 to ``n - 1`` in the column "id".

    Args:
        n: How many numbers.
        parallelism: Accepted for compatibility, without effect.
        concurrency: Accepted for compatibility, without effect.
        override_num_blocks: Accepted for compatibility, without effect.

    Returns:
        A dataset of ``n`` rows.

    Raises:
        DataError: ``n`` is not a whole number from 0 on.

    Example::

        powertrain.data.range(1000).map(lambda row: {"square": row["id"] ** 2})
    """
    from powertrain.data.sources.memory import RangeSource

    given = {
        "parallelism": parallelism,
        "concurrency": concurrency,
        "override_num_blocks": override_num_blocks,
    }
    take_ray_arguments("range", given)
    return dataset_of(RangeSource(arguments.whole("range(): n", n, 0, _LARGEST_RANGE)))
