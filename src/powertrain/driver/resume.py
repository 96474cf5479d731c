"""Resume an earlier run: find it, compare its record, require arguments that were not kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, StorageError
from powertrain.values.arguments import as_path

if TYPE_CHECKING:
    from powertrain.storage import Storage


def existing_run(path: str | os.PathLike[str], filesystem: Any) -> Storage:
    """Return the storage of an existing run; raises :class:`ConfigError` where there is none."""
    from powertrain.storage import open_storage
    from powertrain.storage.addresses import without_secrets
    from powertrain.storage.base import RECORD_BYTES_LIMIT

    path = as_path(path, "The path of a run")
    storage = open_storage(path, filesystem=filesystem, timeout=30.0)
    try:
        storage.get("run.json", limit=RECORD_BYTES_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"There is no run at {without_secrets(path)!r}: it has no run.json. Give the directory of one run, which "
            "is storage_path/name."
        ) from None
    except OSError as error:
        raise StorageError(
            f"The run at {without_secrets(path)!r} cannot be restored: its run.json cannot be read "
            f"({error.strerror or error}). Make it readable, or move it away and start the run again."
        ) from error
    return storage


def require_variables(names: list[str], changes: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` when variables, whose values a run does not keep, are not given again."""
    if names and "run_config" not in changes:
        raise ConfigError(
            f"The run was started with RunConfig(worker_runtime_env=...) and the variables {', '.join(names)}, whose "
            "values are not kept in it. Give them again: restore(path, run_config=RunConfig(worker_runtime_env=...))."
        )


def require_datasets(names: list[str], changes: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` when datasets that are not kept in the run are not given again."""
    if names and "datasets" not in changes:
        raise ConfigError(
            f"The run does not keep its datasets ({', '.join(names)}), because they hold many rows in memory, or a "
            "secret in an address, or are Ray's, or cannot be pickled. Give them again: restore(path, datasets={...})."
        )


def split_run_path(path: str) -> tuple[str, str]:
    """Split a run's directory into (storage path, name). An address's query belongs to the storage path."""
    address, mark, query = path.partition("?") if "://" in path else (path, "", "")
    root, _, name = address.rstrip("/").rpartition("/")
    return f"{root or '.'}{mark}{query}", name


@dataclass(frozen=True)
class EarlierStarts:
    """The state that earlier starts of the same run left."""

    state: Any
    record: dict[str, Any]
    checkpoint: Any
    remarks: tuple[str, ...]

    @classmethod
    def read(cls, storage: Storage) -> EarlierStarts:
        from powertrain.checkpoint import cleanup, committed
        from powertrain.run.record import journal
        from powertrain.run.record import run_json as run_record

        committed.refuse_other_versions(storage)
        remarks: list[str] = []
        state = journal.replay(journal.read(storage))
        record: dict[str, Any] = {}
        try:
            record = run_record.read(storage)
        except FileNotFoundError:
            pass
        except StorageError as error:
            remarks.append(f"{error} The run continues with new seeds, so its data come in another order.")
        checkpoint = committed.newest_verified(storage, remarks.append)
        for place in cleanup.set_aside_newer(storage, checkpoint):
            remarks.append(f"A checkpoint that cannot be used was moved to {place}.")
        cleanup.sweep_uncommitted(storage)
        return cls(state, record, checkpoint, tuple(remarks))

    def messages(self, record: Mapping[str, Any], path: str) -> list[str]:
        """Return the messages for the user before this start. ``path`` is the run's directory, without secrets."""
        messages = list(self.remarks)
        if self.state.state == "finished":
            where = (
                f"continues from {self.checkpoint.name}"
                if self.checkpoint
                else "has no checkpoint to continue from"
            )
            messages.append(
                f"This run had finished already; this start {where}. To begin anew, give RunConfig(name=...) another "
                f"name, or remove {path}."
            )
        changed = [
            f"{section}.{field}: {old!r} -> {new!r}"
            for section in ("scaling_config", "run_config", "backend_config", "dataset_config")
            if section in self.record
            for field, old, new in _differences(self.record[section], record[section])
        ]
        if self.record and changed:
            messages.append(f"This run was started before with other settings: {'; '.join(changed)}.")
        return messages


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*old, *new}):
        if old.get(key) != json.loads(json.dumps(new.get(key))):
            yield key, old.get(key), new.get(key)
