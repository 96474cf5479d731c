"""Places that keep a run's files."""

from __future__ import annotations

from powertrain.storage.base import Entry, FileDigest, Storage, check_key
from powertrain.storage.opening import open_storage, probe

__all__ = ["Entry", "FileDigest", "Storage", "check_key", "open_storage", "probe"]
