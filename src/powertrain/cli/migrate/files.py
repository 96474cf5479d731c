"""Programs and notebooks on disk: found, read with their encoding, and replaced in one step."""

from __future__ import annotations

import difflib
import io
import os
import re
import secrets
import shutil
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from powertrain.cli.migrate.edits import apply_edits
from powertrain.cli.migrate.notebooks import NotebookError, as_rewriting
from powertrain.cli.migrate.rewriting import MigrationRemark, rewrite
from powertrain.errors import ArgumentError
from powertrain.text.printable import escape_controls

_NOTEBOOK = ".ipynb"
#: Lines as Python and editors count them: a form feed ends none.
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
#: Directories with programs of other people.
_FOREIGN = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"})


@dataclass(frozen=True)
class MigratedFile:
    """One file: its text before and after, remarks for a person, and why it was skipped."""

    path: Path
    before: str = ""
    after: str = ""
    remarks: list[MigrationRemark] = field(default_factory=list)
    error: str = ""
    encoding: str = "utf-8"

    @property
    def has_changed(self) -> bool:
        return self.before != self.after

    @property
    def diff(self) -> str:
        """The changes in unified form."""
        before, after = (_LINE.findall(text) for text in (self.before, self.after))
        name = escape_controls(str(self.path))
        lines = difflib.unified_diff(before, after, name, name)
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


def find_files(path: Path) -> list[Path]:
    """Return the programs and notebooks of a directory, or the file itself. Links to directories are not followed.

    Raises:
        ArgumentError: There is no such file or directory.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ArgumentError(
            f"There is no file or directory {str(path)!r}. Give a program or a directory of programs."
        )
    return list(_below(path))


def _below(directory: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if name not in _FOREIGN and not name.startswith("."))
        for file in sorted(files):
            if file.endswith((".py", _NOTEBOOK)) and not file.startswith("."):
                yield Path(folder, file)


def migrate_file(path: Path) -> MigratedFile:
    """Read a file and rewrite its text; the file itself stays as it is."""
    try:
        text, encoding = _read(path)
        rewriting = as_rewriting(text) if path.suffix == _NOTEBOOK else rewrite(text)
    except SyntaxError as error:
        place = f" (line {error.lineno})" if error.lineno else ""
        return MigratedFile(path, error=f"it is not a program of this version of Python: {error.msg}{place}")
    except (UnicodeDecodeError, LookupError) as error:
        return MigratedFile(path, error=f"its encoding is wrong: {error}")
    except (NotebookError, RecursionError, ValueError) as error:
        return MigratedFile(path, error=str(error) or type(error).__name__)
    except OSError as error:
        return MigratedFile(path, error=error.strerror or str(error))
    return MigratedFile(path, text, apply_edits(text, rewriting.edits), rewriting.remarks, "", encoding)


def _read(path: Path) -> tuple[str, str]:
    """Return the text of a file with its own line ends, and its encoding."""
    data = path.read_bytes()
    encoding = "utf-8"
    if path.suffix != _NOTEBOOK:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def write_file(migrated: MigratedFile) -> None:
    """Replace a file by its new text in one step, with its mode; a link stays a link to the file.

    Raises:
        OSError: It cannot be written, or has changed since it was read; it is as it was then.
    """
    path = Path(os.path.realpath(migrated.path))
    if path.read_bytes() != migrated.before.encode(migrated.encoding):
        raise OSError(0, "it was changed while it was being read; run this again", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(migrated.after.encode(migrated.encoding))
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
