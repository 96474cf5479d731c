"""Arguments of Ray Data's readers that select files, and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.data.arguments import flag, shown
from powertrain.data.datasource.partitioning import Partitioning
from powertrain.data.options.scheduling import take_ray_arguments
from powertrain.data.options.seeds import FileShuffleConfig
from powertrain.errors import DataError

#: Arguments that select files, with their values without effect.
FILE_ARGUMENTS = ("partition_filter", "partitioning", "ignore_missing_paths", "shuffle")


@dataclass(frozen=True)
class FileOptions:
    """Which files are read, and which columns their paths give."""

    #: Given paths, returns those to keep; None for all.
    keep: Callable[[list[str]], Sequence[str]] | None = None
    #: None for the default: columns of "key=value" directories.
    partitioning: Partitioning | None = None
    #: False where paths give no columns.
    has_partitions: bool = True
    #: True where paths without files are left out.
    ignores_missing: bool = False
    #: The seed of a shuffle; None without one.
    is_shuffled: bool = False
    seed: int | None = None

    @property
    def column_key(self) -> str:
        """Everything that the columns of a path depend on, for cache keys."""
        chosen = self.partitioning
        given = None if chosen is None else (chosen.style.value, chosen.base_dir, chosen.field_names)
        return f"{self.has_partitions}/{given}"


def file_options(method: str, given: Mapping[str, Any], hive: bool = True) -> FileOptions:
    """Return the options in the keyword arguments of a reader, and handle its arguments about scheduling.

    ``hive`` is whether "key=value" directories give columns by default.
    """
    rest = {name: value for name, value in given.items() if name not in FILE_ARGUMENTS}
    take_ray_arguments(method, rest)
    keep, shuffle = given.get("partition_filter"), given.get("shuffle")
    partitioning = given.get("partitioning")
    if keep is not None and not callable(keep):
        raise DataError(
            f"{method}(partition_filter={shown(keep)}) cannot be called. Give PathPartitionFilter.of(function), or a "
            "function that takes a list of paths and returns those to read."
        )
    if partitioning is not None and not isinstance(partitioning, Partitioning):
        raise DataError(
            f"{method}(partitioning={shown(partitioning)}) is a {type(partitioning).__name__}. Give "
            "powertrain.data.datasource.Partitioning('hive'), or None for no columns of paths."
        )
    if shuffle is not None and shuffle != "files" and not isinstance(shuffle, FileShuffleConfig):
        raise DataError(
            f"{method}(shuffle={shown(shuffle)}) is unknown. Use 'files' or FileShuffleConfig(seed=...)."
        )
    has_partitions = hive if "partitioning" not in given else partitioning is not None
    return FileOptions(
        keep,
        partitioning,
        has_partitions,
        flag("ignore_missing_paths", given.get("ignore_missing_paths", False)),
        shuffle is not None,
        shuffle.seed if isinstance(shuffle, FileShuffleConfig) else None,
    )
