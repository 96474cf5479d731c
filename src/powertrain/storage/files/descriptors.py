"""Opening, making and removing files by directory descriptor, so that no symbolic link is ever followed.

A path is given as a base, which the caller trusts and which may be reached through links, and the parts below it, none
of which may be a link. Each part is opened from the descriptor of the one above it, so a directory that another user
renames or replaces meanwhile cannot lead an operation elsewhere. A link in the way raises ``OSError`` with ``ELOOP``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

#: Levels of directories that are listed below a directory; a run has fewer than ten.
LISTED_LEVELS = 64
#: Directories of a tree that are open at a time while it is removed.
_OPEN_LEVELS = 32
#: Called with the path of a directory right before it is made.
BeforeMaking = Callable[[str], None]
#: Called right after a directory was made, with its parent's descriptor and path.
AfterMaking = Callable[[int, str], None]


def _ignore(*_: object) -> None:
    """Do nothing: the default hook."""


def _directory_flags() -> int:
    return os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def open_directory(
    base: str | Path,
    parts: Sequence[str] = (),
    *,
    make: bool = False,
    before_making: BeforeMaking = _ignore,
    after_making: AfterMaking = _ignore,
) -> Iterator[int]:
    """Hold a descriptor of the directory ``parts`` below ``base``; with ``make`` missing ones are made.

    ``base`` itself must exist, and links on the way to it are followed.
    """
    descriptor = _open_base(base)
    try:
        path = os.fspath(base)
        for part in parts:
            path = os.path.join(path, part)
            below = _open_part(descriptor, part, path, make, before_making, after_making)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _open_base(base: str | Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(base, flags)
    except PermissionError:
        if not hasattr(os, "O_PATH"):
            raise
        return os.open(base, flags | os.O_PATH)


def _open_part(
    parent: int, name: str, path: str, make: bool, before_making: BeforeMaking, after_making: AfterMaking
) -> int:
    try:
        return _open_readable(name, parent, path)
    except FileNotFoundError:
        if not make:
            raise
    before_making(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
        after_making(parent, os.path.dirname(path))
    return _open_readable(name, parent, path)


def _open_readable(name: str, parent: int, path: str) -> int:
    """Open a directory; one without read permission as a mere path (``O_PATH``)."""
    try:
        return _open_named(name, _directory_flags(), 0, parent, path)
    except PermissionError:
        if not hasattr(os, "O_PATH"):
            raise
        return _open_named(name, _directory_flags() | os.O_PATH, 0, parent, path)


def files_below(directory: int, prefix: str = "", *, skips_deeper: bool = False) -> Iterator[tuple[str, int]]:
    """Yield name and size of all that is not a directory below ``directory``, with ``prefix`` before each name.

    Links are not followed, but yielded themselves. Entries that vanish meanwhile are left out. A directory
    more than :data:`LISTED_LEVELS` below ``directory`` raises ``OSError`` with ``ENAMETOOLONG``, or is left out with
    ``skips_deeper``: each level costs an open descriptor.
    """
    names: list[str] = []
    # The way down: the descriptor of each directory, its prefix and the directories in it that are not listed yet.
    levels = [(directory, prefix, names)]
    try:
        yield from _files_in(directory, prefix, names)
        while levels:
            above, prefix, names = levels[-1]
            if not names:
                levels.pop()
                if levels:
                    os.close(above)
                continue
            name = names.pop()
            inner = f"{prefix}{name}/"
            if len(levels) > LISTED_LEVELS:
                if skips_deeper:
                    continue
                raise OSError(
                    errno.ENAMETOOLONG, f"directories are nested more than {LISTED_LEVELS} levels deep", inner
                )
            try:
                below = os.open(name, _directory_flags(), dir_fd=above)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue  # removed or replaced while we looked, or not for this user to read
            names = []
            levels.append((below, inner, names))
            yield from _files_in(below, inner, names)
    finally:
        for descriptor, *_ in levels[1:]:
            os.close(descriptor)


def _files_in(directory: int, prefix: str, below: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the files of one directory for :func:`files_below`, and add its subdirectories to ``below``."""
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
                else:
                    yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size


def open_file(parent: int, name: str, path: str, flags: int, mode: int = 0o666) -> int:
    """Return a descriptor of the regular file ``name`` in the directory ``parent``; ``path`` is for error messages.

    Anything but a regular file is refused with ``EINVAL``, without waiting for the other end of a pipe.
    """
    return _open_regular(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode, parent, path)


def _open_regular(name: str, flags: int, mode: int, parent: int | None, path: str) -> int:
    descriptor = _open_named(name, flags, mode, parent, path)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "not a regular file", path)
    os.set_blocking(descriptor, True)
    return descriptor


def _open_named(name: str, flags: int, mode: int, parent: int | None, path: str) -> int:
    """``os.open`` below a descriptor, whose errors carry the whole path."""
    try:
        return os.open(name, flags, mode, dir_fd=parent)
    except OSError as error:
        # Linux returns ENOTDIR for a link where a directory was requested: name the link.
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(name, parent):
            raise OSError(errno.ELOOP, "a symbolic link is not followed here", path) from error
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error


def _is_link(name: str, parent: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


def open_below(path: str | Path, below: int, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of the regular file ``path``, whose last ``below`` parts may not be links.

    With ``os.O_CREAT`` missing directories are made.
    """
    with _open_parent(path, below, make=bool(flags & os.O_CREAT)) as (parent, name):
        return open_file(parent, name, os.fspath(path), flags, mode)


def open_regular(path: str | Path) -> int:
    """Return a descriptor to read the regular file that ``path`` is or leads to: links are followed.

    For files of which the caller has made links itself. Anything else is refused as :func:`open_file` does.
    """
    return _open_regular(
        os.fspath(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, None, os.fspath(path)
    )


def open_for_append(path: str | Path, below: int, mode: int = 0o666, *, fresh: bool = False) -> int:
    """Return a descriptor to append to, and read from, the file ``path``, whose last ``below`` parts may not be links.

    Missing directories are made. With ``fresh`` the file is a new one. A link, or a file with a second name, which may
    be one of the user's own that another user has linked to, loses its name here, and a new file takes its place.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    with _open_parent(path, below, make=True) as (parent, name):
        if not fresh:
            try:
                descriptor = open_file(parent, name, os.fspath(path), flags, mode)
                if os.fstat(descriptor).st_nlink == 1:
                    return descriptor
                os.close(descriptor)
            except OSError as error:
                # A link or a pipe is replaced. A file that may not be opened belongs to another user, and stays.
                if error.errno not in (errno.ELOOP, errno.EINVAL, errno.ENXIO):
                    raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        return open_file(parent, name, os.fspath(path), flags | os.O_EXCL, mode)


def open_log(path: str) -> int:
    """Return a descriptor to append to a log of a run, from whose directory on no link is followed; -1 for no path."""
    if not path:
        return -1
    parts = Path(path).parts
    above = max((number for number, part in enumerate(parts) if part == "logs"), default=len(parts) - 1)
    return open_for_append(path, min(len(parts) - above + 1, len(parts) - 1), 0o644)


@contextlib.contextmanager
def _open_parent(path: str | Path, below: int, *, make: bool) -> Iterator[tuple[int, str]]:
    base, *parts, name = str(Path(path)).rsplit("/", below)
    if make:
        os.makedirs(base or "/", exist_ok=True)
    with open_directory(base or "/", parts, make=make) as parent:
        yield parent, name


def remove_tree(path: str | Path, *, owner: int | None = None) -> None:
    """Remove a directory and all below it. Absent is fine, and a link is removed itself, not its target.

    ``owner`` leaves the directory alone unless it belongs to that uid. Raises the first ``OSError``, after removing
    everything else.
    """
    parent, name = os.path.split(os.path.abspath(path))
    try:
        with open_directory(parent) as above:
            remove_tree_at(above, name, owner=owner)
    except FileNotFoundError:
        return


def remove_tree_at(parent: int, name: str, *, owner: int | None = None) -> None:
    """Remove the entry ``name`` of the directory ``parent``, as :func:`remove_tree` does.

    Trees of any depth are removed with at most :data:`_OPEN_LEVELS` descriptors. The directory above a deep one is
    opened again as its "..", which must be the same directory as before: else it was moved away meanwhile, and
    removing stops.
    """
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if owner is not None and status.st_uid != owner:
            return
        top = _remove_or_enter(parent, name)
    except FileNotFoundError:
        return
    if top is None:
        return
    levels = [top]
    try:
        while levels:
            level = levels[-1]
            if level.names:
                _remove_next(levels)
                continue
            above = parent if len(levels) == 1 else _reopen_above(levels)
            levels.pop().close()
            try:
                os.rmdir(level.name, dir_fd=above)
            except FileNotFoundError:
                continue
            except OSError as error:
                problem = level.problem or error
                if not levels:
                    raise problem from None
                levels[-1].problem = levels[-1].problem or problem
    finally:
        for level in levels:
            level.close()


class _Level:
    """A directory that is being emptied."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name, self.descriptor = name, descriptor
        self.identity = _identity(descriptor)
        with os.scandir(descriptor) as entries:
            #: Entries that are left to remove.
            self.names = [entry.name for entry in entries]
        #: The first error of an entry that could not be removed.
        self.problem: OSError | None = None

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _remove_or_enter(parent: int, name: str) -> _Level | None:
    """Remove ``name`` from ``parent``; a directory is opened to be emptied first, and returned."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return None
    descriptor = os.open(name, _directory_flags(), dir_fd=parent)
    try:
        return _Level(name, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _remove_next(levels: list[_Level]) -> None:
    """Remove an entry of the lowest level; a directory becomes the new lowest level."""
    level = levels[-1]
    try:
        entered = _remove_or_enter(level.descriptor, level.names.pop())
    except FileNotFoundError:
        return
    except OSError as error:
        level.problem = level.problem or error
        return
    if entered is not None:
        levels.append(entered)
        if len(levels) > _OPEN_LEVELS:
            levels[-1 - _OPEN_LEVELS].close()


def _reopen_above(levels: list[_Level]) -> int:
    """Return a descriptor of the directory above the lowest level; raises ``OSError`` where that is another one now."""
    lowest, above = levels[-1], levels[-2]
    if above.descriptor < 0:
        descriptor = os.open("..", _directory_flags(), dir_fd=lowest.descriptor)
        if _identity(descriptor) != above.identity:
            os.close(descriptor)
            raise OSError(errno.EBUSY, "the directory was moved while it was being removed", lowest.name)
        above.descriptor = descriptor
    return above.descriptor


def remove_quietly(path: str | Path, *, owner: int | None = None) -> None:
    """Remove scratch files like :func:`remove_tree`, but ignore errors."""
    with contextlib.suppress(OSError):
        remove_tree(path, owner=owner)
