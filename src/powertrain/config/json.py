"""Configs as JSON, for ``run.json``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from powertrain.config.checks import Config, fields
from powertrain.text.redaction import without_secrets
from powertrain.text.reprs import ENVIRONMENT_NAMES

if TYPE_CHECKING:
    from powertrain.backend import BackendConfig


def to_json(config: Config | BackendConfig) -> dict[str, Any]:
    """Return all fields as JSON values, for ``run.json``.

    Functions and objects are given by their qualified names. Values of environment variables and credentials in
    addresses are left out, because run directories are shared.
    """
    if isinstance(config, Config):
        return {field.name: _json_value(field.name, getattr(config, field.name)) for field in fields(config)}
    public = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    described = {name: _json_value(name, value) for name, value in public.items()}
    return {"type": _qualified_name(type(config)), **described}


def _json_value(name: str, value: Any) -> Any:
    if name in ENVIRONMENT_NAMES and isinstance(value, Mapping):
        return {str(key): "<hidden>" for key in value}
    if isinstance(value, Config):
        return to_json(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return without_secrets(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value("", item) for item in value]
    return _qualified_name(value)


def _qualified_name(value: Any) -> str:
    """Return ``module.name`` of a class or function, and of the class of anything else."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"
