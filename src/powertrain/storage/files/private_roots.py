"""The private directories of a user's runs on this machine: sockets, scratch files, spools.

Their usual names can be guessed (``/tmp/powertrain-1000``), so another user may have made them first. A root is used
only if it belongs to this user, is a directory and no link, and lies where no other user can replace it; its mode is
0700. One that fails is passed over for a directory beside it with a random name, which later processes find by its
owner, or one in the home directory. The run continues, and :func:`take_notices` has a sentence about it.

=============  ==============================================  ==========================================
root           usual place                                     holds
=============  ==============================================  ==========================================
runtime        ``$XDG_RUNTIME_DIR/powertrain``, else           sockets, live runs, claims
               ``$TMPDIR`` or ``/tmp/powertrain-{uid}``
lasting        ``$TMPDIR`` or ``/var/tmp/powertrain-{uid}``    decoded data, spools, staged checkpoints
temporary      ``$TMPDIR`` or ``/tmp/powertrain-{uid}``        downloaded checkpoints
shared memory  ``/dev/shm/powertrain-{uid}``                   staging buffers
=============  ==============================================  ==========================================
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from powertrain.errors import EngineError
from powertrain.storage.files.descriptors import remove_tree
from powertrain.storage.files.ownership import why_not_private, why_unsafe
from powertrain.text.loggers import module_logger

_logger = module_logger(__name__)
_SHARED_MEMORY = "/dev/shm"
#: A directory on disk that survives a restart, by convention.
_LASTING = "/var/tmp"
#: Random bytes in the name of a root that stands in for the usual one, and of one that a single run has for itself.
_RANDOM_BYTES = 4
#: A file of this name marks a directory whose files could not be brought into storage: it is not swept.
KEPT = "KEPT"
#: Tries to make a root that other processes of this user remove while it is empty.
_TRIES = 100
#: Notices about rejected directories that were not reported yet, and those that were.
_notices: dict[str, None] = {}
_reported: set[str] = set()


class RootLocation(NamedTuple):
    """A directory that may hold a root, and the root's usual name in it."""

    base: str
    name: str

    @property
    def path(self) -> Path:
        """The root's usual path."""
        return Path(self.base, self.name)


# --------------------------------------------------------------------------- the four roots


def runtime_root() -> Path:
    """Return the root for sockets, live runs and claims. It may not exist yet: :func:`make_private` makes it."""
    return _choose(_runtime_places())


def runtime_roots() -> list[Path]:
    """Return the roots in which live runs may be found: that of all runs, and those of single runs beside it."""
    root = runtime_root()
    beside = _own_beside(RootLocation(str(root.parent), root.name), _OF_RUN)
    return [one for one in (root, *beside) if one.is_dir()]


def lasting_root() -> Path:
    """Return the root for files on disk that outlive a process: decoded data, spools, staged checkpoints."""
    return _choose(_lasting_places())


def temporary_root() -> Path:
    """Return the root for files that need not outlive the machine: downloaded checkpoints."""
    return _choose(_temporary_places())


def shared_memory_root() -> Path | None:
    """Return the root for shared memory; None where the machine has none that can be named."""
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return None
    return _choose([RootLocation(_SHARED_MEMORY, _user_name())])


def root_above(path: str | Path) -> Path | None:
    """Return the root that ``path`` lies in, of any user's uid: a node may run as another user than the driver."""
    return next((parent for parent in Path(path).parents if _ANY_ROOT.fullmatch(parent.name)), None)


def roots_of_one_run(paths: Sequence[str]) -> list[Path]:
    """Return the roots of single runs that these paths lie in; empty paths are left out."""
    roots = [root_above(path) for path in paths if path]
    return list(dict.fromkeys(root for root in roots if root is not None and "-run-" in root.name))


def remove_empty_parents(path: str | Path) -> None:
    """Remove the directories above ``path`` that are empty, up to the root that it lies in, and that one too.

    A root that a process of this user holds (:func:`holding_root`) stays.
    """
    root = root_above(path)
    if root is None:
        return
    with contextlib.suppress(OSError):  # another run is in it
        for parent in Path(path).parents:
            if parent == root:
                _remove_unheld(root)
                return
            parent.rmdir()


def _remove_unheld(root: Path) -> None:
    """Remove an empty root; one whose name can be guessed only if it is not locked.

    As soon as that one is gone, another user can make a directory of the same name.
    """
    if "-run-" in root.name:
        root.rmdir()
        return
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        root.rmdir()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def holding_root(path: str | Path) -> Iterator[None]:
    """Keep the root that ``path`` lies in from being removed while it is empty, for a path that is made later."""
    root = root_above(path)
    if root is None:
        yield
        return
    descriptor = hold_root(root)
    try:
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            _remove_unheld(root)


#: Patterns of names of other roots than the usual one, by the user's name for them; and of a root of any user.
_STAND_IN = r"{}-[0-9a-f]{{8}}"
_OF_RUN = r"{}-run-[0-9a-f]{{8}}"
_ANY_ROOT = re.compile(r"powertrain-\d{1,10}(-run)?(-[0-9a-f]{8})?")


def _user_name() -> str:
    return f"powertrain-{os.getuid()}"


def _runtime_places() -> list[RootLocation]:
    base = os.environ.get("XDG_RUNTIME_DIR")
    given = [RootLocation(base, "powertrain")] if base and os.access(base, os.W_OK) else []
    return [*given, *_temporary_places()]


def _temporary_places() -> list[RootLocation]:
    return [
        RootLocation(base, _user_name()) for base in dict.fromkeys([tempfile.gettempdir(), "/tmp"])
    ] + _at_home()


def _lasting_places() -> list[RootLocation]:
    usual = _LASTING if os.access(_LASTING, os.W_OK) else tempfile.gettempdir()
    given = os.environ.get("TMPDIR")
    bases = dict.fromkeys([given or usual, usual])
    return [RootLocation(base, _user_name()) for base in bases] + _at_home()


def _at_home() -> list[RootLocation]:
    home = os.path.expanduser("~")
    return [RootLocation(os.path.join(home, ".cache"), _user_name())] if os.path.isabs(home) else []


# --------------------------------------------------------------------------- choosing


def _choose(places: list[RootLocation]) -> Path:
    """Return the first usable root: in each place the usual one, one that stands in for it, or a new such name."""
    problems: list[str] = []
    for place in places:
        reason = why_not_private(place.path)
        if not reason:
            if problems:
                note(problems[0], place.path)
            return place.path
        problems.append(reason)
        if not why_unsafe(place.base) and os.access(place.base, os.W_OK):
            chosen = next(_own_beside(place, _STAND_IN), None) or _make_stand_in(place)
            note(reason, chosen)
            return chosen
    raise EngineError(
        f"No private directory is available for sockets and scratch files: {'; '.join(problems)}. Set "
        "XDG_RUNTIME_DIR and TMPDIR to a directory that belongs to you and that others cannot write to."
    )


def _own_beside(place: RootLocation, *patterns: str) -> Iterator[Path]:
    """Yield the roots of other names in ``place`` that are this user's, in one order for all processes."""
    known = [re.compile(pattern.format(re.escape(_user_name()))) for pattern in patterns]
    try:
        names = sorted(os.listdir(place.base))
    except OSError:
        return
    for name in names:
        if any(one.fullmatch(name) for one in known) and not why_not_private(Path(place.base, name)):
            yield Path(place.base, name)


def _make_stand_in(place: RootLocation) -> Path:
    made = Path(place.base, f"{_user_name()}-{secrets.token_hex(_RANDOM_BYTES)}")
    made.mkdir(mode=0o700)
    first = next(_own_beside(place, _STAND_IN), made)
    if first != made:  # another process was making one at the same time: all take the first
        with contextlib.suppress(OSError):
            made.rmdir()
    return first


# --------------------------------------------------------------------------- making


def make_private(directory: Path) -> Path:
    """Make a directory for this user only, and its parents; returns it.

    Raises:
        EngineError: It is a link, belongs to another user, or can be replaced by one.
    """
    for tries_left in reversed(range(_TRIES)):
        if reason := why_not_private(directory):
            raise EngineError(
                f"Sockets and scratch files would not be safe in {str(directory)!r}: {reason}. Remove it, or set "
                "XDG_RUNTIME_DIR or TMPDIR to a directory of your own."
            )
        try:
            directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            if _close_to_others(directory):
                return directory
        except FileNotFoundError as error:  # another process of this user has removed it, which was empty
            if not tries_left:
                raise unusable(directory, error) from error
        except OSError as error:
            raise unusable(directory, error) from error
    raise EngineError(
        f"{str(directory)!r} is replaced again and again while it is made. Check which process does that."
    )


def _close_to_others(directory: Path) -> bool:
    """Give the directory the mode 0700; returns False where another user was quicker to make it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return False
        if status.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
        return True
    finally:
        os.close(descriptor)


def unusable(path: Path, error: OSError) -> EngineError:
    """Return the error for a root in which the operating system refuses something."""
    return EngineError(
        f"{path} cannot be used for the sockets, scratch files and claims of this user's runs: {error.strerror}. Set "
        "XDG_RUNTIME_DIR or TMPDIR to a directory of your own that can be written to."
    )


# --------------------------------------------------------------------------- roots of single runs


@contextlib.contextmanager
def root_of_one_run(usual: Path) -> Iterator[Path]:
    """Hold a new root beside the ``usual`` one, whose name cannot be guessed, for a run that uses several machines.

    Such a run has the same paths everywhere, and on the other machines no other user can have made this one first.
    Roots of runs that are dead are removed, but for those with files that the user was given the path of (``KEPT``).
    """
    _sweep_roots_of_single_runs(usual)
    root = usual.parent / f"{_user_name()}-run-{secrets.token_hex(_RANDOM_BYTES)}"
    descriptor = hold_root(root)
    try:
        yield root
    finally:
        with contextlib.suppress(OSError):  # it keeps data that storage did not accept
            root.rmdir()
        os.close(descriptor)


def hold_root(root: Path) -> int:
    """Make a root where it is absent, and lock it together with other processes of this user that use it.

    Until the descriptor that is returned is closed, no other process of this user removes it. Raises
    :class:`EngineError` as :func:`make_private` does.
    """
    for _ in range(_TRIES):
        make_private(root)
        try:
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks, or a sweep that has it right now
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and os.path.samestat(os.lstat(root), status):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
    raise EngineError(
        f"{str(root)!r} is removed again and again while it is made. Check which process does that."
    )


def _sweep_roots_of_single_runs(usual: Path) -> None:
    for root in _own_beside(RootLocation(str(usual.parent), usual.name), _OF_RUN):
        with contextlib.suppress(OSError):
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not any(root.glob(f"*/*/{KEPT}")):
                    remove_tree(root, owner=os.geteuid())
            finally:
                os.close(descriptor)


# --------------------------------------------------------------------------- notices


def note(reason: str, chosen: Path) -> None:
    """Record a rejected directory for :func:`take_notices`, with the reason and the replacement."""
    message = (
        f"A usual directory for sockets and scratch files was passed over, because {reason}. {str(chosen)!r} is used "
        "instead."
    )
    if message not in _reported:
        _notices[message] = None


def take_notices() -> list[str]:
    """Return the rejected directories since the last call, one sentence each. Each is returned once per process."""
    taken = list(_notices)
    _reported.update(taken)
    _notices.clear()
    return taken


def log_notices() -> None:
    """Log the rejected directories, for callers that have no run to report them to."""
    for message in take_notices():
        _logger.warning("%s", message)
