"""Arguments of Ray Data's methods without a use here: accepted with one line, or refused with a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from powertrain.data.arguments import keyword_arguments, shown
from powertrain.data.options.noting import note_without_effect
from powertrain.errors import ArgumentError, DataError, NotSupportedError

#: Arguments that only say where and when Ray runs a task. They change no row.
SCHEDULING = frozenset(
    {
        "num_cpus", "num_gpus", "memory", "label_selector", "fallback_strategy", "max_calls", "resources",
        "accelerator_type", "ray_remote_args_fn", "ray_remote_args", "scheduling_strategy", "max_retries",
        "retry_exceptions", "max_restarts", "max_task_retries", "max_concurrency", "num_returns", "name",
        "object_store_memory",
        # Of readers and writers.
        "parallelism", "override_num_blocks", "concurrency", "compute", "local_read", "try_create_dir", "verbose_open",
        "num_partitions", "partition_size_hint", "aggregator_ray_remote_args", "boundaries",
    }
)  # fmt: skip
#: Arguments that would change rows or files and have no counterpart, with the alternative.
REFUSED = {
    "runtime_env": "only Ray can install packages; install them where the script runs",
    "catalog": "catalogs are not supported; pass the path of the table's files",
    "filename_provider": "files are named by time and number, so that none is overwritten; rename them afterwards",
    "arrow_open_stream_args": "compressed files are detected by their ending; pass filesystem=... for other settings",
    "arrow_open_file_args": "compressed files are detected by their ending; pass filesystem=... for other settings",
    "pandas_json_args_fn": "JSON is written as one object on each line; use map() to change the rows first",
    "pandas_json_args": "JSON is written as one object on each line; use map() to change the rows first",
    "min_bytes_per_file": "give min_rows_per_file",
    "tensor_column_schema": "tensors of Ray Data and of Arrow are recognised; use map_batches() for other forms",
    "include_row_hash": "compute it with map_batches()",
    "skip_paths": "name the files to read in paths",
    "stratify": "split each class with filter() and train_test_split(), then use union()",
    "tf_schema": "types follow from the values; use map_batches() to change them",
    "_collate_fn": "use map_batches(), or iter_torch_batches(collate_fn=...)",
    "validate_schemas": "columns are always checked",
}


#: Arguments of writers that are used: rows of a file, and functions that return arguments of Arrow's writer.
WRITER_ARGUMENTS = frozenset(
    {"num_rows_per_file", "arrow_parquet_args_fn", "arrow_csv_args_fn", "arrow_orc_args_fn"}
)


def writer_arguments(method: str, given: Mapping[str, Any], takes_others: bool) -> tuple[dict[str, Any], Any]:
    """Return the arguments of a ``write_...`` method that belong to the file format, and ``num_rows_per_file``."""
    ours = {name for name in given if not takes_others or name in SCHEDULING or name in REFUSED}
    rows = given.get("num_rows_per_file")
    more: dict[str, Any] = {}
    # Ray Data takes a function for arguments that cannot be pickled.
    for name in [
        name for name in given if takes_others and name in WRITER_ARGUMENTS and given[name] is not None
    ]:
        if name != "num_rows_per_file":
            if not callable(given[name]):
                raise DataError(
                    f"{method}({name}={shown(given[name])}) cannot be called. Give a function that returns a dict of "
                    "arguments."
                )
            more.update(keyword_arguments(f"{method}(): the result of {name}", given[name]()))
    take_ray_arguments(method, {name: given[name] for name in ours - {"num_rows_per_file"}})
    rest = {name: value for name, value in given.items() if name not in ours | WRITER_ARGUMENTS}
    return {**rest, **more}, rows


def take_ray_arguments(
    method: str,
    given: Mapping[str, Any],
    refused: Mapping[str, str] = REFUSED,
    known: frozenset[str] = SCHEDULING,
) -> None:
    """Handle keyword arguments of a method that it has no use for itself.

    Those about scheduling are logged once. Arguments of Ray Data without a counterpart raise
    :class:`NotSupportedError`, unknown ones :class:`ArgumentError`.
    """
    ignored = {}
    for name, value in given.items():
        if name in refused and name not in known:
            if value is not None:
                raise NotSupportedError(
                    f"{method}({name}={shown(value)}) is an argument of Ray Data's without a counterpart here: "
                    f"{refused[name]}."
                )
        elif name in known:
            if value is not None and not (name == "parallelism" and isinstance(value, int) and value == -1):
                ignored[name] = value
        else:
            near = difflib.get_close_matches(name, [*known, *refused], n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(
                f"{method}() got an unexpected keyword argument {name!r}.{meant} Check the name in its documentation."
            )
    note_without_effect(method, ignored)
