"""``run.json``: the configuration, user and seeds of a run, as its newest start wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from powertrain.errors import StorageError
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import RECORD_BYTES_LIMIT
from powertrain.storage.sealed import DamagedError, check_seal, seal_json

KEY = "run.json"
_SEEDS = ("seed", "data_seed")
_SECTIONS = ("scaling_config", "run_config", "backend_config", "dataset_config")
_LARGEST_SEED = (1 << 63) - 1


def encode(record: Mapping[str, Any]) -> bytes:
    """Return the content of ``run.json``, sealed."""
    return seal_json(json.dumps(record, indent=2).encode())


def read(storage: Storage) -> dict[str, Any]:
    """Read the configuration of the run.

    Raises:
        FileNotFoundError: The run has no ``run.json``.
        StorageError: It cannot be read, or is damaged.
    """
    where = f"{KEY} of the run at {without_secrets(storage.uri)!r}"
    try:
        data = storage.get(KEY, limit=RECORD_BYTES_LIMIT)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{where} cannot be read: {error.strerror or error}.") from error
    try:
        check_seal(data)
        record = _checked(json.loads(data))
    except (ValueError, RecursionError, DamagedError) as error:
        raise DamagedError(f"{where} is damaged: {error}.", KEY) from error
    record.pop("seal", None)
    return record


def _checked(record: Any) -> dict[str, Any]:
    """``record`` itself; raises ``ValueError`` for one that no version has written."""
    if not isinstance(record, dict):
        raise ValueError(f"it holds a {type(record).__name__} and not an object")
    for name in _SEEDS:
        seed = record.get(name, 0)
        if type(seed) is not int or not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(f"its {name!r} is not a seed")
    for name in _SECTIONS:
        if not isinstance(record.get(name, {}), dict):
            raise ValueError(f"its {name!r} is not an object")
    if not isinstance(record.get("run_config", {}).get("checkpoint_config") or {}, dict):
        raise ValueError("its checkpoint_config is not an object")
    return record
