"""Datasets: rows of files and memory, streamed to every rank exactly once per epoch.

Each name is loaded when it is first used: importing this package imports neither torch nor pandas nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.config.execution import ExecutionOptions, ExecutionResources
    from powertrain.data import aggregate, collate_fn, datasource, datatype, expressions, preprocessors
    from powertrain.data.dataset import Dataset
    from powertrain.data.iterators.alone import DatasetIterator
    from powertrain.data.methods.combining import MixStoppingCondition
    from powertrain.data.methods.summary import DatasetSummary
    from powertrain.data.options.context import DataContext
    from powertrain.data.options.seeds import FileShuffleConfig, RandomSeedConfig
    from powertrain.data.options.strategies import ActorPoolStrategy, TaskPoolStrategy
    from powertrain.data.output.writing import SaveMode
    from powertrain.data.preprocessors.base import Preprocessor
    from powertrain.data.readers.databases import read_sql
    from powertrain.data.readers.formats import read_orc, read_tfrecords, read_webdataset
    from powertrain.data.readers.tables import read_delta, read_iceberg, read_lance
    from powertrain.data.reading import (
        from_arrow,
        from_blocks,
        from_huggingface,
        from_items,
        from_numpy,
        from_pandas,
        from_torch,
        range,
        range_tensor,
        read_binary_files,
        read_csv,
        read_images,
        read_json,
        read_numpy,
        read_parquet,
        read_source,
        read_text,
    )
    from powertrain.data.shard import DataShard

#: Module of each public name.
_HOMES = {
    "powertrain.data.dataset": ("Dataset",),
    "powertrain.data.reading": (
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
        "read_binary_files",
        "read_csv",
        "read_images",
        "read_json",
        "read_numpy",
        "read_parquet",
        "read_source",
        "read_text",
    ),
    "powertrain.data.readers.databases": ("read_sql",),
    "powertrain.data.readers.formats": ("read_orc", "read_tfrecords", "read_webdataset"),
    "powertrain.data.readers.tables": ("read_delta", "read_iceberg", "read_lance"),
    "powertrain.data.shard": ("DataShard",),
    "powertrain.data.iterators.alone": ("DatasetIterator",),
    "powertrain.data.methods.combining": ("MixStoppingCondition",),
    "powertrain.data.methods.summary": ("DatasetSummary",),
    "powertrain.data.options.context": ("DataContext",),
    "powertrain.data.options.seeds": ("FileShuffleConfig", "RandomSeedConfig"),
    "powertrain.data.options.strategies": ("ActorPoolStrategy", "TaskPoolStrategy"),
    "powertrain.data.output.writing": ("SaveMode",),
    "powertrain.data.preprocessors.base": ("Preprocessor",),
    "powertrain.config.execution": ("ExecutionOptions", "ExecutionResources"),
}
_NAMES = {name: module for module, names in _HOMES.items() for name in names}
#: Aliases for users of Ray Data.
_ALIASES = {"DataIterator": "DataShard", "DatasetContext": "DataContext", "MaterializedDataset": "Dataset"}
#: Names of Ray Data that stand for a type of Python or Arrow.
_TYPES = {"NodeIdStr": ("builtins", "str"), "Schema": ("pyarrow", "Schema")}
_SUBMODULES = ("aggregate", "collate_fn", "datasource", "datatype", "expressions", "preprocessors")

__all__ = [
    "ActorPoolStrategy",
    "DataContext",
    "DataShard",
    "Dataset",
    "DatasetIterator",
    "DatasetSummary",
    "ExecutionOptions",
    "ExecutionResources",
    "FileShuffleConfig",
    "MixStoppingCondition",
    "Preprocessor",
    "RandomSeedConfig",
    "SaveMode",
    "TaskPoolStrategy",
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
    "read_delta",
    "read_iceberg",
    "read_images",
    "read_json",
    "read_lance",
    "read_numpy",
    "read_orc",
    "read_parquet",
    "read_source",
    "read_sql",
    "read_text",
    "read_tfrecords",
    "read_webdataset",
    "aggregate",
    "collate_fn",
    "datasource",
    "datatype",
    "expressions",
    "preprocessors",
]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _SUBMODULES:
        return import_module(f"powertrain.data.{name}")
    if name in _TYPES:
        module, attribute = _TYPES[name]
        return getattr(import_module(module), attribute)
    if name not in _NAMES:
        return _refused(name)
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def _refused(name: str) -> Any:
    """Return an object that raises an explanation when it is used, for a name of Ray Data without a counterpart."""
    from powertrain.data.options.refused import refused_name

    value = None if name.startswith("_") else refused_name(name)
    if value is None:
        raise AttributeError(f"module 'powertrain.data' has no attribute {name!r}")
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
