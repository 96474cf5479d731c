"""Which run is meant: by a path, an address, or a bare name, the same for every verb."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from powertrain.cli.ls import default_storage, real_path, run_names
from powertrain.engine.local import runtime_root
from powertrain.errors import StorageError
from powertrain.run import control
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import without_secrets

#: What only runs have below their directory: most have all of these.
_OF_A_RUN = ("journal", "telemetry", "lease")
#: Names that are told to somebody who asked for one that is not there.
_NAMES_TOLD = 10


@dataclass(frozen=True)
class FoundRun:
    """A run, where it is kept, and how to reach it where it is under way on this machine."""

    name: str
    place: Storage
    live: control.LiveRun | None = None

    @property
    def places(self) -> list[Storage]:
        """Where its journal and its logs are to be found. On storage without real files, those of a run under way on
        this machine grow in a directory of this machine, which comes first and is gone when the run has ended."""
        files = self.live.card.files if self.live is not None else ""
        growing = [open_storage(files)] if files and files != self.place.uri else []
        return [*growing, self.place]


def find_run(run: str, storage: str = "") -> FoundRun:
    """The run that is meant; raises :class:`StorageError` that says where was looked, where there is none.

    With a storage path it is the run of that name there. A run with a slash, or ".", is itself a path or an address. A
    bare name is looked for among the runs under way on this machine, then in the default storage path.
    """
    if not run:
        raise StorageError("The name of the run is empty. See 'powertrain ls' for those that are there.")
    live = control.live_runs(runtime_root())
    if storage:
        return _in_storage(run, open_storage(storage), live)
    if "/" in run or run in (".", ".."):
        return _at_path(run, live)
    named = [one for one in live if one.card.name == run]
    if len(named) > 1:
        paths = ", ".join(without_secrets(one.card.path) for one in named)
        raise StorageError(f"{len(named)} runs named {run!r} are under way: {paths}. Name one by its path.")
    if named:
        return FoundRun(run, _place_of(named[0].card), named[0])
    return _in_storage(run, open_storage(default_storage()), live)


def _place_of(card: control.Card) -> Storage:
    """Where a live run is kept; one on a file system of its user's own has only its growing files to be seen here."""
    try:
        return open_storage(card.path)
    except StorageError:
        return open_storage(card.files)


def _at_path(run: str, live: Iterable[control.LiveRun]) -> FoundRun:
    place = open_storage(run.rstrip("/") or "/")
    found = FoundRun(_name_at(place.uri), place, _of_path(live, place.uri))
    if found.live is None and not _is_run(place):
        raise StorageError(
            f"There is no run at {without_secrets(run)!r}: it has no journal. Give the directory that holds journal/."
        )
    return found


def _in_storage(run: str, place: Storage, live: list[control.LiveRun]) -> FoundRun:
    own = place.child(run)
    found = FoundRun(run, own, _of_path(live, own.uri))
    if found.live is None and not _is_run(own):
        raise StorageError(_unknown(run, place, [one.card.name for one in live]))
    return found


def _of_path(live: Iterable[control.LiveRun], path: str) -> control.LiveRun | None:
    return next((one for one in live if real_path(one.card.path) == real_path(path)), None)


def _name_at(path: str) -> str:
    """The name of the run at a path or an address: what follows a "?" in an address is none of it."""
    address = path.partition("?")[0] if "://" in path else path
    return address.rstrip("/").rpartition("/")[2]


def _is_run(place: Storage) -> bool:
    return any(place.list(prefix) for prefix in _OF_A_RUN)


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
