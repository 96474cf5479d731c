"""Ray Data's names of how paths of files become columns; names without a counterpart explain themselves when used."""

from typing import Any

from powertrain.data.datasource.partitioning import Partitioning, PartitionStyle, PathPartitionFilter
from powertrain.data.options.seeds import FileShuffleConfig

__all__ = ["FileShuffleConfig", "PartitionStyle", "Partitioning", "PathPartitionFilter"]


def __getattr__(name: str) -> Any:
    from powertrain.data.options.refused import CLASSES, DATASOURCE_CLASSES, refused_name

    if name == "SaveMode":
        from powertrain.data.output.writing import SaveMode

        return SaveMode
    value = None if name.startswith("_") else refused_name(name, {}, {**CLASSES, **DATASOURCE_CLASSES})
    if value is None:
        raise AttributeError(f"module 'powertrain.data.datasource' has no attribute {name!r}")
    return value
