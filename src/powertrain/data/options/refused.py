"""Names of Ray Data without a counterpart: each with one sentence that says what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from powertrain.errors import MissingMemberError, NotSupportedError

_HAND_OVER = (
    "read it with ray.data.{name}() and pass that dataset to the trainer (docs/data.md, Ray datasets), or fetch the "
    "rows with the service's own client and use from_arrow() or from_pandas()"
)
_WRITE_ROWS = (
    "write Parquet with write_parquet() and load that there, or send batches of iter_batches() with a client"
)

_SOURCES = "subclass powertrain.data.sources.base.Source and register it for read_source() (docs/engines.md)"

#: Functions of ``ray.data``, and what to do instead.
FUNCTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "read_mongo", "read_bigquery", "read_clickhouse", "read_databricks_tables", "read_delta_sharing_tables",
            "read_kafka", "read_snowflake", "read_unity_catalog", "read_hudi", "read_lerobot",
            "read_mcap", "read_zarr", "read_avro",
        ),
        _HAND_OVER,
    ),
    "read_audio": "use read_binary_files(paths, include_paths=True) and decode in map(), for example with soundfile",
    "read_videos": "use read_binary_files(paths, include_paths=True) and decode in flat_map(), for example with PyAV",
    "read_datasource": _SOURCES,
    "from_daft": "use from_arrow(df.to_arrow())",
    "from_dask": "use from_pandas(df.compute())",
    "from_mars": "use from_pandas(df.to_pandas())",
    "from_modin": "use from_pandas(df.modin.to_pandas())",
    "from_spark": "use from_arrow(df.toArrow()), or df.write.parquet(path) and read_parquet(path)",
    "from_tf": "use from_items(list(dataset.as_numpy_iterator()))",
    "from_arrow_refs": "use from_arrow([powertrain.get(ref) for ref in refs])",
    "from_numpy_refs": "use from_numpy([powertrain.get(ref) for ref in refs])",
    "from_pandas_refs": "use from_pandas([powertrain.get(ref) for ref in refs])",
    "list_stats_summaries": "use Dataset.stats() after reading",
}  # fmt: skip
#: Classes of ``ray.data``, and what to do instead.
CLASSES: dict[str, str] = {
    "Datasource": _SOURCES,
    "ReadTask": _SOURCES,
    **dict.fromkeys(
        ("Datasink", "BlockBasedFileDatasink", "RowBasedFileDatasink"),
        "write in a loop over iter_batches(), or use one of the write_...() methods",
    ),
    **dict.fromkeys(
        ("Catalog", "CatalogAccessMode", "DatabricksUnityCatalog", "ReaderFormat", "ResolvedSource"),
        "pass the path of the table's files to read_parquet()",
    ),
    **dict.fromkeys(("ClickHouseTableSettings", "SinkMode"), _WRITE_ROWS),
    "KafkaAuthConfig": _HAND_OVER.format(name="read_kafka"),
}
#: Classes of ``ray.data.datasource``, and what to do instead.
DATASOURCE_CLASSES: dict[str, str] = {
    **dict.fromkeys(
        (
            "FileBasedDatasource", "RandomIntRowDatasource", "Reader", "DeltaSharingDatasource", "LeRobotDatasource",
            "MCAPDatasource", "TimeRange", "Connection",
        ),
        _SOURCES,
    ),
    **dict.fromkeys(
        ("BaseFileMetadataProvider", "DefaultFileMetadataProvider", "FileMetadataProvider"),
        "sizes of files are found when the data is inspected; leave it out",
    ),
    "FilenameProvider": "files are named by time and number, so that none is overwritten; rename them afterwards",
    "PathPartitionParser": "use Partitioning, or Partitioning.values() for the columns of one path",
    **dict.fromkeys(
        ("DummyOutputDatasink", "TurbopufferDatasink", "WriteResult", "WriteReturnType"),
        "write in a loop over iter_batches(), or use one of the write_...() methods",
    ),
}  # fmt: skip
#: Methods of ``ray.data.Dataset``, and what to do instead.
METHODS: dict[str, str] = {
    **dict.fromkeys(
        (
            "write_iceberg", "write_delta", "write_snowflake", "write_mongo", "write_bigquery", "write_clickhouse",
            "write_turbopuffer", "write_lance", "write_kafka",
        ),
        _WRITE_ROWS,
    ),
    "write_datasink": "write in a loop over iter_batches(), or use one of the write_...() methods",
    "copy": "a dataset never changes, so it needs no copy",
    "map_batches_internal": "use map_batches()",
    "streaming_train_test_split": "use train_test_split(), which reads no row either",
    "iter_jax_batches": "use iter_batches(), whose numpy arrays jax.numpy.asarray() takes",
    "to_daft": "use daft.from_arrow(pyarrow.Table.from_pandas(dataset.to_pandas()))",
    "to_dask": "use write_parquet(path), then dask.dataframe.read_parquet(path)",
    "to_mars": "use write_parquet(), and read the files there",
    "to_modin": "use modin.pandas.DataFrame(dataset.to_pandas())",
    "to_spark": "use write_parquet(path), then spark.read.parquet(path)",
    "to_pandas_refs": "use powertrain.put(dataset.to_pandas()), or split(n) and to_pandas() of each part",
    "to_numpy_refs": "use powertrain.put(dataset.take_batch(dataset.count()))",
    "to_arrow_refs": "use iter_batches(batch_format='pyarrow')",
    "to_random_access_dataset": "use to_pandas().set_index(key), or write_parquet() and a database",
    "get_stats_summary": "use stats()",
    "get_dataset_id": "use name",
    "iter_internal_ref_bundles": "use iter_batches(batch_format='pyarrow')",
    "get_internal_block_refs": "use iter_batches(batch_format='pyarrow')",
    "has_serializable_lineage": "a dataset of files can always be pickled",
    "serialize_lineage": "use pickle.dumps(dataset)",
    "deserialize_lineage": "use pickle.loads(...)",
}  # fmt: skip
#: Methods of ``ray.data.DataIterator``, and what to do instead.
ITERATOR_METHODS: dict[str, str] = {
    "iter_jax_batches": METHODS["iter_jax_batches"],
    "get_context": "use powertrain.data.DataContext.get_current()",
}
#: Of shards of a dataset of Ray's, which has these methods itself.
STREAM_METHODS: dict[str, str] = {
    **ITERATOR_METHODS,
    "stats": "use stats() of the dataset of Ray's, in the process that made it",
    "to_torch": "use iter_torch_batches()",
}


_IN_TYPES = "use dataset.with_column(name, expression).schema()"
#: Names of ``ray.data.expressions``, and what to do instead.
EXPRESSION_FUNCTIONS: dict[str, str] = {
    "unnest": "name the fields: select_columns([col('point').struct['x'].alias('x'), ...])",
}
EXPRESSION_CLASSES: dict[str, str] = {
    **dict.fromkeys(
        ("Operation", "BinaryExpr", "UnaryExpr"),
        "write operators, and compare trees with structurally_equals()",
    ),
    "UDFExpr": "use @udf, and compare trees with structurally_equals()",
    "RandomExpr": "use random()",
    "UUIDExpr": "use uuid()",
    "MonotonicallyIncreasingIdExpr": "use monotonically_increasing_id()",
    "UnnestExpr": EXPRESSION_FUNCTIONS["unnest"],
}
#: Methods of Ray Data's expressions, and what to do instead.
EXPRESSION_METHODS: dict[str, str] = {
    **dict.fromkeys(("get_type", "nullable", "to_field"), _IN_TYPES),
    "expand_projection": "use columns(), which names the columns that it reads",
    "is_idempotent": "values follow from row, epoch and seed, so all expressions are",
}


def refuse(what: str, instead: str) -> NoReturn:
    """Raise the error for a name of Ray Data's."""
    raise NotSupportedError(f"{what} of Ray Data has no counterpart here: {instead}.")


def refused_name(
    name: str, functions: Mapping[str, str] = FUNCTIONS, classes: Mapping[str, str] = CLASSES
) -> Any:
    """Return a function or class that raises when it is called or derived from; None for an unknown name.

    Importing the name works, so that a program which never uses it runs.
    """
    if name in functions:
        return _refused_function(name, functions[name].format(name=name))
    return _refused_class(name, classes[name]) if name in classes else None


def _refused_function(name: str, instead: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"{name}()", instead)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Refused: {instead}."
    return call


def _refused_class(name: str, instead: str) -> type:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, instead)

    # Enums of Ray's are used by their members.
    members = {"__new__": fail, "__init_subclass__": classmethod(fail), "__doc__": f"Refused: {instead}."}
    return type(name, (), members)


class RefusesNames(type):
    """Metaclass of classes that explain names of Ray's which they do not have."""

    def __getattr__(cls, name: str) -> Any:
        raise missing_member(cls, name)


def missing_member(owner: type, name: str) -> AttributeError:
    """Return the error for an attribute that a class does not have: with the alternative where Ray has it."""
    table: Mapping[str, str] = getattr(owner, "_refused_names", {}) if not name.startswith("_") else {}
    if name in table:
        return MissingMemberError(
            f"{owner.__name__}.{name} of Ray Data has no counterpart here: {table[name]}."
        )
    near = difflib.get_close_matches(name, [each for each in dir(owner) if not each.startswith("_")], n=1)
    meant = f" Did you mean {near[0]!r}?" if near and not name.startswith("_") else ""
    return AttributeError(f"{owner.__name__!r} object has no attribute {name!r}.{meant}")
