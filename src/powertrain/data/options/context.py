"""``DataContext``: Ray Data's settings of a process. The memory limit has an effect; others are kept."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

from powertrain.config.execution import ExecutionOptions
from powertrain.data.arguments import shown
from powertrain.data.options.noting import note_without_effect
from powertrain.errors import DataError

_LOCK = threading.Lock()
#: Bytes that reading needs in any case.
LEAST_MEMORY = 2**20


class SettingGroup:
    """A group of Ray Data's settings, such as ``DataContext.autoscaling_config``: it keeps what was set."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __setattr__(self, name: str, value: Any) -> None:
        note_without_effect(f"DataContext.{self._name}", {name: value})
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class DataContext:
    """The settings of Ray Data's executor, of which there is one for the process.

    ``execution_options.resource_limits.object_store_memory`` is the memory that reading a dataset outside a run may
    use; without it that is 256 MiB. Other settings keep what was set, and one line says so: this package has no
    executor to set.

    Example::

        context = powertrain.data.DataContext.get_current()
        context.execution_options.resource_limits.object_store_memory = 2**30
    """

    _current: DataContext | None = None

    def __init__(self, **settings: Any) -> None:
        self.__dict__["execution_options"] = ExecutionOptions()
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "execution_options":
            if not isinstance(value, ExecutionOptions):
                raise DataError(
                    f"DataContext.execution_options={shown(value)} is a {type(value).__name__}. Give "
                    "powertrain.data.ExecutionOptions(...)."
                )
        elif not name.startswith("_"):
            note_without_effect("DataContext", {name: value})
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("_config"):
            return self.__dict__.setdefault(name, SettingGroup(name))
        return None

    @staticmethod
    def get_current() -> DataContext:
        """Return the context of this process; it is made on first use."""
        with _LOCK:
            if DataContext._current is None:
                DataContext._current = DataContext()
            return DataContext._current

    @staticmethod
    def current(context: DataContext) -> Any:
        """Refused: Ray's context manager for a context of one block."""
        raise DataError(
            "DataContext.current(context) of Ray's has no counterpart. Set the values of DataContext.get_current()."
        )

    def copy(self) -> DataContext:
        """Return a copy, whose changes do not affect this one."""
        other = DataContext()
        other.__dict__.update(copy.deepcopy(self.__dict__))
        return other

    def set_config(self, key: str, value: Any) -> None:
        """Keep a value under a key of the caller's.

        Args:
            key: The key.
            value: The value.
        """
        self.__dict__.setdefault("_configs", {})[key] = value

    def get_config(self, key: str, default: Any = None) -> Any:
        """Return a value that :meth:`set_config` has kept.

        Args:
            key: The key.
            default: The value where there is none.
        """
        return self.__dict__.get("_configs", {}).get(key, default)

    def remove_config(self, key: str) -> None:
        """Forget a value that :meth:`set_config` has kept.

        Args:
            key: The key.
        """
        self.__dict__.get("_configs", {}).pop(key, None)


def memory_limit(default: int) -> int:
    """Return the bytes that reading alone may use: the limit of the current context, or ``default`` without one."""
    context = DataContext._current
    limit = None if context is None else context.execution_options.resource_limits.object_store_memory
    if limit is None or math.isinf(limit):
        return default
    return max(LEAST_MEMORY, int(limit))
