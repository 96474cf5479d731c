"""Leftovers of one run: checkpoints beyond retention, unfinished ones, staged and temporary files.

Nothing is deleted without the lease of the run, so neither a live run nor one that is just starting is touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from powertrain.checkpoint import cleanup, committed, retention
from powertrain.checkpoint.contents import TOP
from powertrain.errors import PowertrainError, RunInUseError
from powertrain.run.record.lease import Lease, LeaseHolder, current_holder
from powertrain.storage import Storage
from powertrain.storage.base import (
    ABANDONED_TIMEOUT_S,
    RECORD_BYTES_LIMIT,
    TEMPORARY_PREFIX,
    is_abandoned,
    is_alive,
)
from powertrain.storage.files.descriptors import remove_tree
from powertrain.storage.files.private_roots import KEPT

Kind = Literal[
    "checkpoint",
    "unfinished checkpoint",
    "staging",
    "temporary file",
    "runtime directory",
    "shared memory",
    "data cache",
]
#: The staging area of a run beside its other files, see ``run.record.directories``.
_STAGING = ".staging"


@dataclass(frozen=True)
class Leftover:
    """Something to delete: what it is, where, its size, and why it is not needed."""

    kind: Kind
    path: str
    bytes: int
    reason: str


@dataclass
class RunLeftovers:
    """The leftovers of one run; ``in_use`` says why they are not to be touched, ``notes`` what was passed over."""

    run: str
    in_use: str = ""
    items: list[Leftover] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _CheckpointSettings(msgspec.Struct, frozen=True):
    """The part of ``run.json`` that retention goes by."""

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"


class _RunSettings(msgspec.Struct, frozen=True):
    checkpoint_config: _CheckpointSettings | None = None
    shared_storage: bool = False


class _RunRecord(msgspec.Struct, frozen=True):
    run_config: _RunSettings


#: Raised for a ``run.json`` that is missing or damaged.
_UNREADABLE = (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _settings(place: Storage) -> _RunSettings:
    data = place.get("run.json", limit=RECORD_BYTES_LIMIT)
    return msgspec.json.decode(data, type=_RunRecord).run_config


def find_leftovers(name: str, place: Storage, *, is_trial: bool = False) -> RunLeftovers:
    """Return what could be deleted of a run.

    The checkpoints of a trial are left to its sweep, which may copy them from one trial to another.
    """
    found = RunLeftovers(name)
    holder = current_holder(place)
    if holder is None:
        found.in_use = "it has no lease, so nothing is known about its processes"
        return found
    found.in_use = _why_foreign(place) or why_in_use(holder, socket.gethostname())
    if not found.in_use:
        _look(place, found, is_trial=is_trial, was_released=holder.released)
    return found


def _look(place: Storage, found: RunLeftovers, *, is_trial: bool, was_released: bool) -> None:
    """Add what could be deleted of a run that no process has."""
    if not is_trial:
        _add_beyond_retention(place, found)
    # Processes of a run that was killed may write for a while.
    least_age = 0.0 if was_released else ABANDONED_TIMEOUT_S
    now = time.time()
    found.items += _unfinished(place, least_age, now)
    found.items += _staged(place, least_age, now, found.notes)
    found.items += _temporary(place, now)


def _why_foreign(place: Storage) -> str:
    """Return why a run is another user's: a lease of ours in its directory would keep its owner out."""
    inside = place.local_path("probe")
    if inside is None:
        return ""
    owner = inside.parent.lstat().st_uid
    return f"it belongs to another user (uid {owner})" if owner != os.geteuid() else ""


def why_in_use(holder: LeaseHolder, host: str) -> str:
    """Return why a run may be alive; "" where its last holder gave it back, or was of this host and is gone."""
    if holder.released:
        return ""
    if holder.host != host:
        return f"its last process ({holder.pid} on {holder.host!r}) did not give it back, and cannot be seen from here"
    return f"process {holder.pid} runs it" if is_alive(holder.pid) else ""


# --------------------------------------------------------------------------- finding


def _add_beyond_retention(place: Storage, found: RunLeftovers) -> None:
    try:
        config = _settings(place).checkpoint_config or _CheckpointSettings()
    except _UNREADABLE as error:
        found.notes.append(f"its run.json cannot be read ({error}), so all of its checkpoints are kept")
        return
    damaged = [
        name for name, manifest in committed.all_manifests(place) if isinstance(manifest, PowertrainError)
    ]
    if damaged:
        found.notes.append(f"the manifest of {damaged[0]} cannot be read, so all of its checkpoints are kept")
        return
    if config.num_to_keep is None or config.checkpoint_score_order not in ("max", "min"):
        return
    manifests = committed.with_validations(committed.committed(place), committed.validations(place))
    names = retention.to_delete(
        manifests,
        num_to_keep=max(1, config.num_to_keep),
        score_attribute=config.checkpoint_score_attribute,
        score_order=config.checkpoint_score_order,
    )
    sizes = {manifest.name: manifest.bytes for manifest in manifests}
    reason = f"CheckpointConfig(num_to_keep={config.num_to_keep}) does not keep it"
    found.items += [Leftover("checkpoint", f"{TOP}/{name}", sizes[name], reason) for name in names]


def _unfinished(place: Storage, least_age: float, now: float) -> Iterator[Leftover]:
    """Yield the directories of checkpoints that were never committed."""
    entries = [entry for entry in place.list(TOP) if entry.key.count("/") >= 2]
    committed_names = {name for name, _ in committed.all_manifests(place)}
    for name in sorted({entry.key.split("/")[1] for entry in entries} - committed_names):
        own = [entry for entry in entries if entry.key.split("/")[1] == name]
        try:
            is_old = not least_age or max(map(place.modified, (one.key for one in own))) < now - least_age
        except FileNotFoundError:  # its writer lives
            continue
        if is_old:
            size = sum(entry.size for entry in own)
            yield Leftover("unfinished checkpoint", f"{TOP}/{name}", size, "it was never committed")


def _staged(place: Storage, least_age: float, now: float, notes: list[str]) -> Iterator[Leftover]:
    """Yield the staging areas of earlier starts beside local storage, without those that are kept for the user."""
    inside = place.local_path("staging")
    area = inside.parent / _STAGING if inside is not None else None
    if area is None or area.is_symlink() or not area.is_dir():
        return
    for path in sorted(area.iterdir()):
        if path.is_symlink() or not path.is_dir() or path.lstat().st_uid != os.geteuid():
            continue
        if (path / KEPT).exists():
            notes.append(
                f"{path} has checkpoints that did not reach the storage; remove it when you have them"
            )
            continue
        size, newest = measure(path)
        if not least_age or newest < now - least_age:
            yield Leftover("staging", f"{_STAGING}/{path.name}", size, "its start of the run is over")


def _temporary(place: Storage, now: float) -> Iterator[Leftover]:
    """Yield unfinished writes of dead processes in a local directory."""
    inside = place.local_path("probe")
    if inside is None:
        return
    for folder, _, files in os.walk(inside.parent):
        for file in files:
            if not file.startswith(TEMPORARY_PREFIX):
                continue
            path = Path(folder, file)
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if is_abandoned(file, now - status.st_mtime):
                    key = str(path.relative_to(inside.parent))
                    yield Leftover("temporary file", key, status.st_size, "its writer is gone")


def measure(path: Path) -> tuple[int, float]:
    """Return the bytes of the files below a directory, and the time of its newest change. Links are not followed."""
    size, newest = 0, path.lstat().st_mtime
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                status = Path(folder, name).lstat()
                size += status.st_size if name in files else 0
                newest = max(newest, status.st_mtime)
    return size, newest


# --------------------------------------------------------------------------- deleting


def delete_leftovers(name: str, place: Storage, *, is_trial: bool = False) -> tuple[RunLeftovers, list[str]]:
    """Delete the leftovers of a run, as they are once its lease is held; return them, and errors.

    A run that is in use is left alone; its ``in_use`` says so.
    """
    seen = find_leftovers(name, place, is_trial=is_trial)
    if seen.in_use or not seen.items:
        return seen, []
    is_shared = False  # as the run has it: otherwise its group could not take the lease any more
    with contextlib.suppress(*_UNREADABLE):
        is_shared = _settings(place).shared_storage
    try:
        lease = Lease.take(place, shared=is_shared)
    except RunInUseError as error:
        return RunLeftovers(name, str(error)), []
    found, errors = RunLeftovers(name), list[str]()
    with lease:  # looked at again: the run may have gone on in between
        _look(place, found, is_trial=is_trial, was_released=lease.previous_released)
        for item in found.items:
            try:
                _delete(place, item)
            except (OSError, PowertrainError) as error:
                errors.append(f"{item.path} of {name!r} could not be deleted: {error}")
    return found, errors


def _delete(place: Storage, item: Leftover) -> None:
    if item.kind == "checkpoint":
        cleanup.discard(place, item.path.removeprefix(f"{TOP}/"))
    elif item.kind == "unfinished checkpoint":
        if item.path.removeprefix(f"{TOP}/") not in {name for name, _ in committed.all_manifests(place)}:
            place.delete_tree(item.path)
    elif item.kind == "staging":
        inside = place.local_path("staging")
        assert inside is not None
        remove_tree(inside.parent / item.path, owner=os.geteuid())
        with contextlib.suppress(OSError):  # another one is in it
            (inside.parent / _STAGING).rmdir()
    elif item.kind == "temporary file":
        place.sweep()
