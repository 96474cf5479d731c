"""Whether Powertrain has a name: looked up in its modules, not in a list."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from powertrain.errors import PowertrainError

_State = Literal["found", "missing", "unknown"]


@dataclass(frozen=True)
class Resolution:
    """The outcome of a lookup.

    Attributes:
        state: "unknown" where a library that the module needs is not installed here.
        remark: For a name that refuses its work: what to use instead. For an unknown one: the reason.
        value: The object, where it was found.
    """

    state: _State
    remark: str = ""
    value: Any = None


@functools.cache
def resolve(name: str) -> Resolution:
    """Look up a dotted name that begins with "powertrain"."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        try:
            value = _member(value, part, ".".join(parts[:count]))
        except AttributeError:
            return Resolution("missing")
        except PowertrainError as error:  # refused by name, with the alternative
            return Resolution("missing", str(error))
        except Exception as error:  # a framework that is not installed, reported in that module's own way
            return Resolution(
                "unknown", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    return Resolution("found", _refusal(name), value)


def _member(value: Any, part: str, name: str) -> Any:
    """Return an attribute or a submodule; raises ``AttributeError`` where there is neither."""
    if isinstance(value, ModuleType):
        try:
            return getattr(value, part)
        except AttributeError:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name is not None and error.name.partition(".")[0] == "powertrain":
                    raise AttributeError(name) from None
                raise
    if isinstance(value, type) and any(
        part in vars(base).get("__annotations__", ()) for base in value.__mro__
    ):
        return None  # a field without a default
    return getattr(value, part)


def _refusal(name: str) -> str:
    """Return what to use in place of a reader or class that only exists to say so."""
    from powertrain.data.options import refused

    package, _, last = name.rpartition(".")
    if package != "powertrain.data":
        return ""
    return {**refused.FUNCTIONS, **refused.CLASSES}.get(last, "").format(name=last)


def unknown_arguments(value: Any, names: list[str]) -> list[str]:
    """Return the keyword arguments that a callable does not take."""
    if not callable(value):
        return []
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return []
    return [name for name in names if name not in parameters]
