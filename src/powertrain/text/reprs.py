"""Reprs of user values, for messages and for the reprs of configs: without secrets, and never an error. Pure.

Addresses lose their credentials. Environment variables, and keys that are named like secrets, keep only their names. An
object of a class that Powertrain does not know, such as a file system or a callback with a token in it, is named by its
class.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from powertrain.text.redaction import HIDDEN, is_secret_name, redact, without_secrets

#: Names of fields and keys whose mapping holds environment variables.
ENVIRONMENT_NAMES = ("env_vars", "env")
_HIDING_NAMES = (*ENVIRONMENT_NAMES, "worker_runtime_env")
#: Packages whose objects show values, not credentials.
_PLAIN_PACKAGES = frozenset(
    {"builtins", "datetime", "decimal", "fractions", "numpy", "pathlib", "torch", "powertrain"}
)
_PLAIN_TYPES = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
#: Levels of nested containers that are searched.
_DEPTH = 20


def repr_without_secrets(value: Any, name: str = "", depth: int = _DEPTH) -> str:
    """Return the repr of a value of the field or key ``name``, without secrets."""
    kind = type(value)
    if _hides_values(name):
        return repr(_names_only(value))
    if kind is str:
        return repr(redact(without_secrets(value)))
    if kind in (dict, list, tuple) and depth == 0:
        return HIDDEN
    if kind is dict:
        pairs = (
            (repr_without_secrets(k), repr_without_secrets(v, str(k), depth - 1)) for k, v in value.items()
        )
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    if kind in (list, tuple):
        inner = ", ".join(repr_without_secrets(item, "", depth - 1) for item in value)
        return f"[{inner}]" if kind is list else f"({inner},)" if len(value) == 1 else f"({inner})"
    return redact(repr(value)) if _shows_values(value) else f"<{_class_name(value)}>"


class _Brief(reprlib.Repr):
    """Short reprs without secrets. Secrets are removed before a text is cut: a part of a secret is one too."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxdict = self.maxlist = self.maxtuple = 6

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redact(without_secrets(x)), level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        hidden = {k: _names_only(v) if _hides_values(k) else v for k, v in x.items()}
        return super().repr_dict(hidden, level)

    def repr_instance(self, x: Any, level: int) -> str:
        return redact(super().repr_instance(x, level)) if _shows_values(x) else f"<{_class_name(x)}>"


#: Characters of a repr in a message.
_LONGEST = 1000
_brief = _Brief()


def short_repr(value: Any, name: str = "") -> str:
    """Return a repr for a message: bounded, without secrets, and never an error of its own."""
    try:
        shown = _brief.repr(_names_only(value) if _hides_values(name) else value)
        shown.encode()  # half characters cannot be printed
    except Exception:
        return f"<{type(value).__name__}>"
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def _hides_values(name: Any) -> bool:
    return isinstance(name, str) and (name in _HIDING_NAMES or is_secret_name(name))


def _names_only(value: Any) -> Any:
    """Return variables without their values, also for values of a wrong type."""
    if isinstance(value, Mapping):
        return {key: _names_only(item) for key, item in value.items()}
    is_empty = value is None or (isinstance(value, (str, bytes, list, tuple, int, float)) and not value)
    return value if is_empty else HIDDEN


def _shows_values(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, _PLAIN_TYPES) or any(base.__module__ == "enum" for base in kind.__mro__):
        return True
    if kind.__module__.partition(".")[0] in _PLAIN_PACKAGES:
        return True
    own: Any = kind.__repr__
    return own is object.__repr__  # class and address


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
