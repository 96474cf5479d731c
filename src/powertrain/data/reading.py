"""Datasets from files and from memory. Files are opened when rows or metadata are requested."""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain import plugins
from powertrain.data import arguments
from powertrain.data.plan.plan import Part, Plan
from powertrain.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv, json

    from powertrain.data.dataset import Dataset
    from powertrain.data.sources.base import Source
    from powertrain.data.sources.files.files import Paths

#: Most numbers of range(): the list of blocks is made beforehand.
_LARGEST_RANGE = 2**40
#: Most items that are read from a sequence.
_MOST_ITEMS = 2**34
_JSON_EXTENSIONS = tuple(
    f"{name}{compressed}"
    for name in ("json", "jsonl")
    for compressed in ("", ".gz", ".br", ".zst", ".lz4", ".bz2")
)


def _dataset(source: Source) -> Dataset:
    from powertrain.data.dataset import Dataset

    return Dataset(Plan((Part(source),)))


# --------------------------------------------------------------------------- files


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
) -> Dataset:
    """Read the rows of Parquet files. All files must have the columns of the first.

    Args:
        paths: A file, a directory, a pattern ("data/**/*.parquet"), an address ("s3://bucket/data") or a list of these.
            Directories named "key=value" add a text column "key".
        columns: Read only these columns, in this order.
        filter: Keep rows for which this Arrow expression is true, for example ``pyarrow.compute.field("label") == 3``;
            it may name columns that are not read.
        file_extensions: Extensions of the files to read; by default "parquet" in directories.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".

    Returns:
        A dataset of the rows.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_parquet("data/train", columns=["text", "label"])
    """
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.parquet import ParquetSource
    from powertrain.data.sources.filtered import FilteredSource, ProjectedSource

    found = file_paths(paths, file_extensions, usual=["parquet"], filesystem=filesystem)
    chosen = None if columns is None else _names(columns)
    include_paths = arguments.flag("include_paths", include_paths)
    if filter is None:
        return _dataset(ParquetSource(found, chosen, include_paths=include_paths))
    whole = ParquetSource(found, include_paths=include_paths)
    kept = FilteredSource(whole, _expression(filter))
    return _dataset(kept if chosen is None else ProjectedSource(kept, chosen))


def _names(columns: Sequence[str]) -> tuple[str, ...]:
    if isinstance(columns, str):
        raise DataError(
            f"columns={arguments.shown(columns)} is one string. Give a list of names: "
            f"columns=[{arguments.shown(columns)}]."
        )
    return arguments.column_names("read_parquet", columns)


def _expression(given: Any) -> pc.Expression:
    import pyarrow.compute as pc

    if not isinstance(given, pc.Expression):
        raise DataError(
            f"filter={arguments.shown(given)} is a {type(given).__name__} and not an Arrow expression. Write it as "
            "pyarrow.compute.field('column') == value, or give a function to Dataset.filter."
        )
    return given


def read_csv(
    paths: Paths,
    *,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    read_options: csv.ReadOptions | None = None,
    parse_options: csv.ParseOptions | None = None,
    convert_options: csv.ConvertOptions | None = None,
) -> Dataset:
    """Read the rows of CSV files, which all have the same columns, named in their first line.

    The files are read through once to count the rows and to find types that fit all of them. Takes the arguments of
    :func:`read_parquet` too.

    Args:
        read_options: A ``pyarrow.csv.ReadOptions``.
        parse_options: A ``pyarrow.csv.ParseOptions``.
        convert_options: A ``pyarrow.csv.ConvertOptions``.

    Example::

        powertrain.data.read_csv("data/*.csv")
    """
    from pyarrow import csv

    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.text import CsvSource

    arguments.option_of("read_options", read_options, csv.ReadOptions, "a pyarrow.csv.ReadOptions")
    arguments.option_of("parse_options", parse_options, csv.ParseOptions, "a pyarrow.csv.ParseOptions")
    arguments.option_of(
        "convert_options", convert_options, csv.ConvertOptions, "a pyarrow.csv.ConvertOptions"
    )
    return _dataset(
        CsvSource(
            file_paths(paths, file_extensions, filesystem=filesystem),
            read_options=read_options,
            parse_options=parse_options,
            convert_options=convert_options,
            include_paths=arguments.flag("include_paths", include_paths),
        )
    )


def read_json(
    paths: Paths,
    *,
    lines: bool = True,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    parse_options: json.ParseOptions | None = None,
) -> Dataset:
    """Read the rows of files with one JSON object on each line. A key that an object lacks is null.

    The files are read through once to count the rows and to find types that fit all of them. Takes the arguments of
    :func:`read_parquet` too.

    Args:
        lines: False for files with one list of objects.
        parse_options: A ``pyarrow.json.ParseOptions``.

    Example::

        powertrain.data.read_json("data/train.jsonl")
    """
    from pyarrow import json

    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.text import JsonSource

    arguments.option_of("parse_options", parse_options, json.ParseOptions, "a pyarrow.json.ParseOptions")
    lines, include_paths = arguments.flag("lines", lines), arguments.flag("include_paths", include_paths)
    found = file_paths(paths, file_extensions, usual=_JSON_EXTENSIONS, filesystem=filesystem)
    return _dataset(JsonSource(found, lines=lines, parse_options=parse_options, include_paths=include_paths))


def read_images(
    paths: Paths,
    *,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    include_paths: bool = False,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
) -> Dataset:
    """Read image files, decoded to uint8 arrays of (height, width, channels) in the column "image".

    Takes the arguments of :func:`read_parquet` too.

    Args:
        size: (height, width) to which all are resized.
        mode: A mode of Pillow to which all are converted, such as "RGB" or "L".

    Example::

        powertrain.data.read_images("data/photos", size=(224, 224), mode="RGB")
    """
    from powertrain.data.operations.images import checked_mode, checked_size
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.images import IMAGE_EXTENSIONS, ImageSource

    size, mode, include_paths = (
        checked_size(size),
        checked_mode(mode),
        arguments.flag("include_paths", include_paths),
    )
    found = file_paths(paths, file_extensions, usual=IMAGE_EXTENSIONS, filesystem=filesystem)
    return _dataset(ImageSource(found, size=size, mode=mode, include_paths=include_paths))


# --------------------------------------------------------------------------- memory


def from_items(items: Iterable[Any]) -> Dataset:
    """Make a dataset of Python objects: the keys of dicts are columns (null where missing); others are in "item".

    Python's floats become torch's default dtype in tensors. Arrays and tensors of one shape stay arrays.

    Args:
        items: The objects.

    Example::

        powertrain.data.from_items([{"x": 1.0}, {"x": 2.0}])
    """
    from powertrain.data.sources.items import table_of_items
    from powertrain.data.sources.memory import TableSource

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
    return _dataset(TableSource(table, "item"))


def _made(make: Callable[[], pa.Table], what: str, given: Any) -> pa.Table:
    """Return a table of a user's values; exceptions of the values themselves become an error about them."""
    try:
        return make()
    except DataError:
        raise
    except (*arguments.ODD, MemoryError) as error:
        raise arguments.refused(what, given, error) from error


def from_pandas(dfs: pd.DataFrame | Sequence[pd.DataFrame]) -> Dataset:
    """Make a dataset of a DataFrame, or of several with the same columns. The index is left out."""
    import pandas as pd

    from powertrain.data.sources.memory import TableSource

    what = "Give a DataFrame or a list of them."
    frames = [dfs] if isinstance(dfs, pd.DataFrame) else arguments.values_of("dfs", dfs, what)
    for frame in frames:
        if not isinstance(frame, pd.DataFrame):
            raise DataError(
                f"from_pandas was given a {type(frame).__name__}. Give a DataFrame or a list of them."
            )
    table = _made(
        lambda: _joined([_table_of_frame(frame) for frame in frames], "DataFrames"),
        "from_pandas cannot make rows of",
        dfs,
    )
    return _dataset(TableSource(table, "row"))


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
    """
    from powertrain.data.sources.memory import TableSource

    table = _made(lambda: _table_of_ndarrays(ndarrays), "from_numpy cannot make rows of", ndarrays)
    return _dataset(TableSource(table))


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
    return _joined([table_of_arrays({"data": _array(array)}) for array in arrays], "arrays")


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


def from_arrow(tables: Any) -> Dataset:
    """Make a dataset of an Arrow table or record batch, or of several with the same columns."""
    import pyarrow as pa

    from powertrain.data.sources.memory import TableSource

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
    table = _made(lambda: _joined(found, "tables"), "from_arrow cannot make rows of", tables)
    return _dataset(TableSource(table))


def _joined(tables: list[pa.Table], what: str) -> pa.Table:
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


def range(n: int) -> Dataset:
    """Make a dataset of the numbers from 0 to ``n - 1`` in the column "id"."""
    from powertrain.data.sources.memory import RangeSource

    return _dataset(RangeSource(arguments.whole("range(): n", n, 0, _LARGEST_RANGE)))


# --------------------------------------------------------------------------- sources of other packages


def read_source(name: str, /, *args: Any, **kwargs: Any) -> Dataset:
    """Read rows from a source that another package has registered.

    Args:
        name: The name of an entry point of the group ``powertrain.sources``.
        *args: Passed to the object that the entry point names.
        **kwargs: Passed likewise.

    Returns:
        A dataset of the rows.

    Raises:
        ConfigError: No package has registered the name, or its module cannot be imported.
        DataError: The object did not return a :class:`powertrain.data.sources.base.Source`.

    Example:
        >>> powertrain.data.read_source("lance", "data/train.lance")  # doctest: +SKIP
    """
    from powertrain.data.sources.base import Source

    source = plugins.load(plugins.SOURCES, name)(*args, **kwargs)
    if not isinstance(source, Source):
        raise DataError(
            f"The entry point {name!r} of the group {plugins.SOURCES!r} returned a {type(source).__name__}, and not a "
            "powertrain.data.sources.base.Source. Correct the package that registers it; see docs/data.md."
        )
    return _dataset(source)


# --------------------------------------------------------------------------- other libraries' datasets


def from_torch(dataset: Any) -> Dataset:
    """Make a dataset of a map-style torch dataset: the keys of dicts are columns; other items are in "item".

    Items that are tuples give a struct with the fields "0", "1", and so on. Items are fetched when they are needed, in
    the worker processes. The order is the same at every number of workers; random numbers of the dataset itself are not
    controlled.
    """
    from powertrain.data.sources.indexed import IndexedSource

    if not hasattr(type(dataset), "__getitem__") or not hasattr(type(dataset), "__len__"):
        raise DataError(
            f"The dataset {type(dataset).__name__} has no item access by index or no length, so its "
            "rows cannot be put in an order or be resumed. Give a map-style dataset (__getitem__ and __len__), or "
            "from_items(list(dataset)) where it fits in memory."
        )
    return _dataset(IndexedSource(dataset))


def from_huggingface(dataset: Any) -> Dataset:
    """Make a dataset of a Hugging Face ``datasets.Dataset`` in its present order. Images are decoded when read.

    A dataset in files is read from these, one in memory from memory. Formats and transforms set on it are ignored: use
    ``map`` here.
    """
    from powertrain.data.sources.indexed import HuggingFaceSource, plain_hugging_face
    from powertrain.data.sources.memory import TableSource

    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise DataError(
            f"from_huggingface was given a {kind} of the splits {_splits(dataset)}. Pick one: dataset['train']."
        )
    if not all(hasattr(type(dataset), name) for name in ("features", "with_format", "cache_files")):
        raise DataError(
            f"from_huggingface was given a {kind}. Give a datasets.Dataset; of a streamed one rows have no number, so "
            "load it without streaming=True."
        )
    if dataset.cache_files and len(dataset):
        return _dataset(HuggingFaceSource(dataset))
    table = dataset.with_format("arrow")[builtins.slice(None)]
    return _dataset(TableSource(plain_hugging_face(table, dataset.features)))


def _splits(dataset: Mapping[Any, Any]) -> str:
    try:
        return ", ".join(map(arguments.shown, dataset))
    except arguments.ODD:
        return arguments.shown(dataset)
