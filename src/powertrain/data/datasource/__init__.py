"""Ray Data's names of how paths of files become columns."""

from powertrain.data.datasource.partitioning import Partitioning, PartitionStyle, PathPartitionFilter
from powertrain.data.options.seeds import FileShuffleConfig

__all__ = ["FileShuffleConfig", "PartitionStyle", "Partitioning", "PathPartitionFilter"]
