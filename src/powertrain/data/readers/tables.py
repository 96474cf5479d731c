"""Datasets from tables with versions: Lance, Delta Lake, Iceberg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data import arguments
from powertrain.data.from_memory import dataset_of
from powertrain.data.options.files import file_options
from powertrain.data.options.scheduling import REFUSED, take_ray_arguments
from powertrain.data.reading import filtered, ordered
from powertrain.errors import ArgumentError, DataError, NotSupportedError

if TYPE_CHECKING:
    import pyarrow.compute as pc

    from powertrain.data.dataset import Dataset

#: Options of Lance's scanner that change how rows are read, and not which.
_LANCE_OPTIONS = frozenset(
    {
        "batch_size", "batch_size_bytes", "batch_readahead", "fragment_readahead", "io_buffer_size",
        "late_materialization", "use_scalar_index", "use_stats", "blob_handling", "with_row_id", "with_row_address",
        "strict_batch_size",
    }
)  # fmt: skip
#: Options of Lance's scanner that select rows of a whole dataset, for which blocks cannot be read apart.
_LANCE_QUERIES = frozenset(
    {
        "limit", "offset", "nearest", "full_text_query", "order_by", "prefilter", "fast_search",
        "include_deleted_rows", "index_segments", "row_addr_allowlist", "row_addr_blocklist", "scan_stats_callback",
        "disable_scoring_autoprojection",
    }
)  # fmt: skip

_NO_CATALOG = "give the address of the table, and storage_options with its credentials"


def read_lance(
    uri: str | Sequence[str],
    *,
    version: int | str | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    scanner_options: Mapping[str, Any] | None = None,
    **ray_arguments: Any,
) -> Dataset:
    """Read the rows of one or several Lance datasets. Needs ``pip install 'powertrain[lance]'``.

    The version is looked up by this call and kept: rows that are written later are not read, also when a run resumes
    with this dataset.

    Args:
        uri: The path or address of a Lance dataset, or a list of these.
        version: A version or the name of a tag; by default the newest version.
        columns: Read only these columns, in this order.
        filter: Keep rows for which this SQL condition is true, for example ``"label = 2 AND text IS NOT NULL"``. They
            are counted when the data is inspected.
        storage_options: Credentials and settings of an object store, as for ``lance.dataset``.
        scanner_options: More arguments of Lance's ``scanner()``, such as ``batch_size``. Those that select rows of a
            whole dataset, such as ``limit`` and ``nearest``, are refused.
        **ray_arguments: Ray Data's arguments about scheduling, without effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: The dataset or version does not exist, an argument has a wrong value, or Lance is not installed.
        NotSupportedError: An option of the scanner cannot be applied to parts of a dataset.

    Example::

        powertrain.data.read_lance("data/train.lance", columns=["image", "label"], filter="label < 10")
    """
    from powertrain.data.sources.tables.lance import LanceScan, LanceSource, LanceTable, open_table
    from powertrain.data.sources.tables.opening import table_address

    take_ray_arguments("read_lance", ray_arguments)
    what = "Give the path or address of a Lance dataset, or a list of these."
    given = arguments.values_of("uri", uri, what) if isinstance(uri, (list, tuple)) else [uri]
    if not given:
        raise DataError(f"read_lance(): the list of addresses is empty. {what}")
    if version is not None and not isinstance(version, str):
        version = arguments.whole("version", version, 1)
    options = arguments.keyword_arguments("scanner_options", scanner_options or {})
    fragments = _lance_fragments(options, len(given))
    chosen = options.pop("columns", None) if columns is None else columns
    condition = options.pop("filter", None) if filter is None else filter
    if condition is not None and isinstance(filter, str) and not filter.strip():
        raise DataError(f"read_lance(filter={arguments.shown(filter)}) is empty. Give a condition in SQL.")
    if chosen is not None and not isinstance(chosen, dict):
        chosen = _names("read_lance", chosen)
    access = _texts_by_name("storage_options", storage_options)
    tables = []
    for place in (table_address("uri", each) for each in given):
        tables.append(LanceTable(place, open_table(place, version, access).version, access))
    for name in ("columns", "filter"):
        options.pop(name, None)
    return dataset_of(LanceSource(tables, LanceScan(chosen, condition, options, fragments)))


def _lance_fragments(options: dict[str, Any], datasets: int) -> tuple[int, ...] | None:
    """Return the numbers of the fragments to read, and take them out of the options, which are checked."""
    if options.pop("scan_in_order", True) is False:
        raise NotSupportedError(
            "read_lance(scanner_options={'scan_in_order': False}) has no counterpart here: rows come in a known order, "
            "so that a run can resume. Leave it out, and use random_shuffle() for another order."
        )
    for name in options:
        if name in _LANCE_QUERIES:
            raise NotSupportedError(
                f"read_lance(scanner_options={{{name!r}: ...}}) has no counterpart here, as it concerns a dataset as a "
                "whole. Use methods of Dataset such as limit(), filter() and sort(), or "
                "from_arrow(lance.dataset(uri).scanner(...).to_table())."
            )
        if name not in _LANCE_OPTIONS | {"columns", "filter", "fragments"}:
            raise ArgumentError(
                f"read_lance(): scanner_options has {name!r}, which is not an argument of Lance's scanner() that is "
                f"known here. Known are: {', '.join(sorted(_LANCE_OPTIONS))}."
            )
    fragments = options.pop("fragments", None)
    if fragments is None:
        return None
    if datasets > 1:
        raise DataError(
            f"read_lance(): scanner_options['fragments'] needs one dataset, and {datasets} were given."
        )
    found = arguments.values_of("fragments", fragments, "Give fragments of get_fragments().")
    if not all(hasattr(each, "fragment_id") for each in found):
        raise DataError(
            f"scanner_options['fragments']={arguments.shown(fragments)} has values that are not fragments. Give those "
            "of lance.dataset(uri).get_fragments()."
        )
    return tuple(int(each.fragment_id) for each in found)


def read_delta(
    path: str,
    version: int | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,
    shuffle: Any = None,
    include_paths: bool = False,
    **ray_arguments: Any,
) -> Dataset:
    """Read the rows of a Delta Lake table. Needs ``pip install 'powertrain[delta]'``.

    The version is looked up by this call and kept: rows that are written later are not read. Partition columns, columns
    that older files lack (null) and deletion vectors are handled; a table that requires other features of its readers,
    such as column mapping, is refused.

    Args:
        path: The path or address of the table.
        version: The version to read; by default the newest.
        storage_options: Credentials and settings of an object store, as for ``deltalake.DeltaTable``.
        filesystem: A pyarrow or fsspec file system whose root is the table, to open its data files with. The log is
            read with ``storage_options``.
        columns: Read only these columns, in this order.
        filter: Keep rows for which this Arrow expression is true; it may name columns that are not read.
        shuffle: "files" or a ``FileShuffleConfig``: as :meth:`Dataset.random_shuffle`.
        include_paths: Add the column "path", the file of the row.
        **ray_arguments: Ray Data's arguments about scheduling, without effect.

    Returns:
        A dataset of the rows, in the order in which the files were added to the table.

    Raises:
        DataError: The table or version does not exist, an argument has a wrong value, or deltalake is not installed.
        NotSupportedError: The table requires a feature that is not supported.

    Example::

        powertrain.data.read_delta("data/events", version=12, columns=["text", "label"])
    """
    from powertrain.data.sources.files.files import as_arrow_filesystem
    from powertrain.data.sources.tables.delta import DeltaSource, DeltaVersion, open_table
    from powertrain.data.sources.tables.opening import table_address

    take_ray_arguments("read_delta", ray_arguments, {**REFUSED, "catalog": _NO_CATALOG})
    options = file_options("read_delta", {"shuffle": shuffle})
    if isinstance(path, (list, tuple)):
        raise DataError(
            f"read_delta({arguments.shown(path)}) is a list, and one table is read at a time. Read each, and use "
            "union()."
        )
    place = table_address("path", path)
    version = arguments.optional_whole("version", version, 0)
    access = _texts_by_name("storage_options", storage_options)
    chosen = None if columns is None else _names("read_delta", columns)
    include_paths = arguments.flag("include_paths", include_paths)
    opener = as_arrow_filesystem(filesystem)
    table = DeltaVersion(place, open_table(place, version, access).version(), access, opener)
    return ordered(
        filtered(lambda names: DeltaSource(table, names, include_paths=include_paths), chosen, filter),
        options,
    )


def read_iceberg(
    *,
    table_identifier: str,
    row_filter: Any = None,
    selected_fields: Sequence[str] = ("*",),
    snapshot_id: int | None = None,
    scan_kwargs: Mapping[str, Any] | None = None,
    catalog_kwargs: Mapping[str, Any] | None = None,
    **ray_arguments: Any,
) -> Dataset:
    """Read the rows of an Iceberg table, through PyIceberg. Needs ``pip install 'powertrain[iceberg]'``.

    The snapshot is looked up by this call and kept: rows that are written later are not read. Deleted rows are left
    out; a table with equality deletes, which PyIceberg cannot read, is refused.

    Args:
        table_identifier: The name of the table: "namespace.table".
        row_filter: Keep rows for which this is true: a condition such as ``"age >= 18"``, or an expression of
            ``pyiceberg.expressions``. They are counted when the data is inspected.
        selected_fields: Read only these columns, in the order of the table; ``("*",)`` for all.
        snapshot_id: The snapshot to read; by default the present one.
        scan_kwargs: More arguments of PyIceberg's ``Table.scan()``: ``case_sensitive``, ``options``, ``limit``,
            ``snapshot_id``.
        catalog_kwargs: Arguments of PyIceberg's ``load_catalog()``: ``name``, ``type``, ``uri`` and others.
        **ray_arguments: Ray Data's arguments about scheduling, without effect.

    Returns:
        A dataset of the rows.

    Raises:
        DataError: The table or snapshot does not exist, an argument has a wrong value, or PyIceberg is not installed.

    Example::

        powertrain.data.read_iceberg(
            table_identifier="shop.orders", catalog_kwargs={"name": "default", "type": "glue"}
        )
    """
    from powertrain.data.sources.tables.iceberg import IcebergScan, IcebergSource, find_snapshot

    take_ray_arguments("read_iceberg", ray_arguments, {**REFUSED, "catalog": "give catalog_kwargs"})
    if not isinstance(table_identifier, str) or not table_identifier.strip():
        raise DataError(
            f"read_iceberg(table_identifier={arguments.shown(table_identifier)}) is not a name of a table. Give "
            "'namespace.table'."
        )
    more = arguments.keyword_arguments("scan_kwargs", scan_kwargs or {})
    unknown = sorted(set(more) - {"case_sensitive", "options", "limit", "snapshot_id"})
    if unknown:
        raise ArgumentError(
            f"read_iceberg(): scan_kwargs has {unknown[0]!r}, which is not known. Known are case_sensitive, options, "
            "limit and snapshot_id."
        )
    snapshot = snapshot_id if snapshot_id is not None else more.get("snapshot_id")
    wanted = arguments.optional_whole("snapshot_id", snapshot, 0)
    fields = _names("read_iceberg", selected_fields)
    scan = IcebergScan(
        row_filter,
        fields,
        arguments.flag("case_sensitive", more.get("case_sensitive", True)),
        dict(more.get("options") or {}),
        wanted is not None,
    )
    found = find_snapshot(
        table_identifier, wanted, arguments.keyword_arguments("catalog_kwargs", catalog_kwargs or {})
    )
    limit = arguments.optional_whole("limit", more.get("limit"), 0)
    dataset = dataset_of(IcebergSource(found, scan))
    return dataset if limit is None else dataset.limit(limit)


def _names(method: str, columns: Any) -> tuple[str, ...]:
    if isinstance(columns, str):
        raise DataError(
            f"{method}(): the columns {arguments.shown(columns)} are one string. Give a list of names: "
            f"[{arguments.shown(columns)}]."
        )
    return arguments.column_names(method, columns)


def _texts_by_name(name: str, given: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return options of a library as text. Their values are never shown: credentials are among them."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise DataError(
            f"{name} is a {type(given).__name__}. Give a dict of names and values, such as {{'region': 'eu-1'}}."
        )
    return {key: value if isinstance(value, str) else str(value) for key, value in given.items()}
