"""A trainer's arguments, kept in its run, so that ``restore(path)`` can make it again.

The arguments are pickled, and signed (:mod:`powertrain.storage.signed`): only this user's files are opened.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import cloudpickle

from powertrain.errors import ConfigError, PowertrainError
from powertrain.run.record import run_json as run_record
from powertrain.storage import Storage, signed
from powertrain.storage.addresses import has_secrets, without_secrets
from powertrain.text.errors import describe_error
from powertrain.values import kept_pickles

_KEY = "trainer.pickle"
#: In-memory datasets above this size in bytes are not kept: they must be given again to restore the run.
_MOST_DATA = 16 * 2**20
#: The most bytes that are read back.
_BYTES_LIMIT = 4 << 30
_ADDRESS = re.compile(rb"[a-z0-9]+://[!-~]+")


def store(storage: Storage, arguments: dict[str, Any]) -> str:
    """Keep a trainer's arguments in its run; returns "" or why they could not be kept.

    Datasets that have many rows in memory, have a secret in an address, are Ray's or cannot be pickled are left out;
    their names are kept instead.
    """
    try:
        kept = {**arguments, **_lasting_datasets(arguments.get("datasets"))}
        value = signed.sign(storage, _KEY, cloudpickle.dumps(kept))
    except Exception as error:  # the user's objects may raise anything when pickled
        signed.delete(storage, _KEY)  # of an earlier start, whose arguments are not these
        return describe_error(error)
    signed.put(storage, value)
    return ""


def load(storage: Storage) -> dict[str, Any]:
    """Return the arguments of the run's trainer; raises :class:`ConfigError` where there are none that can be
    trusted."""
    try:
        data = signed.get(storage, _KEY, limit=_BYTES_LIMIT)
    except FileNotFoundError:
        if sweep := _sweep_of(storage):
            raise ConfigError(_require_sweep(storage, sweep)) from None
        why = "it does not hold what its trainer was made of"
        raise ConfigError(_require_function(storage, why)) from None
    except OSError as error:
        why = f"what its trainer was made of cannot be read ({error.strerror or error})"
        raise ConfigError(_require_function(storage, why)) from error
    except signed.NotOurs:
        why = "what it holds was not written by you on this machine, and opening it could run any code"
        raise ConfigError(_require_function(storage, why)) from None
    arguments: dict[str, Any] = kept_pickles.loads(data)
    if arguments.get("datasets"):
        arguments["datasets"] = kept_pickles.loads(arguments["datasets"])
    return arguments


def _lasting_datasets(datasets: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``datasets`` in their stored form: pickled, or only the names of those that are not stored."""
    if not datasets:
        return {"datasets": None}
    left_out = {"datasets": None, "needs_datasets": sorted(datasets)}
    if any(type(dataset).__module__.startswith("ray.") for dataset in datasets.values()):
        return left_out  # its references are gone with its cluster
    limited = _LimitedFile()
    try:
        cloudpickle.CloudPickler(limited).dump(dict(datasets))
    except Exception:  # too large, or the user's objects raise when pickled
        return left_out
    data = limited.getvalue()
    has_a_secret = any(has_secrets(found.decode()) for found in _ADDRESS.findall(data))
    return left_out if has_a_secret else {"datasets": data}


class _TooLarge(Exception):
    """More than is worth keeping."""


class _LimitedFile(io.BytesIO):
    """Bytes in memory, but not more than :data:`_MOST_DATA`: large rows are not copied only to learn their size."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MOST_DATA:
            raise _TooLarge
        return super().write(data)


def _sweep_of(storage: Storage) -> str:
    """Return the name of the sweep that the run is a trial of; "" for none."""
    try:
        return str(run_record.read(storage).get("sweep") or "")
    except (OSError, PowertrainError):
        return ""


def _require_sweep(storage: Storage, sweep: str) -> str:
    where = without_secrets(storage.uri).rstrip("/")
    return (
        f"{where!r} is a trial of the sweep {sweep!r}, which keeps the function for all of its trials. Continue the "
        f"sweep: powertrain.tune.Tuner.restore({where.rpartition('/')[0]!r}). To go on with this trial alone, give the "
        "function: restore(path, train_loop_per_worker=..., train_loop_config=..., scaling_config=...)."
    )


def _require_function(storage: Storage, why: str) -> str:
    return (
        f"The trainer of {without_secrets(storage.uri)!r} cannot be made from that run alone: {why}. Give the "
        "training function: "
        "restore(path, train_loop_per_worker=..., scaling_config=...)."
    )
