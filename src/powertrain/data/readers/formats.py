"""Datasets from files of other tools: TFRecords, WebDatasets, ORC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from powertrain.data import arguments
from powertrain.data.options.files import file_options
from powertrain.data.reading import ordered
from powertrain.errors import DataError, NotSupportedError

if TYPE_CHECKING:
    from powertrain.data.dataset import Dataset
    from powertrain.data.sources.files.files import Paths


def read_tfrecords(
    paths: Paths,
    *,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    **ray_arguments: Any,
) -> Dataset:
    """Read the ``tf.train.Example`` messages of TFRecord files, each as a row; TensorFlow is not needed.

    A feature with one value in every row is a column of bytes, float32 or int64, any other a column of lists. The files
    are read through once to count the rows and to find the types, and every checksum is checked.

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        file_extensions: Extensions of the files to read; by default any. Files that end in ".gz" are decompressed.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".
        **ray_arguments: As for :func:`read_parquet`.

    Returns:
        A dataset with one row for each Example.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_tfrecords("data/train.tfrecord")
    """
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.formats.tfrecords import TFRecordSource

    options = file_options("read_tfrecords", ray_arguments, hive=False)
    found = file_paths(paths, file_extensions, filesystem=filesystem, options=options)
    return ordered(
        TFRecordSource(found, include_paths=arguments.flag("include_paths", include_paths)), options
    )


def read_webdataset(
    paths: Paths,
    *,
    decoder: bool | str | Callable[[dict[str, Any]], dict[str, Any]] | list[Any] | None = True,
    fileselect: Sequence[str] | Callable[[str], bool] | None = None,
    filerename: Callable[[str], str] | Sequence[Callable[[str], str]] | None = None,
    suffixes: Sequence[str] | Callable[[str], bool] | None = None,
    expand_json: bool = False,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    **ray_arguments: Any,
) -> Dataset:
    """Read the samples of tar files: members with the same name before the first dot, one after the other, are a row.

    The columns are "__key__", "__url__" and the endings of the members. Text, class numbers, JSON, ``.npy`` arrays,
    MessagePack and images are decoded by these; others are bytes. Pickles are refused, as opening one runs code.

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        decoder: True decodes by ending, None leaves bytes; a function that takes and returns a sample decodes it, and
            a list of these is applied in order.
        fileselect: Names of members to read, patterns such as "*.jpg", or a function that returns True for them.
        filerename: A function, or a list of functions, that returns the name to use for a member's.
        suffixes: Endings to read, in the same forms as ``fileselect``.
        expand_json: Add the keys of the member "json" as columns.
        file_extensions: Extensions of the files to read; by default "tar" in directories, also compressed.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".
        **ray_arguments: As for :func:`read_parquet`.

    Returns:
        A dataset with one row for each sample.

    Raises:
        DataError: An argument has a wrong value.
        NotSupportedError: ``decoder`` is "PIL" or another format.

    Example::

        powertrain.data.read_webdataset("data/shard-*.tar", suffixes=["jpg", "cls"])
    """
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.formats.tar_samples import TarSelection
    from powertrain.data.sources.formats.webdataset import WebDatasetSource

    steps = [] if decoder is None else decoder if isinstance(decoder, list) else [decoder]
    if any(isinstance(step, str) for step in steps):
        raise NotSupportedError(
            f"read_webdataset(decoder={arguments.shown(decoder)}) has no counterpart here: images are arrays. Leave it "
            "out, and use PIL.Image.fromarray() in map()."
        )
    functions = [step for step in steps if callable(step)]
    wrong = [step for step in steps if not callable(step) and not isinstance(step, bool)]
    if wrong or any(callable(one) and not callable(two) for one, two in pairwise(steps)):
        raise DataError(
            f"read_webdataset(decoder={arguments.shown(decoder)}) is not valid. Give True, None, a function, or a list "
            "with True first and then functions."
        )
    selection = TarSelection(
        _names("fileselect", fileselect), _functions("filerename", filerename), _names("suffixes", suffixes)
    )
    options = file_options("read_webdataset", ray_arguments, hive=False)
    source = WebDatasetSource(
        file_paths(paths, file_extensions, usual=_TAR, filesystem=filesystem, options=options),
        selection=selection,
        decodes=len(steps) > len(functions),
        expands_json=arguments.flag("expand_json", expand_json),
        include_paths=arguments.flag("include_paths", include_paths),
    )
    dataset = ordered(source, options)
    for step in functions:
        dataset = dataset.map(step)
    return dataset


_TAR = ("tar", "tar.gz", "tgz", "tar.bz2", "tar.zst", "tar.lz4", "tar.br")


def _names(name: str, given: Any) -> Any:
    if given is None or callable(given):
        return given
    return arguments.texts(name, given, "Give a list of names or patterns, or a function.")


def _functions(name: str, given: Any) -> Any:
    if given is None or callable(given):
        return given
    found = tuple(arguments.values_of(name, given, "Give a function that returns the new name."))
    if not all(callable(each) for each in found):
        raise DataError(f"{name}={arguments.shown(given)} has values that cannot be called. Give functions.")
    return found


def read_orc(
    paths: Paths,
    *,
    file_extensions: Sequence[str] | None = None,
    filesystem: Any = None,
    include_paths: bool = False,
    **ray_arguments: Any,
) -> Dataset:
    """Read the rows of ORC files. All files must have the columns of the first.

    Args:
        paths: A file, a directory, a pattern, an address or a list of these: see :func:`read_parquet`.
        file_extensions: Extensions of the files to read; by default "orc" in directories.
        filesystem: A pyarrow or fsspec file system that ``paths`` belong to.
        include_paths: Add the column "path".
        **ray_arguments: As for :func:`read_parquet`.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        powertrain.data.read_orc("data/table")
    """
    from powertrain.data.sources.files.files import file_paths
    from powertrain.data.sources.formats.orc import OrcSource

    options = file_options("read_orc", ray_arguments)
    found = file_paths(paths, file_extensions, usual=["orc"], filesystem=filesystem, options=options)
    return ordered(OrcSource(found, include_paths=arguments.flag("include_paths", include_paths)), options)
