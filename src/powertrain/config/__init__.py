"""The configs of a run: every config class, frozen and checked at construction.

A field is one statement: its type, its default, its check, with its meaning in the string below it::

    max_failures: int = option(0, whole(at_least=-1))

``option`` ties the check to the field, :class:`Config` runs all checks at construction, and a class adds
``_contradictions`` for pairs of fields that cannot both hold. So a new field needs no other place.

An invalid value, an unknown field or a contradictory pair raises one :class:`~powertrain.errors.ConfigError` that
names the field, the value and the fix. Fields of Ray Train without an effect here are known by name: their defaults
pass, and any other value is refused with the alternative (:func:`only`). Positional arguments follow the order of Ray
Train 2.60.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.backend import BackendConfig as BackendConfig
    from powertrain.config.checkpoint import CheckpointConfig as CheckpointConfig
    from powertrain.config.checkpoint import CheckpointConsistencyMode as CheckpointConsistencyMode
    from powertrain.config.checkpoint import CheckpointUploadMode as CheckpointUploadMode
    from powertrain.config.checkpoint import SyncConfig as SyncConfig
    from powertrain.config.checks import Config as Config
    from powertrain.config.checks import as_config as as_config
    from powertrain.config.checks import replace as replace
    from powertrain.config.data import TRAIN_DATASET_KEY as TRAIN_DATASET_KEY
    from powertrain.config.data import DataConfig as DataConfig
    from powertrain.config.failure import FailureConfig as FailureConfig
    from powertrain.config.json import to_json as to_json
    from powertrain.config.run import LoggingConfig as LoggingConfig
    from powertrain.config.run import RunConfig as RunConfig
    from powertrain.config.scaling import ScalingConfig as ScalingConfig
    from powertrain.config.trace import ProfileConfig as ProfileConfig
    from powertrain.config.trace import TraceConfig as TraceConfig
    from powertrain.config.validation import ValidationConfig as ValidationConfig
    from powertrain.config.validation import ValidationFn as ValidationFn
    from powertrain.config.validation import ValidationTaskConfig as ValidationTaskConfig
    from powertrain.torch.config import TorchConfig as TorchConfig

#: Module of each public name; each is loaded when it is first used.
_HOMES = {
    "BackendConfig": "powertrain.backend",
    "CheckpointConfig": "powertrain.config.checkpoint",
    "CheckpointConsistencyMode": "powertrain.config.checkpoint",
    "CheckpointUploadMode": "powertrain.config.checkpoint",
    "Config": "powertrain.config.checks",
    "DataConfig": "powertrain.config.data",
    "FailureConfig": "powertrain.config.failure",
    "LoggingConfig": "powertrain.config.run",
    "RunConfig": "powertrain.config.run",
    "ScalingConfig": "powertrain.config.scaling",
    "SyncConfig": "powertrain.config.checkpoint",
    "ProfileConfig": "powertrain.config.trace",
    "TraceConfig": "powertrain.config.trace",
    "TorchConfig": "powertrain.torch.config",
    "TRAIN_DATASET_KEY": "powertrain.config.data",
    "ValidationConfig": "powertrain.config.validation",
    "ValidationFn": "powertrain.config.validation",
    "ValidationTaskConfig": "powertrain.config.validation",
    "as_config": "powertrain.config.checks",
    "replace": "powertrain.config.checks",
    "to_json": "powertrain.config.json",
}

__all__ = [
    "BackendConfig",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "Config",
    "DataConfig",
    "FailureConfig",
    "LoggingConfig",
    "ProfileConfig",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
    "TorchConfig",
    "TraceConfig",
    "TRAIN_DATASET_KEY",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "as_config",
    "replace",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
