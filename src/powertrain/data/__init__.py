"""Datasets: rows of files and memory, streamed to every rank exactly once per epoch.

Each name is loaded when it is first used: importing this package imports neither torch nor pandas nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.data import collate_fn, expressions
    from powertrain.data.dataset import Dataset
    from powertrain.data.reading import (
        from_arrow,
        from_huggingface,
        from_items,
        from_numpy,
        from_pandas,
        from_torch,
        range,
        read_csv,
        read_images,
        read_json,
        read_parquet,
        read_source,
    )
    from powertrain.data.shard import DataShard

#: Module of each public name.
_HOMES = {
    "powertrain.data.dataset": ("Dataset",),
    "powertrain.data.reading": (
        "from_arrow",
        "from_huggingface",
        "from_items",
        "from_numpy",
        "from_pandas",
        "from_torch",
        "range",
        "read_csv",
        "read_images",
        "read_json",
        "read_parquet",
        "read_source",
    ),
    "powertrain.data.shard": ("DataShard",),
}
_NAMES = {name: module for module, names in _HOMES.items() for name in names}
#: Aliases for users of Ray Data.
_ALIASES = {"DataIterator": "DataShard", "MaterializedDataset": "Dataset"}
_SUBMODULES = ("collate_fn", "expressions")

__all__ = [
    "DataShard",
    "Dataset",
    "from_arrow",
    "from_huggingface",
    "from_items",
    "from_numpy",
    "from_pandas",
    "from_torch",
    "range",
    "read_csv",
    "read_images",
    "read_json",
    "read_parquet",
    "read_source",
    "collate_fn",
    "expressions",
]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _SUBMODULES:
        return import_module(f"powertrain.data.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'powertrain.data' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
