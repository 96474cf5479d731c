"""Files of a sweep in its directory, beside its trials.

::

    <sweep>/sweep.json                 the request: space, search, scheduler, user
    <sweep>/sweep.pickle               the Tuner's arguments, signed: only this user's are opened
    <sweep>/configs/<trial>.pickle     configurations that JSON cannot hold, signed
    <sweep>/journal/<lease>-000001.jsonl
    <sweep>/<trial>/                   an ordinary run
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from powertrain.errors import ConfigError, StorageError
from powertrain.run.record.journal import unreadable, warn_of_damage
from powertrain.run.record.journal_lines import JournalLines
from powertrain.storage import Storage, signed
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT, RECORD_BYTES_LIMIT
from powertrain.storage.sealed import DamagedError, check_seal, seal_json
from powertrain.text.errors import describe_error
from powertrain.text.loggers import module_logger
from powertrain.tune.sweep.journal import events as ev
from powertrain.values import kept_pickles

_logger = module_logger(__name__)

KEY = "sweep.json"
_ARGUMENTS_KEY = "sweep.pickle"
#: Reserved names in a sweep's directory, not available to trials.
RESERVED_NAMES = frozenset({KEY, _ARGUMENTS_KEY, "callbacks.pickle", "configs", "journal", "lease", "chain"})


def is_sweep(storage: Storage) -> bool:
    """Return whether a directory is that of a sweep."""
    try:
        storage.get(KEY, limit=RECORD_BYTES_LIMIT)
    except OSError:
        return False
    return True


def store(storage: Storage, record: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Store the arguments of a sweep; return "" or the reason why ``restore`` will need them again."""
    import cloudpickle

    record = {**record, "names": _names_of(storage, str(record["name"]))}
    storage.put(KEY, seal_json(json.dumps(record, indent=2).encode()))
    try:
        value = signed.sign(storage, _ARGUMENTS_KEY, cloudpickle.dumps(dict(arguments)))
    except Exception as error:  # any error of the user's objects in pickling
        signed.delete(storage, _ARGUMENTS_KEY)
        return describe_error(error)
    signed.put(storage, value)
    return ""


def read(storage: Storage) -> dict[str, Any]:
    """Return the content of ``sweep.json``.

    Raises:
        ConfigError: There is no sweep.
        StorageError: It cannot be read, or is damaged.
    """
    where = without_secrets(storage.uri)
    try:
        data = storage.get(KEY, limit=RECORD_BYTES_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"There is no sweep at {where!r}: it has no {KEY}. Give the directory of a sweep, storage_path/name."
        ) from None
    except OSError as error:
        raise StorageError(
            f"{KEY} of the sweep at {where!r} cannot be read: {error.strerror or error}."
        ) from error
    try:
        check_seal(data)
        record = json.loads(data)
        if not isinstance(record, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError, DamagedError) as error:
        raise DamagedError(f"{KEY} of the sweep at {where!r} is damaged: {error}.", KEY) from error
    record.pop("seal", None)
    return record


def load_arguments(storage: Storage) -> dict[str, Any]:
    """Return the arguments of the sweep's Tuner.

    Raises:
        ConfigError: They were not stored, or not by this user on this machine.
    """
    where = without_secrets(storage.uri)
    try:
        data = open_signed(storage, _ARGUMENTS_KEY)
    except FileNotFoundError:
        why = "it does not hold what its Tuner was made of"
    except signed.NotOurs:
        why = "what it holds was not written by you on this machine, and opening it could run any code"
    except OSError as error:
        why = f"what its Tuner was made of cannot be read ({error.strerror or error})"
    else:
        arguments: dict[str, Any] = kept_pickles.loads(data)
        return arguments
    raise ConfigError(
        f"The sweep at {where!r} cannot be restored from its directory alone: {why}. Make the Tuner as before, with "
        "RunConfig(name=..., storage_path=...) of that sweep, and call fit(): it continues."
    )


def store_config(storage: Storage, name: str, config: Mapping[str, Any]) -> str:
    """Store a configuration that JSON cannot represent; return its key."""
    import cloudpickle

    key = f"configs/{name}.pickle"
    signed.put(storage, signed.sign(storage, key, cloudpickle.dumps(dict(config))))
    return key


def load_config(storage: Storage, key: str) -> dict[str, Any]:
    """Return a configuration stored by :func:`store_config`.

    Raises:
        ConfigError: It is missing, or was not written by this user on this machine.
    """
    try:
        config: dict[str, Any] = kept_pickles.loads(open_signed(storage, key))
        return config
    except (OSError, signed.NotOurs) as error:
        where = f"The configuration {key!r} of the sweep at {without_secrets(storage.uri)!r} cannot be opened"
        if isinstance(error, OSError):
            raise ConfigError(f"{where}: {error.strerror or error}.") from error
        raise ConfigError(
            f"{where}: it was not written by you on this machine, and opening it could run any code. The sweep can be "
            "continued by the user and on the machine that began it."
        ) from error


def open_signed(storage: Storage, key: str) -> bytes:
    """Load a pickle that this user has signed for a sweep, also under an earlier name of its directory."""
    return signed.get(storage, key, earlier_names=lambda: _names_of(storage))


def _names_of(storage: Storage, now: str = "") -> list[str]:
    """Return the names of a sweep's directory so far, according to its record, and its current name."""
    try:
        record = read(storage)
    except (ConfigError, StorageError):
        record = {}
    names = record.get("names") or [record.get("name")]
    return [name for name in dict.fromkeys([*names, now]) if isinstance(name, str) and name]


class ConfigReader:
    """Loader of configurations for read-only results: None for those that cannot be loaded.

    Args:
        storage: The sweep's.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._has_warned = storage, False

    def __call__(self, key: str) -> dict[str, Any] | None:
        """Return a configuration stored by :func:`store_config`; None, with one warning, if it cannot be loaded."""
        try:
            return load_config(self._storage, key)
        except Exception as error:  # also any error of the user's objects in unpickling
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    "Configurations have text in place of values that JSON cannot hold: %s",
                    describe_error(error),
                )
            return None


def read_journal(storage: Storage) -> list[ev.SweepEvent]:
    """Return all facts of a sweep, oldest first. Damaged lines are skipped, with a warning.

    Raises:
        StorageError: A file of the journal cannot be read.
    """
    events: list[ev.SweepEvent] = []
    for entry in storage.list("journal"):
        if not entry.key.endswith(".jsonl"):
            continue
        lines = JournalLines(decode=ev.decode_event)
        try:
            lines.feed(storage.get(entry.key, limit=LARGE_RECORD_BYTES_LIMIT))
        except FileNotFoundError:
            continue  # moved or deleted since it was listed
        except OSError as error:
            raise unreadable(storage, entry.key, error) from error
        lines.finish()
        warn_of_damage(storage, entry.key, lines.damaged)
        events += lines.events
    return events
