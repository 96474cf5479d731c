"""Checkpoints that were reported and are not committed yet: which shares are still on their way. Pure bookkeeping.

A checkpoint is pending from the moment its row is complete until its manifest is written or it has failed. Its shares
may arrive in any order; checkpoints are uploaded and committed one after the other, in the order of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from powertrain.checkpoint.commit import Merged, merge
from powertrain.wire.from_worker import ShareUploaded
from powertrain.wire.values import CheckpointPart, FilePart, ValidationRequest

#: The key of the requested validation in a manifest's extras, for a resumed run.
VALIDATION_EXTRA = "validation"
#: (attempt, row)
Key = tuple[int, int]


@dataclass
class PendingCheckpoint:
    """One checkpoint on its way."""

    attempt: int
    row: int
    name: str
    metrics: dict[str, Any]
    world_size: int
    #: Every rank's share as reported; hashes are filled in as shares arrive.
    parts: dict[int, CheckpointPart]
    #: When it became pending (monotonic).
    since: float
    #: Ranks whose shares are still on their way.
    awaited: set[int] = field(default_factory=set)
    #: True once its uploads were ordered, and once it was handed to the committer.
    ordered: bool = False
    committing: bool = False
    #: True once it was given up: it must not be committed then.
    given_up: bool = False
    #: The last error of storage, and the place that refused; "" for the run's storage.
    trouble: str = ""
    place: str = ""

    @property
    def key(self) -> Key:
        return self.attempt, self.row

    @property
    def bytes(self) -> int:
        return sum(file.size for part in self.parts.values() for file in part.files)

    @property
    def validation(self) -> ValidationRequest | None:
        """Return the validation request of the lowest rank that made one."""
        asked = [part.validation for _, part in sorted(self.parts.items()) if part.validation is not None]
        return asked[0] if asked else None

    @property
    def own_extras(self) -> dict[str, Any]:
        """Return the run's own entries of the manifest's extras."""
        asked = self.validation
        return {} if asked is None else {VALIDATION_EXTRA: msgspec.to_builtins(asked)}

    def merged(self) -> Merged:
        """Return the merged shares."""
        return merge(self.parts)

    def arrived(self, uploaded: ShareUploaded) -> None:
        """Note that a share is in storage: its files now have hashes, or lie where the user's function put them."""
        part = self.parts[uploaded.rank]
        if uploaded.elsewhere:
            part = msgspec.structs.replace(part, files=uploaded.files, elsewhere=uploaded.elsewhere)
        else:
            part = msgspec.structs.replace(part, files=_with_hashes(part.files, uploaded.files))
        self.parts[uploaded.rank] = part
        self.awaited.discard(uploaded.rank)


def shares_to_upload(parts: Mapping[int, CheckpointPart]) -> dict[int, list[str]]:
    """Return by rank the names of the files that count and are not in storage yet.

    A rank that brought nothing that counts is in it with no names: its share only has to be removed. Shares that a
    user's own function uploads, or that lie elsewhere, are not in it.
    """
    counting = merge(parts)
    uploading = {rank for rank, part in parts.items() if part.staged and not part.pending}
    names: dict[int, list[str]] = {rank: [] for rank in sorted(uploading)}
    if counting.elsewhere:
        return names
    for file in counting.files:
        if file.rank in names and not file.name.endswith("/"):
            names[file.rank].append(file.name)
    return names


def next_to_upload(pending: Mapping[Key, PendingCheckpoint]) -> PendingCheckpoint | None:
    """Return the oldest, if its uploads were not ordered yet.

    Only one is uploaded at a time: on a disk that is nearly full newer ones would take the room that the oldest needs,
    none could be committed, and so none deleted.
    """
    oldest = min(pending.values(), key=lambda p: p.key, default=None)
    return oldest if oldest is not None and not oldest.ordered else None


def ready_to_commit(pending: Mapping[Key, PendingCheckpoint]) -> PendingCheckpoint | None:
    """Return the oldest, if all its shares have arrived and it is not being committed yet."""
    oldest = min(pending.values(), key=lambda p: p.key, default=None)
    if oldest is None or not oldest.ordered or oldest.awaited or oldest.committing:
        return None
    return oldest


def next_to_drop(pending: Mapping[Key, PendingCheckpoint], row: int) -> PendingCheckpoint | None:
    """Return the checkpoint that makes room for that of ``row``: the oldest that is not being committed."""
    candidates = [p for p in pending.values() if not p.committing and p.row < row]
    return min(candidates, key=lambda p: p.key, default=None)


def _with_hashes(files: list[FilePart], hashed: list[FilePart]) -> list[FilePart]:
    known = {file.name: file for file in hashed}
    return [known.get(file.name, file) for file in files]
