"""Columns that the directories of a path give: "key=value", or values in a fixed order."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

from powertrain.data.arguments import column_names, shown
from powertrain.errors import DataError, NotSupportedError

#: Null in the names of partition directories.
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def below(path: str, base: str) -> str:
    """Return a path below the directory ``base``, which may be relative; the whole path where it lies elsewhere."""
    local = [] if "://" in base else [os.path.abspath(os.path.expanduser(base))]
    for directory in [base, *local] if base else []:
        name = path.removeprefix(directory.rstrip("/"))
        if name != path and name.startswith("/"):
            return name.lstrip("/")
    return path.lstrip("/")


class PartitionStyle(str, enum.Enum):
    """The layout of partitioned files."""

    HIVE = "hive"
    DIRECTORY = "dir"


class Partitioning:
    """How directories give columns: ``Partitioning("hive")``, or ``Partitioning("dir", field_names=["year"])``.

    Example::

        powertrain.data.read_csv("data", partitioning=Partitioning("dir", field_names=["year"]))
    """

    def __init__(
        self,
        style: PartitionStyle | str = PartitionStyle.HIVE,
        base_dir: str | None = None,
        field_names: Sequence[str] | None = None,
        field_types: Any = None,
        filesystem: Any = None,
    ) -> None:
        try:
            self.style = PartitionStyle(style)
        except ValueError as error:
            raise DataError(f"Partitioning({shown(style)}) is unknown. Use 'hive' or 'dir'.") from error
        if field_types:
            raise NotSupportedError(
                f"Partitioning(field_types={shown(field_types)}) of Ray Data has no counterpart here: the columns are "
                "text; convert them with with_column(name, col(name).cast('int64'))."
            )
        self.field_names = None if field_names is None else column_names("Partitioning", field_names)
        if self.style is PartitionStyle.DIRECTORY and not self.field_names:
            raise DataError(
                "Partitioning('dir') has no field_names. Name the column of each directory, in order."
            )
        self.base_dir = "" if base_dir is None else str(base_dir)
        self.filesystem = filesystem

    def values(self, name: str) -> dict[str, str | None]:
        """Return the columns of a file, by its path below the directory that was read."""
        directories = name.split("/")[:-1]
        if self.style is PartitionStyle.HIVE:
            found: dict[str, str | None] = {}
            for part in directories:
                key, equals, value = part.partition("=")
                key = unquote(key)
                if key and equals and (self.field_names is None or key in self.field_names):
                    found[key] = None if value == _HIVE_NULL else unquote(value)
            return found
        names = self.field_names or ()
        if directories and len(directories) != len(names):
            raise DataError(
                f"The file {name!r} lies in {len(directories)} directories, and Partitioning('dir') names "
                f"{len(names)} columns: {', '.join(names)}. Name one for each."
            )
        return dict(zip(names, directories, strict=False))


class PathPartitionFilter:
    """Keeps files by the columns of their paths; given to readers as ``partition_filter``."""

    def __init__(
        self, partitioning: Partitioning, filter_fn: Callable[[dict[str, str | None]], bool]
    ) -> None:
        self.partitioning, self._filter = partitioning, filter_fn

    @staticmethod
    def of(
        filter_fn: Callable[[dict[str, str | None]], bool],
        style: PartitionStyle | str = PartitionStyle.HIVE,
        base_dir: str | None = None,
        field_names: Sequence[str] | None = None,
        field_types: Any = None,
        filesystem: Any = None,
    ) -> PathPartitionFilter:
        """Return a filter of files.

        Args:
            filter_fn: Returns True for the columns of files to keep.
            style: As for :class:`Partitioning`, like the arguments below.
            base_dir: Likewise; a filter sees paths below it.
            field_names: Likewise.
            field_types: Likewise.
            filesystem: Likewise.
        """
        return PathPartitionFilter(
            Partitioning(style, base_dir, field_names, field_types, filesystem), filter_fn
        )

    def __call__(self, paths: Sequence[str]) -> list[str]:
        """Return the paths to keep."""
        return [path for path in paths if self.apply(path)]

    def apply(self, path: str) -> bool:
        """Return whether to keep a path.

        Args:
            path: The path of a file.
        """
        return bool(self._filter(self.partitioning.values(below(path, self.partitioning.base_dir))))
