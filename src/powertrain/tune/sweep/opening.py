"""The storage of a sweep, opened for writing: checked, and leased to this process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from powertrain.config.run import RunConfig
from powertrain.errors import ConfigError
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import RECORD_BYTES_LIMIT

if TYPE_CHECKING:
    from powertrain.run.record.lease import Lease
    from powertrain.storage import Storage


def open_sweep(run: RunConfig, name: str, stack: ExitStack) -> tuple[Storage, Lease]:
    """Return the storage of a sweep and its lease, which is held until ``stack`` is closed.

    Raises:
        ConfigError: The directory is that of a run, or belongs to another user.
    """
    from powertrain.run.record.lease import Lease
    from powertrain.storage import open_storage, probe
    from powertrain.storage.files.run_directory import refuse_links, refuse_other_owners

    root = open_storage(
        run.storage_root, filesystem=run.storage_filesystem, timeout=run.sync_config.sync_timeout
    )
    storage = root.child(name)
    refuse_links(storage)
    probe(storage)
    if not run.shared_storage:
        refuse_other_owners(storage)
    _refuse_run(storage)
    return storage, stack.enter_context(Lease.take(storage, shared=run.shared_storage))


def _refuse_run(storage: Storage) -> None:
    try:
        storage.get("run.json", limit=RECORD_BYTES_LIMIT)
    except FileNotFoundError:
        return
    raise ConfigError(
        f"{without_secrets(storage.uri)!r} is a run, and not a sweep. Give RunConfig(name=...) another name."
    )
