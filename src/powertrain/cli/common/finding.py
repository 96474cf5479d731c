"""Which run or sweep is meant: by a path, an address, or a name, the same for every verb."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable
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

#: What only runs have below their directory: most have all of these.
_OF_A_RUN = ("journal", "telemetry", "lease")
#: Seconds for storage to answer whether the environment has credentials for it.
_ANSWER_TIMEOUT_S = 3.0
#: Bytes of a journal's first line that tell what it is of.
_FIRST_LINE_BYTES = 4096
#: Names that are told to somebody who asked for one that is not there.
_NAMES_TOLD = 10


@dataclass(frozen=True)
class FoundRun:
    """A run or a sweep, where it is kept, and how to reach it where it is under way on this machine."""

    name: str
    place: Storage
    live: protocol.LiveRun | None = None
    is_sweep: bool = False

    @property
    def noun(self) -> str:
        """What it is, in words."""
        return "sweep" if self.is_sweep else "run"

    @property
    def places(self) -> list[Storage]:
        """Where its journal and its logs are to be found. On storage without real files, those of a run under way on
        this machine grow in a directory of this machine, which comes first and is gone when the run has ended."""
        files = self.live.card.files if self.live is not None else ""
        growing = [open_storage(files)] if files and files != self.place.uri else []
        return [*growing, self.place]


def find_run(run: str, storage: str = "") -> FoundRun:
    """The run that is meant; raises :class:`StorageError` that says where was looked, where there is none.

    With a storage path it is the run of that name there. A run with a slash, or ".", is itself a path or an address; if
    there is none, it is SWEEP/TRIAL. A bare name is looked for among the runs under way on this machine, then in the
    default storage path.
    """
    found = find_run_or_sweep(run, storage)
    if found.is_sweep:
        raise StorageError(
            f"{found.name!r} is a sweep, and this is for runs. Name one of its trials: {found.name}/TRIAL, or its "
            f"path. 'powertrain show {found.name}' lists them."
        )
    return found


def find_run_or_sweep(run: str, storage: str = "") -> FoundRun:
    """As :func:`find_run`, for verbs that know sweeps."""
    found = _find(run, storage)
    return replace(found, is_sweep=_is_sweep(found))


def _find(run: str, storage: str) -> FoundRun:
    if not run:
        raise StorageError("The name of the run is empty. See 'powertrain ls' for those that are there.")
    live = protocol.live_runs(*runtime_roots())
    if storage:
        return _in_storage(run, open_storage(storage), live)
    if "/" in run or run in (".", ".."):
        return _at_path(run, live) or _trial_of_sweep(run, live)
    named = [one for one in live if one.card.name == run]
    if len(named) > 1:
        paths = ", ".join(without_secrets(one.card.path) for one in named)
        raise StorageError(f"{len(named)} runs named {run!r} are under way: {paths}. Name one by its path.")
    if named:
        return FoundRun(run, _place_of(named[0].card), named[0])
    return _in_storage(run, open_storage(default_storage()), live)


def _place_of(card: protocol.Card) -> Storage:
    """Where a live run is kept; one on a file system of its user's own has only its growing files to be seen here."""
    try:
        place = open_storage(card.path)
        if card.has_credentials:  # the environment may have others that do as well
            place.within(_ANSWER_TIMEOUT_S).list("lease")
        return place
    except (StorageError, OSError):
        return open_storage(card.files)


def _at_path(run: str, live: Iterable[protocol.LiveRun]) -> FoundRun | None:
    """The run at a path or an address; None where there is none."""
    place = open_storage(run.rstrip("/") or "/")
    found = FoundRun(_name_at(place.uri), place, _of_path(live, place.uri))
    return found if found.live is not None or _is_run(place) else None


def _trial_of_sweep(run: str, live: list[protocol.LiveRun]) -> FoundRun:
    """The trial that SWEEP/TRIAL names, of a sweep under way on this machine or in the default storage path."""
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
    """Whether two parts of what was given can be names, and not only parts of a path or an address."""
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
    """The name of the run at a path or an address: what follows a "?" in an address is none of it."""
    address = path.partition("?")[0] if "://" in path else path
    return address.rstrip("/").rpartition("/")[2]


def _is_run(place: Storage) -> bool:
    return any(place.list(prefix) for prefix in _OF_A_RUN)


def _is_sweep(found: FoundRun) -> bool:
    if found.live is None:
        return _has_sweep_record(found.place)
    # Its growing journal says it without a request to storage, which may not even be within reach of this process.
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
    except OSError:  # it is there, and whoever reads it says what is wrong with it
        return True
    return True


def _descriptor_of(files: Storage, key: str) -> int:
    path = files.local_path(key)
    assert path is not None
    return open_below(path, len(key.split("/")))


def _unknown(run: str, place: Storage, live: list[str]) -> str:
    names = run_names(place)
    near = difflib.get_close_matches(run, names, _NAMES_TOLD)
    told = near or names[:_NAMES_TOLD]
    hidden = len(names) - len(told)
    there = f"It has {', '.join(map(repr, told))}" if told else "It has no run at all"
    more = f" and {hidden} more" if hidden else ""
    going = f"Under way on this machine: {', '.join(map(repr, sorted(set(live))))}." if live else ""
    return " ".join(
        part
        for part in (
            f"There is no run {run!r} in {without_secrets(place.uri)}. {there}{more}.",
            going,
            "Name one of its runs, or another place with --storage.",
        )
        if part
    )


#: What only sweeps have in their directory.
SWEEP_RECORD = "sweep.json"


def real_path(path: str) -> str:
    """The path or address of a run, the same for all ways that lead to it."""
    return strip_secrets(path) if "://" in path else os.path.realpath(path)


def default_storage() -> str:
    """Where runs go that name no storage path."""
    return str(RunConfig().storage_root)


def run_names(place: Storage) -> list[str]:
    """Names below ``place`` that have a journal, or something in its place."""
    return names_in(place)[0]


def names_in(place: Storage) -> tuple[list[str], list[str]]:
    """Names below ``place`` that have a journal, or something in its place; and those of them that are of sweeps."""
    inside = place.local_path("x")
    if inside is not None:  # one run at a time: a run that cannot be listed keeps no other from being listed
        names = sorted(name for name in _directories_in(inside.parent) if _has_journal(place.child(name)))
        return names, [name for name in names if os.path.lexists(inside.parent / name / SWEEP_RECORD)]
    keys = [entry.key.split("/") for entry in place.list()]
    names = sorted({parts[0] for parts in keys if len(parts) > 2 and parts[1] == "journal"})
    sweeps = {parts[0] for parts in keys if len(parts) == 2 and parts[1] == SWEEP_RECORD}
    return names, [name for name in names if name in sweeps]


def _directories_in(path: Path) -> list[str]:
    """Names of the directories in ``path`` itself, without links and unfinished writes."""
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
    """True where a run of real storage has a journal with something in it, or something else in its place."""
    path = run.local_path("journal")
    try:
        return path is not None and bool(os.listdir(path))
    except FileNotFoundError:
        return os.path.islink(path or "")
    except OSError:  # a file in its place, or not for this user
        return True
