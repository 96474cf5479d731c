"""Facts about a storage: values put, read, listed and deleted through the code that runs use."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from powertrain.cli.doctor.verdicts import StorageFacts
from powertrain.errors import PowertrainError
from powertrain.storage import Storage, open_storage, probe
from powertrain.storage.addresses import without_secrets
from powertrain.storage.opening import PROBE_TIMEOUT_S


def gather_storage(path: str) -> tuple[StorageFacts, float | None]:
    """Return the facts about the storage at ``path``, and the seconds that its clock is ahead of this machine's."""
    shown = without_secrets(path)
    started = time.monotonic()
    try:
        storage = open_storage(path, timeout=PROBE_TIMEOUT_S)
        shown = without_secrets(storage.uri)
        with _without_new_directories(storage):
            probe(storage)
            lacks, skew, error = _list_and_delete(storage)
    except PowertrainError as raised:
        why, _, fix = str(raised).partition(". ")
        return StorageFacts(shown, f"{why.rstrip('.')}.", fix), None
    except OSError as raised:
        return StorageFacts(shown, f"The storage {shown!r} failed: {raised.strerror or raised}."), None
    return StorageFacts(shown, error, "", lacks, time.monotonic() - started), skew


def _list_and_delete(storage: Storage) -> tuple[tuple[str, ...], float, str]:
    """Put a value in a directory of its own, list it, delete it, and compare the clocks."""
    place = storage.within(PROBE_TIMEOUT_S)
    directory = f".powertrain-doctor-{secrets.token_hex(8)}"
    key = f"{directory}/value"
    try:
        before = time.time()
        place.put(key, b"\0")
        skew = place.modified(key) - (before + time.time()) / 2
        listed = [entry.key for entry in place.list(directory)]
    finally:
        place.delete_tree(directory)
    shown = without_secrets(storage.uri)
    if listed != [key]:
        return (), skew, f"The storage {shown!r} does not list a value that was just written."
    if place.list(directory):
        return (), skew, f"The storage {shown!r} still lists a value that was just deleted."
    return storage.lacks, skew, ""


@contextlib.contextmanager
def _without_new_directories(storage: Storage) -> Iterator[None]:
    """Remove the directories that the probe makes where the storage path does not exist yet."""
    inside = storage.local_path("probe")
    new: list[Path] = []
    if inside is not None:
        new = [parent for parent in inside.parents if not parent.exists()]
    try:
        yield
    finally:
        for parent in new:
            with contextlib.suppress(OSError):
                os.rmdir(parent)
