"""Files of data: found by path, directory, pattern or address, and opened from any process.

A directory stands for all files below it, except those whose own or whose directory's name begins with "." or "_"
(unfinished writes, ``_SUCCESS``). Files come sorted by their path, whatever order they were named in, so that the same
data has the same order on every machine and after every restart.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from powertrain.data.arguments import ODD, path_text, shown, texts, values_of
from powertrain.data.datasource.partitioning import Partitioning, below
from powertrain.data.options.files import FileOptions
from powertrain.data.sources.files.object_files import list_objects, objects_at, open_object
from powertrain.errors import DataError, StorageError
from powertrain.storage.addresses import OBJECT_STORES, parse, without_secrets

if TYPE_CHECKING:
    import pyarrow as pa

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
#: Concurrent requests for small pieces of different objects.
_CONCURRENT = 16

_T = TypeVar("_T")


@dataclass(frozen=True)
class DataFile:
    """One file of data."""

    #: Passed to open it: an absolute path, an address, or a path of the given file system.
    path: str
    #: Its path below the given one, for people and fingerprints: the same when all is moved elsewhere.
    name: str
    size: int
    #: Columns that its path gives; None for those of "key=value" directories.
    columns: tuple[tuple[str, str | None], ...] | None = None

    @property
    def shown(self) -> str:
        return without_secrets(self.path)

    @property
    def partitions(self) -> dict[str, str | None]:
        """Values from the directories of the path, for all rows of the file."""
        return dict(self.columns) if self.columns is not None else Partitioning().values(self.name)


@dataclass(frozen=True)
class FilePaths:
    """The requested files. Relative paths are made absolute at once, because ranks have other working directories."""

    paths: tuple[str, ...]
    #: Accepted file extensions, without the dot; None for all.
    extensions: tuple[str, ...] | None = None
    #: True where individually named files are accepted with any extension.
    only_in_directories: bool = False
    filesystem: Any = None
    options: FileOptions = field(default_factory=FileOptions)

    @property
    def is_local(self) -> bool:
        """True when all files are on a disk of this machine."""
        return self.filesystem is None and not any(is_object(path) for path in self.paths)

    @property
    def cache_key(self) -> str:
        """The part of a source's cache key that says where files are and which columns their paths give."""
        return f"{self.paths}/{self.options.column_key}"


def file_paths(
    paths: Paths,
    file_extensions: Sequence[str] | str | None,
    *,
    usual: Sequence[str] | None = None,
    filesystem: Any = None,
    options: FileOptions | None = None,
) -> FilePaths:
    """Return the selection given by the arguments of a ``read_...`` function. Without extensions, the ``usual`` ones
    hold for directories and patterns."""
    what = "Give a file, a directory, a pattern, an address, or a list of these."
    given = [paths] if isinstance(paths, (str, os.PathLike)) else values_of("paths", paths, what)
    if not given:
        raise DataError("No path of data was given: the list of paths is empty. Name a file or a directory.")
    found = [path_text("paths", path) for path in given]
    listed = texts("file_extensions", file_extensions, "Give endings such as ['parquet'].")
    chosen = usual if listed is None else listed
    return FilePaths(
        tuple(_absolute(path, filesystem) for path in found),
        None if chosen is None else tuple(each.lstrip(".").lower() for each in chosen),
        only_in_directories=listed is None,
        filesystem=as_arrow_filesystem(filesystem),
        options=options or FileOptions(),
    )


def is_object(path: str) -> bool:
    """Return True for an address in an object store."""
    return "://" in path and path.partition("://")[0].lower() in OBJECT_STORES


def _absolute(path: str, filesystem: Any) -> str:
    if filesystem is not None:
        return path.partition("://")[2] if "://" in path else path
    if is_object(path):
        return path
    if path.startswith("file://"):
        return os.path.abspath(unquote(urlsplit(path).path))
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", path):
        raise DataError(
            f"The path {path!r} cannot be read: {path.partition(':')[0]!r} is not a supported scheme "
            f"(file, {', '.join(OBJECT_STORES)}). Give filesystem=..., a pyarrow or fsspec file system that has it."
        )
    return os.path.abspath(os.path.expanduser(path))


def as_arrow_filesystem(filesystem: Any) -> Any:
    """Return a pyarrow file system; raise :class:`DataError` for anything but one of pyarrow or fsspec."""
    if filesystem is None:
        return None
    from pyarrow import fs

    if isinstance(filesystem, fs.FileSystem):
        return filesystem
    if _is_fsspec(filesystem):
        handler: Any = fs.FSSpecHandler  # its stub omits its methods
        return fs.PyFileSystem(handler(filesystem))
    raise DataError(
        f"filesystem={shown(filesystem)} is neither a pyarrow.fs.FileSystem nor an fsspec file system. Give one of "
        "these, or leave it out and write the paths as addresses such as 's3://bucket/data'."
    )


def _is_fsspec(filesystem: Any) -> bool:
    try:
        methods = [getattr(filesystem, name) for name in ("open", "info", "find")]
        return all(map(callable, methods)) and bool(filesystem.protocol)
    except ODD:
        return False


# --------------------------------------------------------------------------- finding


def find_files(wanted: FilePaths) -> tuple[DataFile, ...]:
    """Return all data files, sorted by path. Raises :class:`DataError` where there are none.

    A file that several of the given paths name is read as often: its rows come several times in an epoch.
    """
    found = []
    for path in wanted.paths:
        try:
            listed = _listed(path, wanted.filesystem)
        except (OSError, StorageError) as error:
            raise DataError(
                f"The data at {without_secrets(path)!r} cannot be listed: {str(error).rstrip('.')}. Check "
                "the path and who may read it."
            ) from error
        if listed is None and wanted.options.ignores_missing:
            continue
        if listed is None:
            raise DataError(_nothing_at(path, wanted))
        chosen = _chosen(listed, wanted)
        if not chosen:
            raise DataError(_nothing_fits(path, listed, wanted))
        found += chosen
    found = _kept(found, wanted)
    found.sort(key=lambda file: file.path)
    return tuple(found)


def _kept(found: list[DataFile], wanted: FilePaths) -> list[DataFile]:
    """Return the files that the options select, with the columns of their paths."""
    options = wanted.options
    if options.keep is not None:
        kept = set(options.keep([file.path for file in found]))
        found = [file for file in found if file.path in kept]
    if not found:
        raise DataError(
            f"No file is left to read of {', '.join(map(without_secrets, wanted.paths))}: the paths do not exist, or "
            "partition_filter keeps none. Check both."
        )
    if not options.has_partitions:
        return [replace(file, columns=()) for file in found]
    if options.partitioning is not None:
        values = options.partitioning.values
        return [replace(file, columns=tuple(values(_below_base(file, wanted)).items())) for file in found]
    return found


def _below_base(file: DataFile, wanted: FilePaths) -> str:
    partitioning = wanted.options.partitioning
    if partitioning is None or not partitioning.base_dir:
        return file.name
    return below(file.path, _absolute(partitioning.base_dir, wanted.filesystem))


@dataclass(frozen=True)
class _Listed:
    """Return the files of a path: itself, if it is a file, or all files below it or matching its pattern."""

    files: tuple[DataFile, ...]
    is_one_file: bool = False


def _listed(path: str, filesystem: Any) -> _Listed | None:
    if filesystem is not None:
        return _in_filesystem(path, filesystem)
    if is_object(path):
        return _in_bucket(path)
    return _on_disk(path)


def _on_disk(path: str) -> _Listed | None:
    if os.path.isfile(path):
        return _Listed((DataFile(path, os.path.basename(path), os.path.getsize(path)),), True)
    if os.path.isdir(path):
        return _Listed(tuple(_below(path, path)))
    if not glob.has_magic(path):
        return None
    base = _base_of_pattern(path)
    files: list[DataFile] = []
    for match in glob.glob(path, recursive=True):
        if os.path.isdir(match):
            # "**" matches directories as well as the files in them.
            files += [] if path.endswith("**") else _below(match, base)
        else:
            files.append(DataFile(match, _relative(match, base), os.path.getsize(match)))
    return _Listed(tuple({file.path: file for file in files}.values())) if files else None


def _below(directory: str, base: str) -> Iterable[DataFile]:
    for root, _, names in os.walk(directory, onerror=_raise, followlinks=True):
        for name in names:
            path = os.path.join(root, name)
            if os.path.isfile(path):
                yield DataFile(path, _relative(path, base), os.path.getsize(path))


def _raise(error: OSError) -> None:
    raise error


def _relative(path: str, base: str) -> str:
    return os.path.relpath(path, base).replace(os.sep, "/")


def _base_of_pattern(pattern: str) -> str:
    """Return the directory above the first part that has a wildcard."""
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else "")


def _in_bucket(path: str) -> _Listed | None:
    address = parse(path)
    if not glob.has_magic(address.prefix):
        size = objects_at(address.uri).size() if address.prefix else None
        if size is not None:
            return _Listed((DataFile(address.uri, address.prefix.rpartition("/")[2], size),), True)
        below = list_objects(address)
        return _Listed(tuple(DataFile(*each) for each in below)) if below else None
    base = replace(address, prefix=_base_of_pattern(address.prefix))
    tail = address.prefix.removeprefix(base.prefix).lstrip("/")
    fits = pattern_regex(tail)
    matching = tuple(DataFile(*each) for each in list_objects(base) if fits.match(each[1]))
    return _Listed(matching) if matching else None


def _in_filesystem(path: str, filesystem: Any) -> _Listed | None:
    from pyarrow import fs

    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.File:
        return _Listed((DataFile(path, path.rpartition("/")[2], info.size),), True)
    is_pattern = info.type == fs.FileType.NotFound and glob.has_magic(path)
    if info.type == fs.FileType.NotFound and not is_pattern:
        return None
    base = _base_of_pattern(path) if is_pattern else path
    fits = pattern_regex(path.removeprefix(base).lstrip("/")) if is_pattern else re.compile("")
    files = []
    for each in filesystem.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True)):
        name = each.path.lstrip("/").removeprefix(base.strip("/")).lstrip("/")
        if each.type == fs.FileType.File and fits.match(name):
            files.append(DataFile(each.path, name, each.size))
    return _Listed(tuple(files)) if files or not is_pattern else None


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a shell's pattern and all names below its matches: "*" stays within one
    directory, "**" does not."""
    out = ""
    for token in re.findall(r"\*\*/|\*\*|\[[^\]]+\]|.", pattern, re.DOTALL):
        if token == "**/":
            out += "(?:.*/)?"
        elif token == "**":
            out += ".*"
        elif token == "*":
            out += "[^/]*"
        elif token == "?":
            out += "[^/]"
        elif len(token) > 1:
            out += token.replace("[!", "[^", 1).replace("\\", "\\\\")
        else:
            out += re.escape(token)
    return re.compile(f"{out}(?:/.*)?$", re.DOTALL)


def _chosen(listed: _Listed, wanted: FilePaths) -> list[DataFile]:
    if listed.is_one_file:
        file = listed.files[0]
        return [file] if wanted.only_in_directories or _has_ending(file.name, wanted.extensions) else []
    return [
        file
        for file in listed.files
        if not _is_hidden(file.name) and _has_ending(file.name, wanted.extensions)
    ]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in name.split("/"))


def _has_ending(name: str, extensions: Sequence[str] | None) -> bool:
    return extensions is None or any(name.lower().endswith(f".{each}") for each in extensions)


def _nothing_at(path: str, wanted: FilePaths) -> str:
    shown = without_secrets(path)
    if glob.has_magic(parse(path).prefix if is_object(path) else path):
        return (
            f"No file matches the pattern {shown!r}. Check it; '*' stays within one directory, '**' does not."
        )
    return f"There is no data at {shown!r}: no such file or directory.{_beside(path, wanted)} Check the path."


def _beside(path: str, wanted: FilePaths) -> str:
    """Return a description of the parent's contents, if that is cheap to list."""
    parent = os.path.dirname(path)
    if not wanted.is_local or not os.path.isdir(parent):
        return ""
    names = sorted(os.listdir(parent))
    shown = ", ".join(repr(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    return f" {parent!r} holds {shown or 'nothing'}."


def _nothing_fits(path: str, listed: _Listed, wanted: FilePaths) -> str:
    shown = without_secrets(path)
    if not listed.files:
        return f"The directory {shown!r} has no files in it. Check the path, or write the data there first."
    names = sorted(file.name for file in listed.files)
    there = ", ".join(repr(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    if wanted.extensions is None:
        looked_for = "names that begin with neither '.' nor '_'"
    else:
        looked_for = "names that end in " + " or ".join(f"'.{each}'" for each in wanted.extensions)
    return (
        f"No file at {shown!r} is one to read: looked for {looked_for}, and there are {len(names)} files: {there}. "
        "Give file_extensions=[...] with the endings of yours, or name the files."
    )


# --------------------------------------------------------------------------- opening


def open_file(file: DataFile, filesystem: Any = None) -> pa.NativeFile:
    """Return the file, open for random access. Raises ``OSError`` or :class:`StorageError`."""
    import pyarrow as pa

    if filesystem is not None:
        opened: pa.NativeFile = filesystem.open_input_file(file.path)
        return opened
    if is_object(file.path):
        return pa.PythonFile(open_object(file.path, file.size), "r")
    return pa.OSFile(file.path, "rb")


def read_whole(file: DataFile, filesystem: Any = None) -> bytes:
    """Return all bytes of the file."""
    if filesystem is None and is_object(file.path):
        return objects_at(file.path).ranges([(0, file.size)])[0] if file.size else b""
    with open_file(file, filesystem) as opened:
        return bytes(opened.read())


def read_address(address: str, filesystem: Any = None) -> bytes:
    """Return all bytes of the file at a path or an address. Raises ``OSError`` or :class:`StorageError`."""
    path = _absolute(path_text("address", address), filesystem)
    filesystem = as_arrow_filesystem(filesystem)
    if filesystem is None and is_object(path):
        size = objects_at(path).size()
        if size is None:
            raise FileNotFoundError(f"there is no object at {without_secrets(path)}")
        return read_whole(DataFile(path, path, size))
    with open_file(DataFile(path, path, 0), filesystem) as opened:
        return bytes(opened.read())


def read_range(file: DataFile, start: int, stop: int, filesystem: Any = None) -> bytes:
    """Return the bytes from ``start`` to before ``stop``. Raises ``OSError`` where the file has fewer."""
    if start >= stop:
        return b""
    if filesystem is None and is_object(file.path):
        found = bytes(objects_at(file.path).ranges([(start, stop)])[0])
    else:
        with open_file(file, filesystem) as opened:
            opened.seek(start)
            found = bytes(opened.read(stop - start))
    if len(found) != stop - start:
        raise OSError(f"it has fewer than {stop} bytes")
    return found


def read_tail(file: DataFile, length: int, filesystem: Any = None) -> bytes:
    """Return the last bytes of the file, at most ``length``."""
    start = max(0, file.size - length)
    if filesystem is None and is_object(file.path):
        return objects_at(file.path).ranges([(start, file.size)])[0] if file.size else b""
    with open_file(file, filesystem) as opened:
        opened.seek(start)
        return bytes(opened.read(file.size - start))


def for_each(files: Sequence[DataFile], action: Callable[[DataFile], _T]) -> list[_T]:
    """Return the result of ``action`` for each file, in order; for files across a network, several at a time."""
    if not any(is_object(file.path) for file in files):
        return [action(file) for file in files]
    from concurrent.futures import ThreadPoolExecutor

    # obstore has threads anyway from its first use on, so these do not prevent a fork that was possible before.
    with ThreadPoolExecutor(_CONCURRENT, thread_name_prefix="powertrain-inspect") as pool:
        return list(pool.map(action, files))


def unreadable(file: DataFile, error: BaseException) -> DataError:
    """Return the error for a file that could not be opened or read at all."""
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"The file {file.shown!r} is gone: it was there when the data was inspected. Restore it, or start anew."
        )
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DataError(
        f"The file {file.shown!r} cannot be read: {reason.rstrip('.')}. Check who may read it and the disk or network."
    )
