"""Find a run or sweep by path, address or name, the same for every verb."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from powertrain.config.run import RunConfig
from powertrain.errors import StorageError
from powertrain.run.remote import protocol
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import strip_secrets, without_secrets
from powertrain.storage.base import RECORD_BYTES_LIMIT, TEMPORARY_PREFIX
from powertrain.storage.files.descriptors import open_below
from powertrain.storage.files.private_roots import runtime_roots

#: Directories that only runs have: most have all of these.
_RUN_DIRECTORIES = ("journal", "telemetry", "lease")
#: Seconds to wait for storage when its credentials from the environment are checked.
_ANSWER_TIMEOUT_S = 3.0
#: Bytes of a journal's first line, which tells runs from sweeps.
_FIRST_LINE_BYTES = 4096
#: Names listed in the error for an unknown run.
_NAMES_SHOWN = 10


@dataclass(frozen=True)
class FoundRun:
    """A run or sweep: its storage, and its connection if it is live on this machine."""

    name: str
    place: Storage
    live: protocol.LiveRun | None = None
    is_sweep: bool = False

    @property
    def noun(self) -> str:
        """The noun for messages."""
        return "sweep" if self.is_sweep else "run"

    @property
    def places(self) -> list[Storage]:
        """Storages that hold its journal and logs. On storage without real files, those of a live run grow in a
        directory of this machine, which comes first and is removed when the run has ended."""
        files = self.live.card.files if self.live is not None else ""
        growing = [open_storage(files)] if files and files != self.place.uri else []
        return [*growing, self.place]


def find_run(run: str, storage: str = "") -> FoundRun:
    """Return the named run; raises :class:`StorageError` with the searched locations if there is none.

    With a storage path it is the run of that name there. A run with a slash, or ".", is itself a path or an address; if
    there is none, it is SWEEP/TRIAL. A bare name is looked up among the live runs of this machine, then in the
    default storage path.
    """
    found = find_run_or_sweep(run, storage)
    if found.is_sweep:
        raise StorageError(
            f"{found.name!r} is a sweep, and this command takes a run. Name one of its trials: {found.name}/TRIAL, "
            f"or its path. 'powertrain show {found.name}' lists them."
        )
    return found


def find_run_or_sweep(run: str, storage: str = "") -> FoundRun:
    """Return the named run or sweep, like :func:`find_run`."""
    found = _find(run, storage)
    return replace(found, is_sweep=_is_sweep(found))


def _find(run: str, storage: str) -> FoundRun:
    if not run:
        raise StorageError("The name of the run is empty. 'powertrain ls' lists the runs.")
    live = protocol.live_runs(*runtime_roots())
    if storage:
        return _in_storage(run, open_storage(storage), live)
    if "/" in run or run in (".", ".."):
        return _at_path(run, live) or _trial_of_sweep(run, live)
    named = [one for one in live if one.card.name == run]
    if len(named) > 1:
        paths = ", ".join(without_secrets(one.card.path) for one in named)
        raise StorageError(f"{len(named)} active runs are named {run!r}: {paths}. Name one by its path.")
    if named:
        return FoundRun(run, _place_of(named[0].card), named[0])
    return _in_storage(run, open_storage(default_storage()), live)


def _place_of(card: protocol.Card) -> Storage:
    """Return the storage of a live run; for a user's own file system, only its growing files are accessible here."""
    try:
        place = open_storage(card.path)
        if card.has_credentials:  # the environment may have others that do as well
            place.within(_ANSWER_TIMEOUT_S).list("lease")
        return place
    except (StorageError, OSError):
        return open_storage(card.files)


def _at_path(run: str, live: Iterable[protocol.LiveRun]) -> FoundRun | None:
    """Return the run at a path or an address; None if there is none."""
    place = open_storage(run.rstrip("/") or "/")
    found = FoundRun(_name_at(place.uri), place, _of_path(live, place.uri))
    return found if found.live is not None or _is_run(place) else None


def _trial_of_sweep(run: str, live: list[protocol.LiveRun]) -> FoundRun:
    """Return the trial SWEEP/TRIAL of a live sweep on this machine or of one in the default storage path."""
    sweep, _, trial = run.rstrip("/").rpartition("/")
    if not _is_name_of_trial(sweep, trial):
        raise StorageError(
            f"There is no run at {without_secrets(run)!r}: it has no journal. Give the directory that holds journal/."
        )
    named = [_place_of(one.card) for one in live if one.card.name == sweep]
    default = open_storage(default_storage())
    for place in [*named, default.child(sweep)]:
        own = place.child(trial)
        found = FoundRun(trial, own, _of_path(live, own.uri))
        if found.live is not None or _is_run(own):
            return found
    where = named[0] if named else default.child(sweep)
    if named or _is_run(where):
        raise StorageError(_unknown(trial, where, []))
    raise StorageError(
        f"There is no run at {run!r}: it has no journal. Nor is there a sweep {sweep!r} in "
        f"{without_secrets(default.uri)}. Give the directory that holds journal/, or SWEEP/TRIAL."
    )


def _is_name_of_trial(sweep: str, trial: str) -> bool:
    """Return whether both parts can be names, rather than parts of a path or an address."""
    return bool(sweep and trial) and "/" not in sweep and not {sweep, trial} & {".", "..", "~"}


def _in_storage(run: str, place: Storage, live: list[protocol.LiveRun]) -> FoundRun:
    own = place.child(run)
    found = FoundRun(_name_at(run), own, _of_path(live, own.uri))
    if found.live is None and not _is_run(own):
        sweep, _, trial = run.rpartition("/")
        if sweep and _is_run(place.child(sweep)):
            raise StorageError(_unknown(trial, place.child(sweep), []))
        raise StorageError(_unknown(run, place, [one.card.name for one in live]))
    return found


def _of_path(live: Iterable[protocol.LiveRun], path: str) -> protocol.LiveRun | None:
    return next((one for one in live if real_path(one.card.path) == real_path(path)), None)


def _name_at(path: str) -> str:
    """Return the name of the run at a path or an address, without the query of an address."""
    address = path.partition("?")[0] if "://" in path else path
    return address.rstrip("/").rpartition("/")[2]


def _is_run(place: Storage) -> bool:
    return any(place.list(prefix) for prefix in _RUN_DIRECTORIES)


def _is_sweep(found: FoundRun) -> bool:
    if found.live is None:
        return _has_sweep_record(found.place)
    # Its growing journal is read without a request to storage, which this process may not be able to reach.
    files = open_storage(found.live.card.files or found.place.uri)
    for entry in files.list("journal") if files.local_path("journal") is not None else []:
        with contextlib.suppress(OSError), open(_descriptor_of(files, entry.key), "rb") as file:
            if line := file.readline(_FIRST_LINE_BYTES):
                return b'"fact":"sweep_started"' in line
    return False


def _has_sweep_record(place: Storage) -> bool:
    try:
        place.get(SWEEP_RECORD, limit=RECORD_BYTES_LIMIT)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError:  # it exists, and its reader reports the error
        return True
    return True


def _descriptor_of(files: Storage, key: str) -> int:
    path = files.local_path(key)
    assert path is not None
    return open_below(path, len(key.split("/")))


def _unknown(run: str, place: Storage, live: list[str]) -> str:
    names = run_names(place)
    near = difflib.get_close_matches(run, names, _NAMES_SHOWN)
    shown = near or names[:_NAMES_SHOWN]
    hidden = len(names) - len(shown)
    there = f"It has {', '.join(map(repr, shown))}" if shown else "It has no runs"
    more = f" and {hidden} more" if hidden else ""
    going = f"Active on this machine: {', '.join(map(repr, sorted(set(live))))}." if live else ""
    return " ".join(
        part
        for part in (
            f"There is no run {run!r} in {without_secrets(place.uri)}. {there}{more}.",
            going,
            "Name one of its runs, or another storage path with --storage.",
        )
        if part
    )


#: The file that only sweeps have.
SWEEP_RECORD = "sweep.json"
#: Kinds of directories with a journal.
RUN, SWEEP = "run", "sweep"
#: Runs on remote storage that are looked up at the same time.
_CONCURRENT_LOOKUPS = 16


def real_path(path: str) -> str:
    """Return the canonical path or address of a run."""
    return strip_secrets(path) if "://" in path else os.path.realpath(path)


def default_storage() -> str:
    """Return the default storage path."""
    return str(RunConfig().storage_root)


def run_names(place: Storage) -> list[str]:
    """Return names below ``place`` that have a journal, or another file in its place."""
    return names_in(place)[0]


def names_in(place: Storage, known: MutableMapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """Return names below ``place`` that have a journal, or another file in its place; and the sweeps among them.

    Args:
        place: The storage path.
        known: Kinds of names that an earlier call has found, as :func:`kind_of` returns them. On storage without real
            files they are not looked up again, and new ones are added.
    """
    inside = place.local_path("x")
    if inside is not None:  # one run at a time: a run that cannot be listed keeps no other from being listed
        names = sorted(name for name in _directories_in(inside.parent) if _has_journal(place.child(name)))
        return names, [name for name in names if os.path.lexists(inside.parent / name / SWEEP_RECORD)]
    # Not one listing of all objects: checkpoints have many of them.
    kinds = {} if known is None else known
    there = place.directories()
    new = [name for name in there if name not in kinds]
    with ThreadPoolExecutor(_CONCURRENT_LOOKUPS, thread_name_prefix="powertrain-names") as pool:
        found = dict(zip(new, pool.map(lambda name: kind_of(place.child(name)), new), strict=True))
    kinds.update({name: kind for name, kind in found.items() if kind})  # a run without a journal may get one
    for name in set(kinds) - set(there):
        del kinds[name]
    return [name for name in there if kinds.get(name)], [name for name in there if kinds.get(name) == SWEEP]


def kind_of(place: Storage) -> str:
    """Return :data:`RUN` or :data:`SWEEP` for a directory with a journal, or another file in its place; else ""."""
    path = place.local_path(SWEEP_RECORD)
    if path is not None:
        return "" if not _has_journal(place) else SWEEP if os.path.lexists(path) else RUN
    if not place.list("journal"):
        return ""
    return SWEEP if _has_sweep_record(place) else RUN


def _directories_in(path: Path) -> list[str]:
    """Return names of the directories in ``path`` itself, without links and unfinished writes."""
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        entry.name
        for entry in entries
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(TEMPORARY_PREFIX)
    ]


def _has_journal(run: Storage) -> bool:
    """Return whether a run of real storage has a non-empty journal, or another file in its place."""
    path = run.local_path("journal")
    try:
        return path is not None and bool(os.listdir(path))
    except FileNotFoundError:
        return os.path.islink(path or "")
    except OSError:  # a file in its place, or not for this user
        return True
