"""Directories of a run, on this machine and in storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from powertrain.errors import StorageError

if TYPE_CHECKING:
    from powertrain.storage import Storage

#: Seconds for which journal, metrics and logs are tried to be put to storage that cannot append.
SHIP_WITHIN = 60.0


@contextlib.contextmanager
def naming_run(storage: Storage) -> Iterator[None]:
    """Turn what the operating system says of a file of the run into a :class:`StorageError` that names both."""
    from powertrain.storage.addresses import without_secrets

    try:
        yield
    except OSError as error:
        which = f" ({str(error.filename)!r})" if error.filename else ""
        raise StorageError(
            f"The run at {without_secrets(storage.uri)!r} cannot be opened: {error.strerror or error}{which}. Mend or "
            "move away what is named, or choose another run name."
        ) from error


def directory_of(storage: Storage, name: str) -> str:
    """Where this machine has the files of a directory of the run."""
    inside = storage.local_path(f"{name}/x")
    assert inside is not None
    return str(inside.parent)
