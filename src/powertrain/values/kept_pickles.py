"""Pickles kept in run directories: opened also where a class in them has moved to another module since."""

from __future__ import annotations

import io
import pickle
from importlib import import_module
from typing import Any

_SOURCES = "powertrain.data.sources"
_FILES = f"{_SOURCES}.files"
#: Modules that were split or moved, each with the modules that have its classes now.
_NEW_HOMES: dict[str, tuple[str, ...]] = {
    "powertrain.checkpoint.saver": ("powertrain.checkpoint.staging",),
    "powertrain.data.images": ("powertrain.data.operations.images",),
    "powertrain.data.operations": tuple(
        f"powertrain.data.operations.{part}" for part in ("functions", "columns", "decode", "runner")
    ),
    "powertrain.data.plan": ("powertrain.data.plan.plan",),
    "powertrain.data.position": ("powertrain.data.plan.position",),
    "powertrain.data.prepared": ("powertrain.data.plan.prepared",),
    "powertrain.data.rows": ("powertrain.data.rows.rows",),
    "powertrain.data.stages": ("powertrain.data.operations.stages", "powertrain.data.operations.operation"),
    f"{_SOURCES}.file_columns": (f"{_FILES}.file_columns",),
    f"{_SOURCES}.files": (f"{_FILES}.files",),
    f"{_SOURCES}.images": (f"{_FILES}.images",),
    f"{_SOURCES}.object_files": (f"{_FILES}.object_files",),
    f"{_SOURCES}.parquet": (f"{_FILES}.parquet",),
    f"{_SOURCES}.records": (f"{_FILES}.records",),
    f"{_SOURCES}.text": (f"{_FILES}.text",),
    f"{_SOURCES}.text_types": (f"{_FILES}.text_types",),
    "powertrain.result": ("powertrain.result.result",),
    "powertrain.worker.session": ("powertrain.worker.context", "powertrain.worker.train_context"),
}


def loads(data: bytes) -> Any:
    """Return the object in a pickle that an earlier version may have written. Runs the code in it.

    Args:
        data: A pickle that is trusted: signed by this user, or made in this process.

    Returns:
        The object.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        for home in _NEW_HOMES.get(module, ()):
            found = import_module(home)
            if hasattr(found, name.partition(".")[0]):
                return super().find_class(home, name)
        return super().find_class(module, name)
