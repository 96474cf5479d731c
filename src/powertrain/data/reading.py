"""Datasets from files and from other libraries. Files are opened when rows or metadata are requested."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from powertrain import plugins
from powertrain.data import arguments
from powertrain.data.from_memory import dataset_of as _dataset
from powertrain.data.from_memory import (
    from_arrow,
    from_blocks,
    from_items,
    from_numpy,
    from_pandas,
    range,
    range_tensor,
)
from powertrain.data.options.files import FileOptions, file_options
from powertrain.data.options.scheduling import take_ray_arguments
from powertrain.errors import DataError, NotSupportedError

if TYPE_CHECKING:
    import pyarrow.compute as pc
    from pyarrow import csv, json

    from powertrain.data.dataset import Dataset
    from powertrain.data.sources.base import Source
    from powertrain.data.sources.files.files import Paths

__all__ = [
    "from_arrow",
    "from_blocks",
    "from_huggingface",
    "from_items",
    "from_numpy",
    "from_pandas",
    "from_torch",
    "range",
    "range_tensor",
    "read_binary_files",
    "read_csv",
    "read_images",
    "read_json",
    "read_numpy",
    "read_parquet",
    "read_source",
    "read_text",
]

_JSON_EXTENSIONS = tuple(
    f"{name}{compressed}"
    for name in ("json", "jsonl")
    for compressed in ("", ".gz", ".br", ".zst", ".lz4", ".bz2")
)


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    **ray_arguments: Any,
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
        **ray_arguments: Ray Data's ``partition_filter``, ``partitioning``, ``ignore_missing_paths`` and ``shuffle``;
            its arguments about scheduling have no effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_parquet("data/train", columns=["text", "label"])
    """
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.parquet import ParquetSource

    options = file_options("read_parquet", ray_arguments)
    found = file_paths(paths, file_extensions, usual=["parquet"], filesystem=filesystem, options=options)
    chosen = None if columns is None else _names(columns)
    make = partial(ParquetSource, found, include_paths=arguments.flag("include_paths", include_paths))
    return ordered(filtered(make, chosen, filter), options)


def filtered(make: Callable[..., Source], columns: Sequence[str] | None, condition: Any) -> Source:
    """Return the rows that fit a condition, with these columns; ``make`` returns all rows with the given columns."""
    from powertrain.data.sources.filtered import FilteredSource, ProjectedSource

    if condition is None:
        return make(columns)
    kept = FilteredSource(make(None), _expression(condition))
    return kept if columns is None else ProjectedSource(kept, columns)


def ordered(source: Source, options: FileOptions) -> Dataset:
    """Return a dataset of files, shuffled where the options of the reader say so."""
    dataset = _dataset(source)
    return dataset.random_shuffle(seed=options.seed) if options.is_shuffled else dataset


def _names(columns: Sequence[str]) -> tuple[str, ...]:
    if isinstance(columns, str):
        raise DataError(
            f"columns={arguments.shown(columns)} is one string. Give a list of names: "
            f"columns=[{arguments.shown(columns)}]."
        )
    return arguments.column_names("read_parquet", columns)


def _expression(given: Any) -> pc.Expression:
    import pyarrow.compute as pc

    from powertrain.data.expressions.expr import Expr

    if isinstance(given, Expr):
        return given.to_pyarrow()
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
    **ray_arguments: Any,
) -> Dataset:
    """Read the rows of CSV files, which all have the same columns, named in their first line.

    The files are read through once to count the rows and to find types that fit all of them.

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        file_extensions: Extensions of the files to read; by default any.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".
        read_options: A ``pyarrow.csv.ReadOptions``.
        parse_options: A ``pyarrow.csv.ParseOptions``.
        convert_options: A ``pyarrow.csv.ConvertOptions``.
        **ray_arguments: Ray Data's ``partition_filter``, ``partitioning``, ``ignore_missing_paths`` and ``shuffle``;
            its arguments about scheduling have no effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: An argument has a wrong value.

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
    options = file_options("read_csv", ray_arguments)
    return ordered(
        CsvSource(
            file_paths(paths, file_extensions, filesystem=filesystem, options=options),
            read_options=read_options,
            parse_options=parse_options,
            convert_options=convert_options,
            include_paths=arguments.flag("include_paths", include_paths),
        ),
        options,
    )


def read_json(
    paths: Paths,
    *,
    lines: bool = True,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    parse_options: json.ParseOptions | None = None,
    **ray_arguments: Any,
) -> Dataset:
    """Read the rows of files with one JSON object on each line. A key that an object lacks is null.

    The files are read through once to count the rows and to find types that fit all of them.

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        lines: False for files with one list of objects.
        file_extensions: Extensions of the files to read; by default "json" and "jsonl" in directories, also compressed.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".
        parse_options: A ``pyarrow.json.ParseOptions``.
        **ray_arguments: Ray Data's ``partition_filter``, ``partitioning``, ``ignore_missing_paths`` and ``shuffle``;
            its arguments about scheduling have no effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_json("data/train.jsonl")
    """
    from pyarrow import json

    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.text import JsonSource

    arguments.option_of("parse_options", parse_options, json.ParseOptions, "a pyarrow.json.ParseOptions")
    lines, include_paths = arguments.flag("lines", lines), arguments.flag("include_paths", include_paths)
    options = file_options("read_json", ray_arguments)
    found = file_paths(paths, file_extensions, usual=_JSON_EXTENSIONS, filesystem=filesystem, options=options)
    source = JsonSource(found, lines=lines, parse_options=parse_options, include_paths=include_paths)
    return ordered(source, options)


def read_images(
    paths: Paths,
    *,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    include_paths: bool = False,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    **ray_arguments: Any,
) -> Dataset:
    """Read image files, decoded to uint8 arrays of (height, width, channels) in the column "image".

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        size: (height, width) to which all are resized.
        mode: A mode of Pillow to which all are converted, such as "RGB" or "L".
        include_paths: Add the column "path".
        file_extensions: Extensions of the files to read; by default those of images in directories.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        **ray_arguments: Ray Data's ``partition_filter``, ``partitioning``, ``ignore_missing_paths`` and ``shuffle``;
            its arguments about scheduling have no effect.

    Returns:
        A dataset with one row for each file.

    Raises:
        DataError: An argument has a wrong value.

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
    options = file_options("read_images", ray_arguments, hive=False)
    found = file_paths(paths, file_extensions, usual=IMAGE_EXTENSIONS, filesystem=filesystem, options=options)
    return ordered(ImageSource(found, size=size, mode=mode, include_paths=include_paths), options)


def read_text(
    paths: Paths,
    *,
    encoding: str = "utf-8",
    drop_empty_lines: bool = True,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    **ray_arguments: Any,
) -> Dataset:
    """Read the lines of text files, each as a row, in the column "text". The files are read through once to count them.

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        encoding: The encoding; line ends must be those of ASCII.
        drop_empty_lines: Leave out lines without text.
        file_extensions: Extensions of the files to read; by default any.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".
        **ray_arguments: As for :func:`read_parquet`.

    Returns:
        A dataset with one row for each line.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_text("data/*.txt")
    """
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.lines import LinesSource

    options = file_options("read_text", ray_arguments, hive=False)
    if not isinstance(encoding, str):
        raise DataError(
            f"read_text(encoding={arguments.shown(encoding)}) is not a name of an encoding. Give 'utf-8'."
        )
    source = LinesSource(
        file_paths(paths, file_extensions, filesystem=filesystem, options=options),
        encoding=encoding,
        drop_empty_lines=arguments.flag("drop_empty_lines", drop_empty_lines),
        include_paths=arguments.flag("include_paths", include_paths),
    )
    return ordered(source, options)


def read_binary_files(
    paths: Paths,
    *,
    include_paths: bool = False,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    **ray_arguments: Any,
) -> Dataset:
    """Read files as they are, each as a row, in the column "bytes".

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        include_paths: Add the column "path".
        file_extensions: Extensions of the files to read; by default any.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        **ray_arguments: As for :func:`read_parquet`.

    Returns:
        A dataset with one row for each file.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_binary_files("data/audio", include_paths=True)
    """
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.files.images import BinaryFilesSource

    options = file_options("read_binary_files", ray_arguments, hive=False)
    found = file_paths(paths, file_extensions, filesystem=filesystem, options=options)
    return ordered(
        BinaryFilesSource(found, include_paths=arguments.flag("include_paths", include_paths)), options
    )


def read_numpy(
    paths: Paths,
    *,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    allow_pickle: bool = False,
    **ray_arguments: Any,
) -> Dataset:
    """Read arrays of ``.npy`` files: each entry of the first dimension is a row, in the column "data".

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        file_extensions: Extensions of the files to read; by default "npy" in directories.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".
        allow_pickle: Refused: opening pickled objects runs code of the file.
        **ray_arguments: As for :func:`read_parquet`.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: An argument has a wrong value.
        NotSupportedError: ``allow_pickle`` is set.

    Example::

        powertrain.data.read_numpy("data/features.npy")
    """
    from powertrain.data.sources.files.arrays import NumpySource
    from powertrain.data.sources.files.files import file_paths

    if arguments.flag("allow_pickle", allow_pickle):
        raise NotSupportedError(
            "read_numpy(allow_pickle=True) has no counterpart here: opening pickled objects runs code of the file. Use "
            "from_items(list(numpy.load(path, allow_pickle=True))) for files that you trust."
        )
    options = file_options("read_numpy", ray_arguments, hive=False)
    found = file_paths(paths, file_extensions, usual=["npy"], filesystem=filesystem, options=options)
    return ordered(NumpySource(found, include_paths=arguments.flag("include_paths", include_paths)), options)


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

    if not isinstance(name, str):
        raise DataError(
            f"read_source({arguments.shown(name)}) is not a name. Give that of an entry point, as str."
        )
    source = plugins.load(plugins.SOURCES, name)(*args, **kwargs)
    if not isinstance(source, Source):
        raise DataError(
            f"The entry point {name!r} of the group {plugins.SOURCES!r} returned a {type(source).__name__}, and not a "
            "powertrain.data.sources.base.Source. Correct the package that registers it; see docs/data.md."
        )
    return _dataset(source)


# --------------------------------------------------------------------------- other libraries' datasets


def from_torch(dataset: Any, local_read: bool = False) -> Dataset:
    """Make a dataset of a map-style torch dataset: the keys of dicts are columns; other items are in "item".

    Items that are tuples give a struct with the fields "0", "1", and so on. Items are fetched when they are needed, in
    the worker processes. The order is the same at every number of workers; random numbers of the dataset itself are not
    controlled.

    Args:
        dataset: A dataset with ``__getitem__`` and ``__len__``.
        local_read: Accepted for compatibility, without effect.

    Returns:
        A dataset with one row for each item.

    Raises:
        DataError: The dataset has no item access by index, or no length.

    Example::

        powertrain.data.from_torch(torchvision.datasets.MNIST("data", transform=ToTensor()))
    """
    from powertrain.data.sources.indexed import IndexedSource

    take_ray_arguments("from_torch", {"local_read": arguments.flag("local_read", local_read) or None})
    if not hasattr(type(dataset), "__getitem__") or not hasattr(type(dataset), "__len__"):
        raise DataError(
            f"The dataset {type(dataset).__name__} has no item access by index or no length, so its "
            "rows cannot be put in an order or be resumed. Give a map-style dataset (__getitem__ and __len__), or "
            "from_items(list(dataset)) where it fits in memory."
        )
    return _dataset(IndexedSource(dataset))


def from_huggingface(
    dataset: Any,
    parallelism: int = -1,
    concurrency: int | None = None,
    override_num_blocks: int | None = None,
) -> Dataset:
    """Make a dataset of a Hugging Face ``datasets.Dataset`` in its present order. Images are decoded when read.

    A dataset in files is read from these, one in memory from memory. Formats and transforms set on it are ignored: use
    ``map`` here.

    Args:
        dataset: One split, a ``datasets.Dataset`` that is not streamed.
        parallelism: Accepted for compatibility, without effect.
        concurrency: Accepted for compatibility, without effect.
        override_num_blocks: Accepted for compatibility, without effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: A dict of splits, a streamed dataset or another object was given.

    Example::

        powertrain.data.from_huggingface(datasets.load_dataset("imdb", split="train"))
    """
    from powertrain.data.sources.indexed import HuggingFaceSource, plain_hugging_face
    from powertrain.data.sources.memory import TableSource

    given = {
        "parallelism": parallelism,
        "concurrency": concurrency,
        "override_num_blocks": override_num_blocks,
    }
    take_ray_arguments("from_huggingface", given)
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
